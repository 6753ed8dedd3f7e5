// Tangents of gradients as the emulator runs them.
#include "tests/support/backward_jvp_run.hpp"

namespace flashjit::test {
namespace {

class EmulatedBackwardJvp : public GpuTest {};

TEST_F(EmulatedBackwardJvp, IsTheDerivative) {
  TemporaryRuntime runtime;
  const JvpCase cases[] = {
      {"bf16:d64", {2, 4, 2, 50, 60}},
      {"fp32:d32x16:causal", {1, 2, 2, 70, 40}},  // rows without keys
      {"bf16:d64:causal:varlen:dropout", {3, 4, 2, 50, 60}, "", "", 5},
      {"bf16:d64:mask{q >= kv && q - kv < 30}:kvlen", {3, 2, 1, 60, 70}},
      {"fp16:d72x40:score{5.0 * tanh(score / 5.0)}:fp32_grads", {1, 4, 1, 40, 50}},
      {"fp32:d16:dropout:sinks", {2, 4, 2, 40, 50}},
      {"bf16:d32:map32x32", {1, 2, 2, 50, 60}},
      {"bf16:d32", {1, 2, 1, 50, 60}, "", "o"},
      {"bf16:d32", {1, 2, 1, 50, 60}, "", "qkv"},
  };
  unsigned seed = 0;
  for (const JvpCase& test : cases) expect_gradient_tangents(runtime.get(), test, seed++);
}

TEST_F(EmulatedBackwardJvp, HasTangentsOfCaptures) {
  TemporaryRuntime runtime;
  for (const char* spec :
       {"bf16:d32:score{slopes: fp32 1d grad; score + slopes[h] * to_float(kv - q)}:causal",
        "fp32:d32:score{gate: fp32 2d grad; score * exp(0.2 * gate[h, kv]) - 0.1 * score * score}:sinks",
        // NaN and infinity of pairs that do not attend reach nothing.
        "bf16:d32:score{g: fp32 1d grad; score * sqrt(to_float(q - kv)) + g[kv] * log(to_float(q - kv))}"
        ":mask{kv < q}"})
    expect_gradient_tangents(runtime.get(), {spec, {1, 4, 2, 40, 50}});
}

}  // namespace
}  // namespace flashjit::test
