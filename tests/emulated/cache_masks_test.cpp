// Masks of caches that no bounds describe: trees of drafts, prefixes of pictures, chunks, masks by request
// and given positions. Where keys are shared out they are walked without lists.
#include "tests/support/cache_run.hpp"

namespace flashjit::test {
namespace {

struct MaskCase {
  const char *name, *mask;
};

constexpr MaskCase kMasks[] = {
    {"tree",
     "tree: int64 2d; kv < seqlen_kv - seqlen_q || (tree[b, q] >> (kv - (seqlen_kv - seqlen_q)) & 1) == 1"},
    {"mm_prefix",
     "first: int32 2d; last: int32 2d; kv <= q + seqlen_kv - seqlen_q || "
     "(first[b, q] <= kv && kv < last[b, q])"},
    {"chunked", "kv <= q + seqlen_kv - seqlen_q && kv / 96 == (q + seqlen_kv - seqlen_q) / 96"},
    {"causal_if", "flags: int32 1d; flags[b] == 0 || kv <= q + seqlen_kv - seqlen_q"},
    {"positions", "q_pos: int32 2d; kv_pos: int32 2d; kv_pos[b, kv] <= q_pos[b, q]"},
    {"interleaved", "q_pos: int32 2d; kv * 3 + 1 <= q_pos[b, q]"},
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
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace flashjit::test
