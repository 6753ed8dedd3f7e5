// Rows whose scores all are next to the least float, as additive masks of left padding have them: O is the
// mean of V, as PyTorch's is.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "expr/declarations.hpp"
#include "expr/evaluate.hpp"
#include "tests/support/attention_case.hpp"
#include "tests/support/far_program.hpp"

namespace flashjit::test {
namespace {

constexpr double kLeast = -0x1.fep127;  // of bf16
constexpr std::int64_t kPadded = 70;    // queries

struct Masked {
  const char *name, *score;
  std::vector<std::int64_t> size;  ///< of the tensor `pad`; without: the program reads none

  bool has_number() const { return std::string(score).find("least:") != std::string::npos; }
  bool times_number() const { return has_number() && !size.empty(); }
};

const std::vector<Masked>& masked() {
  static const std::vector<Masked> all = {
      {"bias", "pad: bf16 2d; score + pad[q, kv]", {140, 200}},
      {"pairs", "pad: fp32 2d; score + 0.5 * pad[q, kv] + 0.5 * pad[q, kv]", {140, 200}},
      {"line", "pad: fp32 1d; score + pad[q]", {140}},
      {"product", "pad: fp32 1d; score + pad[q] * 3.3895313e38", {140}},
      {"select", "q < 70 ? -3.3895313e38 : score", {}},
      {"number", "least: float; select(q < 70, least, score)", {}},
      {"times_number", "pad: int32 1d; least: float; score + to_float(pad[q]) * least", {140}},
      {"one_minus", "pad: int32 1d; least: float; score + (1.0 - to_float(1 - pad[q])) * least", {140}},
  };
  return all;
}

/// Rows before kPadded see nothing but the least float; others see it at every third key, and at some
/// -infinity.
reference::Captured pad_of(const Masked& given) {
  const bool product = std::string(given.name) == "product";
  const bool times = given.times_number();
  std::int64_t count = 1;
  for (const std::int64_t size : given.size) count *= size;
  reference::Captured pad{"pad", given.size, std::vector<double>(count)};
  const std::int64_t keys = count / given.size[0];
  for (std::int64_t i = 0; i < count; ++i) {
    const bool far = i / keys < kPadded || (keys > 1 && i % 3 == 0);
    pad.values[i] = far                      ? (product ? -1
                                                : times ? 1
                                                        : kLeast)
                    : keys > 1 && i % 7 == 0 ? -std::numeric_limits<double>::infinity()
                                             : 0;
  }
  return pad;
}

AttentionCase case_of(const Masked& given, Family family, bool split) {
  AttentionCase test{.spec = spec_for(family, std::string("bf16:d64:score{") + given.score + "}"),
                     .shape = {1, 2, 1, 140, 200},
                     .family = family,
                     .variant = given.name};
  test.captures = [given](const auto&) {
    std::vector<reference::Captured> captures;
    if (!given.size.empty()) captures.push_back(pad_of(given));
    if (given.has_number()) captures.push_back({"least", {}, {kLeast}});
    return captures;
  };
  if (split) test.variant += "_split";
  return test;
}

std::vector<AttentionCase> near_min_score_cases() {
  std::vector<AttentionCase> all;
  for (const Masked& given : masked())
    for (const Family family : {Family::simt, Family::sm80, Family::sm90, Family::sm75}) {
      all.push_back(case_of(given, family, false));
      if (family != Family::simt && given.name == std::string("bias"))
        all.push_back(case_of(given, family, true));
    }
  return all;
}

class NearMinScores : public SupportedCase {};

TEST_P(NearMinScores, GiveTheMeanOfV) {
  const AttentionCase& test = GetParam();
  TemporaryRuntime runtime;
  TileConfig config = heuristic(test.family, test.spec, test.shape, Pass::forward);
  config.split = test.variant.ends_with("_split");
  AttentionRun run(test);
  run.check_forward(runtime.get(), config);
}

INSTANTIATE_TEST_SUITE_P(Attention, NearMinScores, testing::ValuesIn(near_min_score_cases()),
                         [](const auto& test) { return name_of(test.param); });

constexpr std::int64_t kQueries = 70, kKeys = 90;

AttentionCase random_case(unsigned seed, Family family) {
  AttentionCase test{.spec = parse_spec("bf16:d64"),
                     .shape = {1, 2, 1, kQueries, kKeys},
                     .family = family,
                     .variant = "random",
                     .seed = seed};
  test.spec.score = ScoreProgram(FarProgram(seed).make());
  test.captures = [seed, score = test.spec.score](const auto&) {
    std::vector<reference::Captured> captures;
    const std::vector<expr::Declaration> declared = expr::declarations(score, {});
    for (const FarProgram::Value& value : FarProgram::values(seed, kQueries, kKeys))
      if (std::ranges::find(declared, value.name, &expr::Declaration::name) != declared.end())
        captures.push_back({value.name, value.size, value.values});
    return captures;
  };
  return test;
}

/// The largest score of each row in fp32, as kernels compute it; NaN where one is.
std::vector<double> largest_scores(const reference::Problem& problem) {
  std::vector<expr::Bound> bound;
  for (const reference::Captured& captured : problem.captures)
    bound.push_back({captured.name, captured.size, captured.values});
  expr::Evaluation evaluation(bound, expr::Floats::rounded);
  const int place = evaluation.add(problem.spec.score.tree());
  std::vector<double> largest;
  for (int row = 0; row < 2 * kQueries; ++row) {
    double most = -std::numeric_limits<double>::infinity();
    for (int kv = 0; kv < kKeys && !std::isnan(most); ++kv) {
      double dot = 0;
      for (int d = 0; d < 64; ++d) dot += problem.q[row * 64 + d] * problem.k[kv * 64 + d];
      const double score = evaluation
                               .run({.h = row / static_cast<int>(kQueries),
                                     .q = row % static_cast<int>(kQueries),
                                     .kv = kv,
                                     .seqlen_q = kQueries,
                                     .seqlen_kv = kKeys,
                                     .score = dot / 8})[place]
                               .real;
      most = std::isnan(score) ? score : std::max(most, score);
    }
    largest.push_back(most);
  }
  return largest;
}

class FarPrograms : public SupportedCase {};

/// Largest scores of more than 2^30 in size that are not next to the least float stay out of it: exponents
/// have no room there.
TEST_P(FarPrograms, HaveAFiniteLseWhereTheLargestScoreIs) {
  const AttentionCase& test = GetParam();
  TemporaryRuntime runtime;
  AttentionRun run(test);
  const std::vector<double> lse =
      run.launch_for_lse(runtime.get(), heuristic(test.family, test.spec, test.shape, Pass::forward));
  const std::vector<double> largest = largest_scores(run.problem());
  int judged = 0;
  for (std::size_t row = 0; row < lse.size(); ++row) {
    if (!std::isfinite(largest[row]) || (std::fabs(largest[row]) > 0x1p30 && largest[row] > -1e30)) continue;
    ++judged;
    EXPECT_NEAR(lse[row], largest[row], 6 + 1e-5 * std::fabs(largest[row]))
        << "row " << row << " of " << test.spec.score.text();
  }
  EXPECT_GT(judged, 0) << test.spec.score.text();
}

std::vector<AttentionCase> random_cases() {
  std::vector<AttentionCase> all;
  for (const unsigned seed : {0u, 1u, 2u, 20u})
    for (const Family family : {Family::simt, Family::sm80, Family::sm90, Family::sm75})
      all.push_back(random_case(seed, family));
  return all;
}

INSTANTIATE_TEST_SUITE_P(Random, FarPrograms, testing::ValuesIn(random_cases()),
                         [](const auto& test) { return name_of(test.param); });

class LargeScores : public SupportedCase {};

/// P of a row's only key is 1 for scores of 1e5, too, of which units of log2 lose the third digit.
TEST_P(LargeScores, GiveTheOnlyKeyAllOfP) {
  const AttentionCase& test = GetParam();
  TemporaryRuntime runtime;
  AttentionRun run(test);
  run.check_forward(runtime.get(), heuristic(test.family, test.spec, test.shape, Pass::forward));
  run.check_backward(runtime.get(), heuristic(test.family, test.spec, test.shape, Pass::backward));
  EXPECT_EQ(run.grad(2), run.problem().dout);
}

std::vector<AttentionCase> of_one_key() {
  std::vector<AttentionCase> all;
  for (const Family family : {Family::simt, Family::sm80, Family::sm90, Family::sm75})
    for (const char* spec : {"bf16:d64", "bf16:d256:causal"})  // whose scale is a power of two
      all.push_back(
          {.spec = spec_for(family, spec), .shape = {40, 2, 2, 1, 1}, .family = family, .score_size = 1e5});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Attention, LargeScores, testing::ValuesIn(of_one_key()),
                         [](const auto& test) { return name_of(test.param); });

}  // namespace
}  // namespace flashjit::test
