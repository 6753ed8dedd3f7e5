// Kernels that change O's elements before they store them, and those of their gradients, compile for every
// architecture, without spills.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "tests/support/spills.hpp"
#include "tests/support/spread.hpp"

namespace flashjit {
namespace {

constexpr std::array<std::string_view, 3> kArchs = {"sm_75", "sm_80", "sm_90a"};

class KernelsOfOut : public testing::TestWithParam<std::string_view> {};

/// With the tiles that each family takes by itself, of a large and of a small problem, alternately.
TEST_P(KernelsOfOut, CompileWithoutSpills) {
  constexpr std::array kSpecs = {
      "fp16:d64:out_mod{gate: fp16 4d grad; out * sigmoid(gate[b, q, h, column])}:causal",
      "fp16:d128:out_mod{gate: fp16 4d grad; out * sigmoid(gate[b, q, h, column])}:causal",
      "bf16:d128:out_mod{gate: bf16 4d grad; out * sigmoid(gate[b, q, h, column])}:causal",
      "bf16:d128:out_mod{gate: bf16 3d grad; out * sigmoid(gate[b, q, h])}:varlen:sinks",
      "fp16:d128:score{50.0 * tanh(score / 50.0)}:out_mod{w: fp32 1d grad; out * w[h]}:kvlen",
      "bf16:d256:out_mod{w: fp32 2d grad; out * w[h, column]}:causal",
      "bf16:d192x128:out_mod{gate: bf16 4d grad; out * sigmoid(gate[b, q, h, column])}:map128x128",
      "bf16:d320x280:out_mod{out * sigmoid(out)}:causal",
      "fp32:d64:out_mod{gate: fp32 4d grad; out * gate[b, q, h, column]}:dropout",
  };
  const auto compiler = compile::Compiler::open();
  const DeviceInfo device = DeviceInfo::parse(GetParam());
  test::Turns turns;
  // Each spec on one architecture, at night on all.
  auto place = static_cast<std::size_t>(std::ranges::find(kArchs, device.arch) - kArchs.begin());
  for (const char* text : kSpecs) {
    if (++place % 3 != 0 && !test::every_kernel()) continue;
    turns.next_row();
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      bool compiled = false;
      for (const plan::FamilyTraits& family : plan::families()) {
        const KernelSpec spec{parse_spec(text), pass};
        if (!test::is_planned(family, device) || !family.supports(spec, device)) continue;
        // The main kernels of the backward pass are as without: the family that is planned is enough.
        if (std::exchange(compiled, true) && pass == Pass::backward) continue;
        for (const AttentionShape& shape :
             turns.of<AttentionShape>({4, 32, 8, 4096, 4096}, {1, 2, 1, 100, 130})) {
          test::expect_no_spills(*compiler, spec, family, shape, device);
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Architectures, KernelsOfOut, testing::ValuesIn(kArchs),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace flashjit
