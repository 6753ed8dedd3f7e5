// Kernels that change Q and K before the scores, and those of their gradients, compile for every
// architecture.
#include <gtest/gtest.h>

#include <array>
#include <string_view>

#include "tests/support/spills.hpp"

namespace flashjit {
namespace {

constexpr std::array<std::string_view, 3> kArchsOfRows = {"sm_75", "sm_80", "sm_90a"};

class KernelsOfRows : public testing::TestWithParam<std::string_view> {};

TEST_P(KernelsOfRows, CompileWithoutSpills) {
  constexpr std::array kSpecs = {
      "fp16:d64:causal:q_mod{element * cos(to_float(q))}:k_mod{element * cos(to_float(kv))}",
      "fp16:d128:q_mod{w: fp32 1d grad; element * rsqrt(sum_of_squares / 128.0 + 0.000001) * "
      "w[column]}:varlen",
      "bf16:d128:k_mod{w: bf16 2d grad; element_at(column ^ 1) * w[h_kv, column]}:causal:sinks",
      "bf16:d192x128:q_mod{t: fp32 2d grad; element * t[q, column % 96] + element_at(column % 96) * t[q, "
      "0]}:det",
      "bf16:d320x280:q_mod{element * to_float(q)}:k_mod{element * rsqrt(sum_of_squares)}:kvlen",
      "fp32:d64:q_mod{element_at(63 - column)}:dropout",
  };
  // The main kernels are as without: the family that is planned is enough.
  test::expect_no_spills_by_turns(kSpecs, kArchsOfRows, GetParam(), [](Pass, int nth) { return nth == 0; });
}

INSTANTIATE_TEST_SUITE_P(Architectures, KernelsOfRows, testing::ValuesIn(kArchsOfRows),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace flashjit
