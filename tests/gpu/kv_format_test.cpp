// Attention over latents in a format that is decoded, at the sizes of DeepSeek V3.2: by wgmma, where a
// warpgroup decodes rows of a query's list, or of pages, for two others. tests/emulated has the same over few
// keys, and other families and formats.
#include "tests/support/kv_format_run.hpp"

namespace flashjit::test {
namespace {

class GpuDecodedLatents : public GpuTestWith<KvFormatCase> {};

TEST_P(GpuDecodedLatents, AreAttentionOverTheDecodedRows) {
  if (gpu().info.arch != "sm_90a") GTEST_SKIP() << "the kernels are of sm_90a";
  TemporaryRuntime runtime;
  check_kv_format(runtime.get(), GetParam());
}

std::vector<KvFormatCase> latents() {
  std::vector<KvFormatCase> all;
  const auto add = [&](const char* options, const AttentionShape& shape, int top_k = 20) {
    const std::string spec = std::string("bf16:d576x512:kv{fp8_ds_mla}:shared_kv") + options;
    all.push_back({spec, shape, Family::sm90, 0, top_k});
  };
  add(":indices", {1, 128, 1, 6, 8000}, 2048);
  add(":indices", {1, 16, 1, 3, 3000}, 777);
  add(":pages64:indices", {3, 64, 1, 2, 5000}, 2048);
  add(":pages64:causal:indices", {3, 128, 1, 2, 5000}, 1000);
  add(":pages64", {5, 128, 1, 1, 3001});
  add(":pages64:causal", {3, 64, 1, 2, 2500});
  add(":cache:causal", {3, 16, 1, 70, 700});
  add(":causal", {2, 128, 1, 33, 333});
  return all;
}
INSTANTIATE_TEST_SUITE_P(All, GpuDecodedLatents, testing::ValuesIn(latents()),
                         [](const auto& info) { return name_of(info.param); });

}  // namespace
}  // namespace flashjit::test
