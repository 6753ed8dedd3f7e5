// Latents in a format that is decoded, of which the CTAs of a pair decode half of the rows each.
#include "plan/plan.hpp"
#include "tests/support/kv_format_run.hpp"

namespace flashjit::test {
namespace {

class LatentPairs : public GpuTest {};

TEST_F(LatentPairs, DecodeHalfOfTheRowsEach) {
  TemporaryRuntime runtime;
  for (const auto& [spec, shape, top_k, tile] :
       {std::tuple{"bf16:d576x512:kv{fp8_ds_mla}:shared_kv:indices", AttentionShape{1, 128, 1, 3, 150}, 110,
                   "bc32:w8:s2"},
        {"bf16:d576x512:kv{fp8_ds_mla}:shared_kv:pages16:causal:indices",
         {2, 96, 1, 2, 90},
         75,
         "bc32:w8:s3"},
        {"fp16:d576x512:kv{int8:g64:fp32:tail64}:shared_kv:cache:indices",
         {2, 256, 1, 1, 120},
         70,
         "bc32:w8:s2"},
        {"bf16:d576x512:kv{fp8_ds_mla}:shared_kv:pages64:causal", {2, 128, 1, 2, 200}, 20, "bc32:w8:s3"},
        {"bf16:d320:kv{e4m3:g64:fp32:tail64}:shared_kv:pages3", {2, 40, 1, 4, 170}, 20, "bc64:w8:s2"},
        {"bf16:d576x512:kv{fp8_ds_mla}:shared_kv:pages16", {3, 256, 2, 1, 100}, 20, "bc32:w8:s2"}}) {
    const TileConfig config =
        parse_config(fmt::format("sm90:br64:{}:d_split2:split:pack_gqa:cta_pair", tile));
    const plan::ExecutionPlan plan = plan::make_plan(parse_spec(fmt::format("fwd:{}", spec)).normalized(),
                                                     shape, DeviceInfo::parse("sm_90a"), {}, config);
    EXPECT_TRUE(plan.config.cta_pair) << spec;
    EXPECT_EQ(plan.main().cluster, 2) << spec;
    EXPECT_EQ(plan.head_groups % 2, 0) << spec;
    check_kv_format(runtime.get(), {spec, shape, Family::sm90, 1, top_k}, config);
  }
}

/// Q tiles that are no pairs, or whose pairs have different keys.
TEST_F(LatentPairs, AreOfHeadsThatShareKAndV) {
  TemporaryRuntime runtime;
  const TileConfig config = parse_config("sm90:br64:bc32:w8:s2:d_split2:split:pack_gqa:cta_pair");
  for (const AttentionShape& shape :
       {AttentionShape{2, 64, 1, 1, 70}, {1, 128, 2, 1, 70}, {1, 192, 1, 1, 70}}) {
    const char* spec = "bf16:d576x512:kv{fp8_ds_mla}:shared_kv:pages16:causal";
    const plan::ExecutionPlan plan = plan::make_plan(parse_spec(fmt::format("fwd:{}", spec)).normalized(),
                                                     shape, DeviceInfo::parse("sm_90a"), {}, config);
    EXPECT_FALSE(plan.config.cta_pair);
    check_kv_format(runtime.get(), {spec, shape, Family::sm90, 1}, config);
  }
}

}  // namespace
}  // namespace flashjit::test
