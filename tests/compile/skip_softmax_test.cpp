// Kernels with skip-softmax compile for every architecture, without spills and serialised products.
#include <gtest/gtest.h>

#include <array>
#include <string_view>

#include "tests/support/spills.hpp"

namespace flashjit {
namespace {

constexpr std::array<std::string_view, 3> kSkipSoftmaxArchs = {"sm_80", "sm_90a", "sm_120"};

class KernelsOfSkipSoftmax : public testing::TestWithParam<std::string_view> {};

TEST_P(KernelsOfSkipSoftmax, CompileWithoutSpills) {
  constexpr std::array kSpecs = {
      "bf16:d128:causal:skip_softmax",
      "fp16:d64:skip_softmax",
      "bf16:d128:varlen:pages16:causal:skip_softmax",
      "bf16:d64:mask{q >= kv && q - kv < 300}:kvlen:sinks:row_max:skip_softmax",
      "bf16:d128:score{30.0 * tanh(score / 30.0)}:causal:skip_softmax",
      "bf16:d256:causal:skip_softmax",
      "bf16:d192x128:causal:varlen:skip_softmax",
      "bf16:d128:kve4m3:cache:causal:skip_softmax",
      "bf16:d64:score{bias: fp16 4d; score + bias[b, h, q, kv]}:skip_softmax",
      "bf16:d128:map64x64:skip_softmax",
      "bf16:d64:score{slopes: fp32 1d; score + slopes[h] * to_float(kv - q)}:causal:skip_softmax",
      "bf16:d128:mask{doc: int32 1d; doc[q] == doc[kv]}:skip_softmax",
  };
  test::expect_no_spills_by_turns(kSpecs, kSkipSoftmaxArchs, GetParam(),
                                  [](Pass pass, int) { return pass == Pass::forward; });
}

INSTANTIATE_TEST_SUITE_P(Architectures, KernelsOfSkipSoftmax, testing::ValuesIn(kSkipSoftmaxArchs),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace flashjit
