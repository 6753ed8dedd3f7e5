// Packed sequences whose cu_seqlens are wrong, which is not checked: nothing outside of the tensors is read
// or written, no wait hangs, and the next call is right.
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "tests/support/attention_case.hpp"

namespace flashjit::test {
namespace {

constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
constexpr std::int32_t kLeast = std::numeric_limits<std::int32_t>::min();
constexpr std::int32_t kQueries = 200, kKeys = 230;  // rows of the packed tensors

using Offsets = std::vector<std::int32_t>;

/// What is left of each, cut to the rows that there are, has every row in one sequence: the reference, which
/// cuts alike, says what comes of it.
std::vector<Offsets> that_split(std::int32_t rows) {
  return {{0, 70, 70, rows + 5},
          {-5, 70, 100, rows},
          {60, 0, 60, rows},
          {0, 33, 99, kMost},
          {kLeast, 64, 64, kMost}};
}

/// Sequences share rows or leave some out.
std::vector<Offsets> that_mix(std::int32_t rows) {
  return {{0, 100, 40, rows},
          {rows - 1, rows + 5, rows - 1, rows + 600},
          {rows + 1, rows + 40, rows + 90, kMost},
          {-90, -5, -1, kLeast},
          {-1000, -5, 3, -7},
          {kMost, kMost, -7, 30},
          {0, kMost, kLeast, kMost}};
}

struct WrongCase {
  Family family;
  std::string name;
  AttentionSpec spec;
  bool built_lists = false;
};

void PrintTo(const WrongCase& test, std::ostream* out) { *out << to_string(test.family) << "_" << test.name; }

std::vector<WrongCase> wrong_cases() {
  const MaskProgram by_intervals("kv / 8 <= q / 8"), by_pairs("(q - kv) % 5 == 0 || kv < 20"),
      by_reads("ids: int32 1d; ids[q] == ids[kv]");
  std::vector<WrongCase> cases;
  for (const Family family : {Family::sm90, Family::sm80, Family::simt, Family::sm75}) {
    const auto add = [&](const char* name, AttentionSpec spec, bool built_lists = false) {
      spec.dtype = dtype_for(family, DType::bf16);
      spec.varlen = true;
      cases.push_back({family, name, spec, built_lists});
    };
    add("plain_sinks", {.head_dim = 128, .sinks = true});
    add("wide", {.head_dim = 256});
    add("det", {.head_dim = 64, .reproducible = {.deterministic = true}});
    add("causal_dropout", {.head_dim = 64, .mask = causal(), .dropout = true});
    add("causal_det", {.head_dim = 128, .mask = causal(), .reproducible = {.deterministic = true}});
    add("causal_det_lists", {.head_dim = 64, .mask = causal(), .reproducible = {.deterministic = true}},
        true);
    add("reads", {.head_dim = 64, .mask = by_reads});
    add("intervals_lists", {.head_dim = 128, .mask = by_intervals}, true);
    add("pairs_det_lists", {.head_dim = 64, .mask = by_pairs, .reproducible = {.deterministic = true}}, true);
    add("map", {.head_dim = 64, .block_map = {64, 32}});
    add("map_det_lists", {.head_dim = 256, .block_map = {32, 64}, .reproducible = {.deterministic = true}},
        true);
  }
  return cases;
}

class WrongOffsets : public GpuTestWith<WrongCase> {
 protected:
  static void SetUpTestSuite() {
    if (gpu().context) runtime_ = std::make_unique<TemporaryRuntime>();
  }
  static void TearDownTestSuite() { runtime_.reset(); }

  static AttentionCase test_with(std::int64_t longest_q, std::int64_t longest_kv) {
    const WrongCase& given = GetParam();
    return {.spec = given.spec,
            .shape = {3, 2, 1, longest_q, longest_kv},
            .family = given.family,
            .layout = Layout::bshd,  // rows behind the last belong to no sequence
            .dropout_p = given.spec.dropout ? 0.2 : 0,
            .built_lists = given.built_lists};
  }
  static reference::Problem problem_of(const AttentionCase& test, Offsets q, Offsets kv) {
    reference::Problem problem = make_problem(test);
    problem.cu_seqlens_q = std::move(q);
    problem.cu_seqlens_kv = std::move(kv);
    std::mt19937 generator(11);
    const auto normal = [&](std::int64_t rows) {
      return normal_values(rows * test.spec.head_dim, test.spec.dtype, 1, generator);
    };
    problem.q = normal(test.shape.heads_q * kQueries);
    problem.dout = normal(test.shape.heads_q * kQueries);
    problem.k = normal(test.shape.heads_kv * kKeys);
    problem.v = normal(test.shape.heads_kv * kKeys);
    return problem;
  }
  static void check_results(const AttentionCase& test, const Offsets& q, const Offsets& kv) {
    AttentionRun run(test, problem_of(test, q, kv));
    run.check_forward(runtime_->get(), config_of(test, Pass::forward));
    run.check_backward(runtime_->get(), config_of(test, Pass::backward));
  }
  static void check_memory(const AttentionCase& test, const Offsets& q, const Offsets& kv) {
    AttentionRun run(test, problem_of(test, q, kv));
    run.check_memory_beside(runtime_->get(), config_of(test, Pass::forward), config_of(test, Pass::backward));
  }

 private:
  inline static std::unique_ptr<TemporaryRuntime> runtime_;
};

TEST_P(WrongOffsets, TouchNothingOutsideOfTheTensors) {
  const AttentionCase test = test_with(kQueries, kKeys);
  const Support support = supports(test.family, test.spec);
  if (!support) GTEST_SKIP() << to_string(test.family) << ": " << support.reason;
  const Offsets right_q{0, 150, 151, kQueries}, right_kv{0, 40, 199, kKeys};
  // Lists that are built before do not know where sequences are cut: then they may be another mask's.
  const auto check_split = [&](const Offsets& q, const Offsets& kv) {
    SCOPED_TRACE("Q " + testing::PrintToString(q) + ", K and V " + testing::PrintToString(kv));
    if (test.built_lists)
      check_memory(test, q, kv);
    else
      check_results(test, q, kv);
  };
  for (const Offsets& q : that_split(kQueries)) check_split(q, right_kv);
  for (const Offsets& kv : that_split(kKeys)) check_split(right_q, kv);
  const std::vector<Offsets> mixed_q = that_mix(kQueries), mixed_kv = that_mix(kKeys);
  for (std::size_t i = 0; i < mixed_q.size(); ++i) {
    SCOPED_TRACE("both " + testing::PrintToString(mixed_q[i]));
    check_memory(test, mixed_q[i], mixed_kv[i]);
    check_memory(test, mixed_q[i], right_kv);
    check_memory(test, right_q, mixed_kv[i]);
  }
  SCOPED_TRACE("right ones at the end");
  check_results(test, right_q, right_kv);
}

TEST_P(WrongOffsets, SequencesLongerThanTheirMaximumAreCut) {
  const AttentionCase test = test_with(70, 90);
  const Support support = supports(test.family, test.spec);
  if (!support) GTEST_SKIP() << to_string(test.family) << ": " << support.reason;
  check_memory(test, {0, 150, 170, kQueries}, {0, 200, 210, kKeys});
  check_memory(test, {0, 0, 0, kMost}, {0, kMost, kMost, kMost});
  check_results(test, {0, 66, 136, kQueries}, {0, 90, 170, kKeys});
}

INSTANTIATE_TEST_SUITE_P(Families, WrongOffsets, testing::ValuesIn(wrong_cases()),
                         [](const auto& test) { return testing::PrintToString(test.param); });

}  // namespace
}  // namespace flashjit::test
