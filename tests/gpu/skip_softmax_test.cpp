// Skip-softmax on a GPU.
#include "tests/support/skip_softmax_run.hpp"

namespace flashjit::test {
namespace {

std::vector<SkipSoftmaxCase> skip_softmax_cases() {
  std::vector<SkipSoftmaxCase> all;
  for (const char* spec :
       {"bf16:d64", "bf16:d64:causal", "bf16:d128", "fp16:d128:causal", "bf16:d256:causal",
        "fp16:d192x128:causal", "bf16:d128:causal:varlen", "bf16:d128:kvlen:sinks:row_max",
        "bf16:d64:mask{q + seqlen_kv >= kv + seqlen_q && q + seqlen_kv - seqlen_q - kv < 700}",
        "bf16:d128:score{20.0 * tanh(score / 20.0)}:causal", "bf16:d96:map64x64"})
    for (const AttentionShape& shape :
         {AttentionShape{1, 4, 2, 700, 2300}, AttentionShape{1, 2, 2, 300, 4000}})
      all.push_back({spec, shape});
  for (const char* config : {"sm80:br64:bc64:w4:split", "sm90:br64:bc64:w4:s2:split",
                             "sm90:br192:bc80:w12:s2", "sm90:br64:bc64:w4:s2:split:pack_gqa"})
    for (const char* spec : {"bf16:d128:causal", "bf16:d128"})
      all.push_back({spec, {2, 8, 2, 40, 5000}, config});
  return all;
}

class SkippedTiles : public GpuTestWith<SkipSoftmaxCase> {};

TEST_P(SkippedTiles, AreFarBelowTheMaximum) {
  TemporaryRuntime runtime;
  expect_skips(runtime.get(), GetParam());
}

class SkipSoftmax : public GpuTest {};

TEST_F(SkipSoftmax, SkipsNoTileWithANan) {
  TemporaryRuntime runtime;
  for (const char* config : {"sm80:br64:bc64:w4", "sm90:br128:bc128:w8:s2", "sm90:br64:bc64:w4:s2:split"})
    expect_nan_is_seen(runtime.get(), {"bf16:d64", {2, 8, 2, 300, 3000}, config});
}

INSTANTIATE_TEST_SUITE_P(All, SkippedTiles, testing::ValuesIn(skip_softmax_cases()));

}  // namespace
}  // namespace flashjit::test
