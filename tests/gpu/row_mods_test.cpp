// Programs of Q's and K's rows, by every family that the GPU has.
#include <gtest/gtest.h>

#include <vector>

#include "tests/support/attention_case.hpp"

namespace flashjit::test {
namespace {

constexpr const char* kNorm = "w: fp32 1d grad; element * rsqrt(sum_of_squares / 64.0 + 0.00001) * w[column]";
constexpr const char* kTurn =
    "t: fp32 2d grad; element * t[{0}, column % 64] + select(column < 64, -element_at(column + 64), "
    "element_at(column - 64)) * t[{0}, column % 64 + 64]";

std::vector<AttentionCase> row_cases() {
  const std::string turn_q = fmt::format(fmt::runtime(kTurn), "q"),
                    turn_k = fmt::format(fmt::runtime(kTurn), "kv");
  const std::string specs[] = {
      fmt::format("bf16:d64:causal:q_mod{{{0}}}:k_mod{{{0}}}", kNorm),
      "bf16:d128:causal:q_mod{" + turn_q + "}:k_mod{" + turn_k + "}",
      "fp16:d128x96:varlen:sinks:k_mod{" + turn_k + "}",
      "bf16:d256:kvlen:fp32_grads:q_mod{element * to_float(column % 3)}",
      "fp16:d72:det:q_mod{element + 0.5 * element_at(column / 2) * element_at(100)}"};
  constexpr AttentionShape kShapes[] = {{2, 8, 2, 700, 900}, {3, 4, 4, 333, 450}, {1, 4, 1, 64, 2000}};
  constexpr Layout kLayouts[] = {Layout::bhsd, Layout::bshd, Layout::padded};
  std::vector<AttentionCase> all;
  for (const std::string& spec : specs)
    for (const Family family : {Family::simt, Family::sm75, Family::sm80, Family::sm90}) {
      AttentionCase test{.spec = spec_for(family, spec),
                         .shape = kShapes[all.size() % std::size(kShapes)],
                         .family = family,
                         .layout = kLayouts[all.size() / 4 % std::size(kLayouts)],
                         .variant = "row_mods",
                         .seed = static_cast<unsigned>(all.size())};
      vary(test);
      test.unused_rows = 0;  // for which such a call has no memory
      all.push_back(test);
    }
  return all;
}

class RowMods : public GpuTestWith<AttentionCase> {};

TEST_P(RowMods, MatchTheReference) {
  const AttentionCase& test = GetParam();
  if (const Support support = supports(test.family, test.spec); !support) GTEST_SKIP() << support.reason;
  SCOPED_TRACE(to_string(test.spec));
  TemporaryRuntime runtime;
  AttentionRun run(test);
  run.check_forward(runtime.get(), config_of(test, Pass::forward));
  run.check_backward(runtime.get(), config_of(test, Pass::backward));
}

INSTANTIATE_TEST_SUITE_P(Rows, RowMods, testing::ValuesIn(row_cases()),
                         [](const auto& test) { return name_of(test.param); });

}  // namespace
}  // namespace flashjit::test
