// Kernels of O's tangent compile for every architecture, without spills, and within the device's memory.
#include <gtest/gtest.h>

#include <array>

#include "tests/support/spills.hpp"

namespace flashjit {
namespace {

class KernelsOfTangents : public testing::TestWithParam<const char*> {};

/// With the tiles that each family takes by itself, of a large and of a small problem.
TEST_P(KernelsOfTangents, CompileWithoutSpills) {
  constexpr std::array kSpecs = {
      "bf16:d64",
      "bf16:d64:causal:varlen",
      "fp16:d64:dropout:sinks:kvlen",
      "bf16:d128",
      "fp16:d128:causal",
      "bf16:d128:mask{q >= kv && q - kv < 300}:varlen:dropout",
      "bf16:d128:score{50.0 * tanh(score / 50.0)}:causal",
      "bf16:d128:map128x128",
      "fp16:d64:score{bias: fp16 4d grad; score + bias[b, h, q, kv]}",
      "bf16:d128:score{slopes: fp32 1d grad; score + slopes[h] * to_float(kv - q)}:causal",
      "bf16:d128:dropout:kvlen",
      "bf16:d128:mask{doc: int32 1d; doc[q] == doc[kv]}",
      "bf16:d128:score{gate: fp32 2d grad; score * gate[h, kv]}",
      "bf16:d64:score{50.0 * tanh(score / 50.0)}:causal",
      "bf16:d64:map64x64",
      "bf16:d72",
      "bf16:d96:causal:varlen",
      "bf16:d112:dropout",
      "bf16:d192x128:causal",
      "bf16:d256:causal",
      "fp32:d64:causal:sinks",
      "fp32:d128:score{gate: fp32 2d grad; score * gate[h, kv]}",
      "bf16:d72x40:mask{doc: int32 1d; doc[q] == doc[kv]}",
      "bf16:d320x280:causal",
  };
  test::expect_no_spills_of_pass(kSpecs, Pass::jvp, GetParam());
}

INSTANTIATE_TEST_SUITE_P(Architectures, KernelsOfTangents,
                         testing::Values("sm_75", "sm_80", "sm_90a", "sm_120"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace flashjit
