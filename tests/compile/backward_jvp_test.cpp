// Kernels of gradients' tangents compile for every architecture, without spills, and within the device's
// memory.
#include <gtest/gtest.h>

#include <array>

#include "tests/support/spills.hpp"

namespace flashjit {
namespace {

class KernelsOfGradientTangents : public testing::TestWithParam<const char*> {};

/// With the tiles that each family takes by itself, of a large and of a small problem.
TEST_P(KernelsOfGradientTangents, CompileWithoutSpills) {
  constexpr std::array kSpecs = {
      "bf16:d64",
      "fp16:d64:causal:varlen:dropout",
      "fp16:d64:dropout:sinks:kvlen",
      "bf16:d128:causal",
      "bf16:d128:score{50.0 * tanh(score / 50.0)}:causal",
      "bf16:d128:map128x128",
      "fp16:d64:score{bias: fp16 4d grad; score + bias[b, h, q, kv]}",
      "bf16:d128:score{slopes: fp32 1d grad; score + slopes[h] * to_float(kv - q)}:causal",
      "bf16:d256:causal",
      "fp32:d128:score{gate: fp32 2d grad; score * exp(gate[h, kv]) - score * score}",
      "bf16:d72x40:mask{doc: int32 1d; doc[q] == doc[kv]}",
      "bf16:d320x280:causal",
  };
  test::expect_no_spills_of_pass(kSpecs, Pass::backward_jvp, GetParam());
}

INSTANTIATE_TEST_SUITE_P(Architectures, KernelsOfGradientTangents,
                         testing::Values("sm_75", "sm_80", "sm_90a", "sm_120"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace flashjit
