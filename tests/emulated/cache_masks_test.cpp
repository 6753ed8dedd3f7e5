// Masks of caches that no bounds describe: trees of drafts, prefixes of pictures, chunks, masks by request
// and given positions. Where keys are shared out they are walked without lists.
#include "flashjit/attention_programs.hpp"
#include "tests/support/cache_run.hpp"

namespace flashjit::test {
namespace {

struct MaskCase {
  std::string name, mask;
};

void PrintTo(const MaskCase& test, std::ostream* out) { *out << test.name; }

const MaskCase kMasks[] = {
    {"tree", to_string(programs::tree())},
    {"mm_prefix", to_string(programs::mm_prefix())},
    {"chunked", to_string(programs::chunked(96))},
    {"causal_if", to_string(programs::causal_if())},
    {"positions", to_string(programs::positions())},
    {"interleaved", to_string(programs::interleaved())},
    {"prefix", to_string(programs::prefix_lm())},
    {"by_head", "heads: int32 1d; heads[h] != 0 || kv / 64 == (q + seqlen_kv - seqlen_q) / 64"},
    {"nothing", "kv / 64 == 1000"},
};

class EmulatedCacheMask : public GpuTestWith<MaskCase> {
 protected:
  static KernelSpec spec(const char* form) {
    return parse_spec(fmt::format("fwd:{}:mask{{{}}}", form, GetParam().mask));
  }
};

TEST_P(EmulatedCacheMask, SharesOutKeysWithoutLists) {
  struct Form {
    const char* spec;
    AttentionShape shape;
  };
  constexpr Form kForms[] = {
      {"bf16:d64:varlen:pages16", {4, 8, 2, 9, 700}},
      {"fp16:d128:cache", {3, 4, 4, 1, 600}},
      {"bf16:d64:pages3", {3, 4, 2, 4, 500}},
      {"bf16:d96:kve4m3:key_scales:varlen:pages16:sinks", {3, 4, 2, 20, 500}},
      {"bf16:d576x512:pages64:shared_kv", {2, 16, 1, 2, 400}},
  };
  TemporaryRuntime runtime;
  for (const Form& form : kForms) {
    const CacheCase test{.spec = spec(form.spec), .shape = form.shape, .family = Family::sm90, .seed = 5};
    const TileConfig config = plan::traits(Family::sm90).heuristic(test.spec, test.shape, gpu().info);
    EXPECT_TRUE(config.split) << to_string(config);
    EXPECT_EQ(runtime.get().list_bytes(test.spec, test.shape), 0u);
    check_cache(runtime.get(), test);
  }
}

/// Many queries have tiles enough, and lists.
TEST_P(EmulatedCacheMask, GivesTheSameWithLists) {
  TemporaryRuntime runtime;
  const CacheCase test{.spec = spec("bf16:d64:varlen:pages16"),
                       .shape = {3, 4, 2, 40, 300},
                       .family = Family::sm90,
                       .seed = 6};
  CacheRun(test).check(runtime.get(), parse_config("sm90:br128:bc64:w8:s2"));
}

INSTANTIATE_TEST_SUITE_P(All, EmulatedCacheMask, testing::ValuesIn(kMasks),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace flashjit::test
