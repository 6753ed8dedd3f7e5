// Kernels whose weights a program gives, without a softmax, compile for every architecture, without spills.
#include <gtest/gtest.h>

#include <array>
#include <string_view>

#include "tests/support/spills.hpp"

namespace flashjit {
namespace {

constexpr std::array<std::string_view, 3> kArchs = {"sm_80", "sm_90a", "sm_120"};

class KernelsOfWeights : public testing::TestWithParam<std::string_view> {};

/// With the tiles that each family takes by itself.
TEST_P(KernelsOfWeights, CompileWithoutSpills) {
  constexpr std::array kSpecs = {
      "bf16:d64:score{sigmoid(score - 4.0)}:causal:weight_mod",
      "bf16:d64:score{longest: float; score * sigmoid(score) / longest}:weight_mod",
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
  test::expect_no_spills_by_turns(kSpecs, kArchs, GetParam(), [](Pass, int) { return true; });
}

INSTANTIATE_TEST_SUITE_P(Architectures, KernelsOfWeights, testing::ValuesIn(kArchs),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace flashjit
