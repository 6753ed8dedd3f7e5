// Running states on a GPU.
#include "tests/support/running_state_run.hpp"

namespace flashjit::test {
namespace {

std::vector<RunningStateCase> joins() {
  std::vector<RunningStateCase> all = {{"bf16:d320x280:causal:fp32_out", {1, 2, 1, 300, 400}}};
  for (const char* spec : {"bf16:d64", "bf16:d128:causal", "fp16:d128:fp32_out", "bf16:d256:causal:fp32_out",
                           "fp16:d192x128:causal", "bf16:d64:causal:varlen:dropout:fp32_out",
                           "bf16:d128:mask{q >= kv && q - kv < 200}:kvlen:fp32_out", "bf16:d96:map64x64"})
    for (const AttentionShape& shape : {AttentionShape{2, 8, 2, 1500, 1300}, AttentionShape{3, 4, 4, 300, 77},
                                        AttentionShape{1, 4, 2, 5, 5000}})
      all.push_back({spec, shape});
  for (const char* config : {"sm80:br64:bc64:w4:split", "sm90:br64:bc128:w4:s2:split", "sm90:br64:bc64:w8:s2",
                             "sm90:br64:bc64:w4:s2:split:pack_gqa"})
    for (const char* spec : {"bf16:d64:causal", "bf16:d64:fp32_out"})
      all.push_back({spec, {2, 4, 2, 300, 1500}, config});
  return all;
}

class JoinedKeys : public GpuTestWith<RunningStateCase> {};

TEST_P(JoinedKeys, AreThoseOfOneCall) {
  TemporaryRuntime runtime;
  expect_joins(runtime.get(), GetParam());
}

INSTANTIATE_TEST_SUITE_P(All, JoinedKeys, testing::ValuesIn(joins()));

class RunningState : public GpuTest {};

TEST_F(RunningState, HasTheGradientsOfAllKeys) {
  TemporaryRuntime runtime;
  expect_gradients_of_joined(runtime.get(), {2, 8, 2, 700, 900});
}

}  // namespace
}  // namespace flashjit::test
