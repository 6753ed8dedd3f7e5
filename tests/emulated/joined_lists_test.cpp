// Lists of keys that an entry of its own joins for the queries of a tile.
#include "tests/support/attention_case.hpp"
#include "tests/support/cache_run.hpp"
#include "tests/support/kv_format_run.hpp"
#include "tests/support/spread.hpp"

namespace flashjit::test {
namespace {

constexpr const char* kNarrowJoin = "sm90:br64:bc64:w4:s2:split:pack_gqa:join_lists";
constexpr const char* kLongJoin = "sm90:br64:bc128:w4:s2:split:pack_gqa:join_lists";
constexpr const char* kLatentJoin = "sm90:br64:bc64:w8:s2:d_split2:split:pack_gqa:join_lists";

struct JoinedCase {
  const char* spec;
  AttentionShape shape;
  std::int64_t top_k;
  std::optional<std::int64_t> changed_keys;  ///< none: keys are random, and some twice in a list
  const char* config;
};

class JoinedLists : public GpuTest {};

// A run has half of the cases (is_drawn()).
TEST_F(JoinedLists, MatchTheReference) {
  const std::vector<JoinedCase> cases = {
      {"bf16:d64:indices", {2, 12, 1, 21, 300}, 100, 12, kNarrowJoin},
      {"fp16:d128:causal:indices", {2, 8, 2, 19, 300}, 90, 40, kLongJoin},
      {"bf16:d64:kvlen:sinks:indices", {3, 3, 1, 18, 200}, 70, 5, kNarrowJoin},
      {"bf16:d64:mask{doc: int32 1d; doc[q] == doc[kv]}:indices", {2, 32, 1, 9, 200}, 130, 7, kLongJoin},
      {"bf16:d576x512:shared_kv:indices", {1, 16, 1, 11, 500}, 200, 20, kLatentJoin},
      {"fp16:d576x512:causal:shared_kv:sinks:indices", {2, 24, 1, 5, 200}, 64, 64, kLatentJoin},
      {"bf16:d64:indices", {1, 8, 1, 3, 40000}, 300, 30, kNarrowJoin},  // more keys than are joined at a time
      {"bf16:d64:indices", {1, 32, 1, 3, 9000}, 3000, 2900, kLongJoin},  // more than a joined list holds
      {"bf16:d64:causal:indices", {2, 12, 2, 21, 300}, 100, {}, kNarrowJoin},
      {"bf16:d576x512:shared_kv:indices", {1, 16, 1, 11, 500}, 200, {}, kLatentJoin},
      {"bf16:d64:indices", {2, 8, 1, 9, 50}, 0, {}, kNarrowJoin},
      {"bf16:d64:varlen:indices", {4, 12, 1, 21, 300}, 100, 12, kNarrowJoin},
      {"fp16:d128:causal:varlen:sinks:indices", {3, 8, 2, 19, 200}, 90, {}, kLongJoin},
      {"bf16:d576x512:varlen:shared_kv:indices", {3, 16, 1, 11, 300}, 150, 20, kLatentJoin},
  };
  TemporaryRuntime runtime;
  for (unsigned i = 0; i < cases.size(); ++i) {
    const auto& [spec, shape, top_k, changed_keys, config] = cases[i];
    if (!is_drawn(fmt::format("{} {}", spec, to_string(shape)), 2)) continue;
    SCOPED_TRACE(fmt::format("{} {}", spec, to_string(shape)));
    AttentionCase test{.spec = parse_spec(spec),
                       .shape = shape,
                       .family = Family::sm90,
                       .layout = static_cast<Layout>(i % 2),
                       .seed = i + 1,
                       .top_k = top_k};
    test.changed_keys = changed_keys;
    AttentionRun(test).check_forward(runtime.get(), parse_config(config));
  }
}

TEST_F(JoinedLists, AreOfCaches) {
  TemporaryRuntime runtime;
  unsigned seed = 0;
  for (const auto& [spec, config] : {std::pair{"bf16:d64:causal:pages16:indices", kNarrowJoin},
                                     std::pair{"fp16:d128:cache:sinks:indices", kNarrowJoin},
                                     std::pair{"bf16:d576x512:causal:pages64:shared_kv:indices", kLatentJoin},
                                     std::pair{"bf16:d64:causal:varlen:pages16:indices", kNarrowJoin}}) {
    SCOPED_TRACE(spec);
    CacheRun({.spec = parse_spec(spec),
              .shape = {3, 10, 1, 7, 190},
              .family = Family::sm90,
              .seed = ++seed,
              .neighbours = true})
        .check(runtime.get(), parse_config(config));
  }
}

TEST_F(JoinedLists, AreOfLatentsThatAreDecoded) {
  TemporaryRuntime runtime;
  for (const auto& [spec, shape, top_k, bc] :
       {std::tuple{"bf16:d576x512:kv{fp8_ds_mla}:shared_kv:indices", AttentionShape{1, 16, 1, 7, 150}, 110,
                   32},
        {"bf16:d576x512:kv{fp8_ds_mla}:causal:shared_kv:pages16:indices", {3, 12, 1, 9, 90}, 75, 32},
        {"fp16:d320:kv{e4m3:g64:fp32:tail64}:shared_kv:cache:indices", {2, 24, 1, 5, 120}, 70, 64}})
    for (const bool neighbours : {true, false})  // else a key is twice in a list
      check_kv_format(
          runtime.get(), {spec, shape, Family::sm90, 1, top_k, neighbours},
          parse_config(fmt::format("sm90:br64:bc{}:w8:s2:d_split2:split:pack_gqa:join_lists", bc)));
}

}  // namespace
}  // namespace flashjit::test
