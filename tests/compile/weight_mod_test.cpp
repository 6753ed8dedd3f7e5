// Kernels whose weights a program gives, without a softmax, compile for every architecture, without spills.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "tests/support/spills.hpp"
#include "tests/support/spread.hpp"

namespace flashjit {
namespace {

constexpr std::array<std::string_view, 3> kArchs = {"sm_80", "sm_90a", "sm_120"};

class KernelsOfWeights : public testing::TestWithParam<std::string_view> {};

/// With the tiles that each family takes by itself, of a large and of a small problem, alternately.
TEST_P(KernelsOfWeights, CompileWithoutSpills) {
  constexpr std::array kSpecs = {
      "bf16:d64:score{sigmoid(score - 4.0)}:causal:weight_mod",
      "fp16:d64:score{max(score, 0.0) / to_float(seqlen_kv)}:varlen:weight_mod",
      "bf16:d128:score{sigmoid(score - 4.0)}:weight_mod",
      "bf16:d128:score{score * sigmoid(score) / to_float(seqlen_kv)}:mask{q >= kv && q - kv < 300}:kvlen:"
      "weight_mod",
      "bf16:d128:score{slopes: fp32 1d grad; sigmoid(score + slopes[h])}:causal:det:weight_mod",
      "bf16:d64:score{bias: fp16 4d grad; max(score + bias[b, h, q, kv], 0.0)}:weight_mod",
      "bf16:d192x128:score{sigmoid(score)}:causal:weight_mod",
      "bf16:d256:score{sigmoid(score)}:map64x64:weight_mod",
      "bf16:d320x280:score{sigmoid(score)}:causal:weight_mod",
      "fp32:d64:score{sigmoid(score)}:mask{doc: int32 1d; doc[q] == doc[kv]}:weight_mod",
  };
  const auto compiler = compile::Compiler::open();
  const DeviceInfo device = DeviceInfo::parse(GetParam());
  test::Turns turns;
  // Each spec on one architecture, at night on all.
  auto place = static_cast<std::size_t>(std::ranges::find(kArchs, device.arch) - kArchs.begin());
  for (const char* text : kSpecs) {
    if (++place % 3 != 0 && !test::every_kernel()) continue;
    turns.next_row();
    for (const Pass pass : {Pass::forward, Pass::backward})
      for (const plan::FamilyTraits& family : plan::families()) {
        const KernelSpec spec{parse_spec(text), pass};
        if (!test::is_planned(family, device) || !family.supports(spec, device)) continue;
        for (const AttentionShape& shape :
             turns.of<AttentionShape>({4, 32, 8, 4096, 4096}, {1, 2, 1, 100, 130})) {
          test::expect_no_spills(*compiler, spec, family, shape, device);
        }
      }
  }
}

INSTANTIATE_TEST_SUITE_P(Architectures, KernelsOfWeights, testing::ValuesIn(kArchs),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace flashjit
