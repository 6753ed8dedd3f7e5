// Running states as the emulator runs them.
#include "tests/support/running_state_run.hpp"
#include "tests/support/spread.hpp"

namespace flashjit::test {
namespace {

class EmulatedRunningState : public GpuTest {};

TEST_F(EmulatedRunningState, IsJoined) {
  TemporaryRuntime runtime;
  Turns turns;
  const auto check = [&](const std::string& spec, const AttentionShape& shape, const char* config = "") {
    for (const char* out : turns.of<const char*>("", ":fp32_out"))
      expect_joins(runtime.get(), {(spec + out).c_str(), shape, config});
  };
  check("bf16:d64:causal", {2, 4, 2, 130, 150});
  check("fp16:d128", {1, 2, 1, 200, 70});
  check("bf16:d128x64:causal", {1, 2, 2, 300, 90});  // tiles without keys
  check("bf16:d64:causal:varlen:dropout", {3, 4, 2, 130, 150});
  check("bf16:d64:mask{q >= kv && q - kv < 70}:kvlen:row_max", {3, 2, 1, 200, 210});
  check("bf16:d64:map64x64", {1, 2, 2, 200, 250});
  check("fp16:d72x40:score{5.0 * tanh(score / 5.0)}", {1, 4, 1, 70, 90});
  check("bf16:d64", {2, 4, 1, 1, 700});  // heads folded into queries
  for (const char* config : {"sm80:br64:bc64:w4:split", "sm90:br64:bc128:w4:s2:split", "sm90:br64:bc64:w8:s2",
                             "sm90:br64:bc64:w4:s2:split:pack_gqa"})
    check("bf16:d64:causal", {1, 4, 2, 70, 500}, config);
  expect_joins(runtime.get(), {"fp32:d16:causal", {2, 2, 1, 40, 50}});
  expect_joins(runtime.get(), {"bf16:d320x280:causal", {1, 2, 1, 40, 50}});
  expect_joins(runtime.get(), {"bf16:d320x280:fp32_out", {1, 2, 1, 40, 50}, "sm80:br32:bc32:w8:d_split4"});
}

TEST_F(EmulatedRunningState, HasTheGradientsOfAllKeys) {
  TemporaryRuntime runtime;
  expect_gradients_of_joined(runtime.get(), {2, 4, 2, 130, 150});
}

}  // namespace
}  // namespace flashjit::test
