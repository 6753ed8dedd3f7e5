// Kernels that change O's elements before they store them, and those of their gradients, compile for every
// architecture, without spills.
#include <gtest/gtest.h>

#include <array>
#include <string_view>

#include "tests/support/spills.hpp"

namespace flashjit {
namespace {

constexpr std::array<std::string_view, 3> kArchs = {"sm_75", "sm_80", "sm_90a"};

class KernelsOfOut : public testing::TestWithParam<std::string_view> {};

/// With the tiles that each family takes by itself.
TEST_P(KernelsOfOut, CompileWithoutSpills) {
  constexpr std::array kSpecs = {
      "fp16:d64:out_mod{gate: fp16 4d grad; out * sigmoid(gate[b, q, h, column])}:causal",
      "fp16:d128:out_mod{gate: fp16 4d grad; out * sigmoid(gate[b, q, h, column])}:causal",
      "bf16:d128:out_mod{gate: bf16 4d grad; out * sigmoid(gate[b, q, h, column])}:causal",
      "bf16:d128:out_mod{gate: bf16 3d grad; out * sigmoid(gate[b, q, h])}:varlen:sinks",
      "fp16:d128:score{50.0 * tanh(score / 50.0)}:out_mod{w: fp32 1d grad; out * w[h]}:kvlen",
      "bf16:d256:out_mod{w: fp32 2d grad; out * w[h, column]}:causal",
      "bf16:d256:out_mod{gate: bf16 4d; out * sigmoid(gate[b, h, q, column])}:causal",
      "fp16:d192:out_mod{gate: fp16 4d; out * sigmoid(gate[b, h, q, column])}:varlen",
      "bf16:d192x128:out_mod{gate: bf16 4d grad; out * sigmoid(gate[b, q, h, column])}:map128x128",
      "bf16:d320x280:out_mod{out * sigmoid(out)}:causal",
      "fp32:d64:out_mod{gate: fp32 4d grad; out * gate[b, q, h, column]}:dropout",
  };
  // The main kernels of the backward pass are as without: the family that is planned is enough.
  test::expect_no_spills_by_turns(kSpecs, kArchs, GetParam(),
                                  [](Pass pass, int nth) { return pass == Pass::forward || nth == 0; });
}

class KernelsOfOutCodes : public testing::TestWithParam<std::string_view> {};

TEST_P(KernelsOfOutCodes, CompileWithoutSpills) {
  constexpr std::array kSpecs = {
      "fp16:d64:out{e2m1:g16:e4m3:apart:scaled}:causal",
      "bf16:d64:out{e4m3:row:fp32:apart}:causal",
      "bf16:d128:out_mod{gate: bf16 4d; out * sigmoid(gate[b, q, h, column])}:out{e4m3}:causal",
      "bf16:d128:out{e2m1:g16:e4m3:apart:scaled}:causal:cache",
      "bf16:d256:out{e4m3}:causal",
      "bf16:d256:out{e2m1:g16:e4m3:apart:scaled}:swizzled_scales:causal",
      "fp16:d192:out{e4m3:row:fp32:apart}:causal",
      "bf16:d128:out{e4m3:row:fp32:apart}:indices:cache",
      "bf16:d256:out{e4m3:row:fp32:apart}:varlen:pages16",
      "fp32:d64:out{e4m3}",
  };
  test::expect_no_spills_of_pass(kSpecs, Pass::forward, GetParam().data());
}

INSTANTIATE_TEST_SUITE_P(Architectures, KernelsOfOutCodes, testing::ValuesIn(kArchs),
                         [](const auto& info) { return std::string(info.param); });
INSTANTIATE_TEST_SUITE_P(Architectures, KernelsOfOut, testing::ValuesIn(kArchs),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace flashjit
