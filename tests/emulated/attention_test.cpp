// Kernels of every family, run by the emulator, against the fp64 reference.
#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "tests/support/attention_case.hpp"

namespace flashjit::test {
namespace {

/// A spec, which is compiled once a family, and the shapes that it is run with.
struct Problems {
  const char* variant;
  const char* spec;
  std::vector<AttentionShape> shapes;
  Layout layout = Layout::bhsd;
};

const std::vector<Problems>& problems() {
  static const std::vector<Problems> all = {
      {"dense", "bf16:d64", {{2, 4, 2, 170, 190}, {16, 2, 1, 1, 65}, {9, 4, 4, 65, 1}}, Layout::padded},
      {"causal", "fp16:d64:causal:det", {{1, 2, 1, 150, 230}, {2, 2, 2, 129, 129}}, Layout::bshd},
      {"varlen", "bf16:d64:causal:varlen:dropout", {{3, 4, 2, 130, 150}}},
      {"window",
       "bf16:d64:score{5.0 * tanh(score / 5.0)}:mask{q >= kv && q - kv < 70}:kvlen:sinks",
       {{3, 2, 1, 200, 210}}},
      {"split", "fp16:d64:sinks", {{1, 4, 1, 1, 600}, {1, 2, 1, 70, 500}}},
      {"documents",
       "bf16:d64:score{table: fp32 2d grad; score + table[h, max(min(kv - q, 31), -32) + 32]}"
       ":mask{doc: int32 1d; doc[q] == doc[kv]}",
       {{1, 2, 2, 140, 200}}},
      {"blocks", "bf16:d64:map64x64:causal", {{1, 4, 2, 300, 330}}},
  };
  return all;
}

AttentionCase case_of(const Problems& problem, const AttentionShape& shape, Family family, unsigned seed) {
  AttentionCase test{.spec = parse_spec(problem.spec),
                     .shape = shape,
                     .family = family,
                     .layout = problem.layout,
                     .map_heads = shape.heads_q,
                     .variant = problem.variant,
                     .seed = seed};
  if (test.spec.dropout) test.dropout_p = 0.2;
  test.built_lists = test.spec.has_block_map();
  vary(test);
  return test;
}

const std::vector<AttentionCase>& cases() {
  static const std::vector<AttentionCase> all = [] {
    std::vector<AttentionCase> result;
    for (const Family family : {Family::simt, Family::sm80, Family::sm90})
      for (const Problems& problem : problems())
        for (const AttentionShape& shape : problem.shapes)
          result.push_back(case_of(problem, shape, family, static_cast<unsigned>(result.size())));
    return result;
  }();
  return all;
}

class Emulated : public SupportedCase {
 protected:
  static void SetUpTestSuite() { runtime_ = std::make_unique<TemporaryRuntime>(); }
  static void TearDownTestSuite() { runtime_.reset(); }
  static Runtime& runtime() { return runtime_->get(); }

 private:
  inline static std::unique_ptr<TemporaryRuntime> runtime_;
};

TEST_P(Emulated, MatchesTheReference) {
  const AttentionCase& test = GetParam();
  SCOPED_TRACE(to_string(test.spec) + " " + to_string(test.shape));
  TileConfig forward = heuristic(test.family, test.spec, test.shape, Pass::forward);
  if (test.variant == "split") forward.split = test.family != Family::simt;
  AttentionRun run(test);
  run.check_forward(runtime(), forward);
  run.check_backward(runtime(), heuristic(test.family, test.spec, test.shape, Pass::backward));
}

INSTANTIATE_TEST_SUITE_P(Attention, Emulated, testing::ValuesIn(cases()),
                         [](const auto& test) { return name_of(test.param); });

}  // namespace
}  // namespace flashjit::test
