// Latents in a format that is decoded, in tiles of 64 keys, for whose rows there are no slots.
#include "plan/plan.hpp"
#include "tests/support/kv_format_run.hpp"

namespace flashjit::test {
namespace {

class StraightLatents : public GpuTestWith<KvFormatCase> {};

TEST_P(StraightLatents, AreAttentionOverTheDecodedRows) {
  if (!gpu().info.arch.starts_with("sm_90")) GTEST_SKIP() << "the kernels are of sm_90a";
  TemporaryRuntime runtime;
  check_kv_format(runtime.get(), GetParam(), parse_config("sm90:br64:bc64:w8:s2:d_split2:split:pack_gqa"));
}

INSTANTIATE_TEST_SUITE_P(
    All, StraightLatents,
    testing::Values(
        KvFormatCase{
            "bf16:d576x512:kv{fp8_ds_mla}:shared_kv:indices", {1, 128, 1, 3, 300}, Family::sm90, 0, 210},
        KvFormatCase{
            "bf16:d576x512:kv{fp8_ds_mla}:shared_kv:indices", {3, 16, 1, 1, 90}, Family::sm90, 1, 33},
        KvFormatCase{"bf16:d576x512:kv{fp8_ds_mla}:shared_kv:pages16:causal:indices",
                     {2, 96, 1, 2, 190},
                     Family::sm90,
                     1,
                     150},
        KvFormatCase{"fp16:d576x512:kv{int8:g64:fp32:tail64xfp16}:shared_kv:cache:indices",
                     {2, 40, 1, 1, 220},
                     Family::sm90,
                     1,
                     170},
        KvFormatCase{
            "bf16:d576x512:kv{fp8_ds_mla}:shared_kv:pages64:causal", {2, 128, 1, 2, 200}, Family::sm90},
        KvFormatCase{"bf16:d576x512:kv{fp8_ds_mla}:shared_kv:cache:causal", {3, 16, 1, 9, 130}, Family::sm90},
        KvFormatCase{"bf16:d576x512:kv{fp8_ds_mla}:shared_kv:pages16", {3, 64, 2, 1, 70}, Family::sm90}),
    [](const auto& info) { return name_of(info.param); });

}  // namespace
}  // namespace flashjit::test
