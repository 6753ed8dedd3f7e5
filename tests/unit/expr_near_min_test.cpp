// The analysis of scores next to the least float, against the values that programs have.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <regex>
#include <string>

#include "expr/evaluate.hpp"
#include "expr/facts.hpp"
#include "expr/near_min_scores.hpp"
#include "tests/support/far_program.hpp"
#include "tests/support/random_program.hpp"
#include "tests/support/tame_program.hpp"

namespace flashjit::expr {
namespace {

using test::FarProgram;

/// Declares what the program reads.
bool far(const std::string& score) {
  std::string text = score;
  for (const char* declared : {"pad: int32 2d", "low: float", "t: fp32 1d", "half: fp16 2d", "bias: bf16 2d",
                               "open: bool 1d", "n: int"}) {
    const std::string name = std::string(declared).substr(0, std::string(declared).find(':'));
    if (std::regex_search(score, std::regex("\\b" + name + "\\b")))
      text = std::string(declared) + "; " + text;
  }
  Graph graph;
  const int root = graph.add(parse(text).pointer());
  return may_be_near_min(graph, root);
}

TEST(NearMinScores, AreToldByWhatFactorsCanBe) {
  for (const char* score :
       {"score + to_float(pad[b, kv]) * low", "score + (1.0 - to_float(pad[b, kv])) * low",
        "score + to_float(pad[b, kv]) * t[h]", "score + to_float(open[q]) * t[h]",
        "score + low * exp(0.0 * score)", "score - pow(10.0, 38.0) * 3.0",
        "score - exp2(127.0 + 0.0 * score) * 1.9", "score + half[q, kv] * low", "score + low * 0.5",
        "low * sigmoid(score)", "score + to_float(n) * low", "select(open[q], low, score)",
        "min(score, bias[q, kv])", "score + to_float(q) * -3e38", "(score + t[q]) * low"})
    EXPECT_TRUE(far(score)) << score;
}

TEST(NearMinScores, AreNotOrdinaryOnes) {
  for (const char* score : {"score + t[h] * to_float(kv - q)",
                            "score - t[h] * abs(to_float(q + seqlen_kv - seqlen_q - kv))",
                            "score + t[h] * to_float(kv - q - n)",
                            "score + t[h] * to_float(min(kv - q, 0))",
                            "score - t[h] * log(1.0 + to_float(abs(kv - q)))",
                            "score * t[h]",
                            "score * low",
                            "low * tanh(score / low)",
                            "tanh(score / low) * low",
                            "50.0 * tanh(score / 50.0)",
                            "score + half[q, kv]",
                            "score * sigmoid(bias[q, kv])",
                            "score + exp2(-0.5 * to_float(h + 1)) * to_float(kv - q)",
                            "score - 1e9 * to_float(open[kv])",
                            "score * exp(-0.1 * abs(to_float(q - kv)))",
                            "score - max(score, -10.0) * 0.5",
                            "select(kv > q, -1e30, score)",
                            "score * score",
                            "score * log(to_float(seqlen_kv)) / log(512.0)",
                            "score / (1.0 + exp(-score))"})
    EXPECT_FALSE(far(score)) << score;
}

/// The least finite value of a program at all pairs, in fp32.
double least_value(const NodePtr& root, const std::vector<Bound>& bound, int queries, int keys) {
  Evaluation evaluation(bound, Floats::rounded);
  const int place = evaluation.add(root);
  double least = 0;
  for (int q = 0; q < queries; ++q)
    for (int kv = 0; kv < keys; ++kv)
      for (const double score : {-3.5, 0.0, 11.0}) {
        const Point point{
            .b = 0, .h = q % 2, .q = q, .kv = kv, .seqlen_q = queries, .seqlen_kv = keys, .score = score};
        const double value = evaluation.run(point)[place].real;
        if (std::isfinite(value)) least = std::min(least, value);
      }
  return least;
}

TEST(NearMinScores, AreToldOfEveryMaskOfNumbers) {
  constexpr int kQueries = 7, kKeys = 9;
  int far = 0, near = 0;
  for (unsigned seed = 0; seed < 2000; ++seed) {
    const Expr score = FarProgram(seed).make();
    const std::vector<FarProgram::Value> values = FarProgram::values(seed, kQueries, kKeys);
    std::vector<Bound> bound;
    for (const FarProgram::Value& value : values) bound.push_back({value.name, value.size, value.values});
    const bool told = facts_of(ScoreProgram(score), {}).near_min_scores;
    const bool is_near_min = least_value(score.pointer(), bound, kQueries, kKeys) < -2e38;
    EXPECT_TRUE(told || !is_near_min) << to_string(score);
    far += is_near_min, near += !told;
  }
  EXPECT_GT(far, 500);
  EXPECT_GT(near, 50);
}

/// Whether some operation divides by less than the analysis assumes.
bool divides_by_little(const Graph& graph, const std::vector<Value>& values) {
  for (int place = 0; place < graph.size(); ++place) {
    if (graph.node(place).op != Op::divide || graph.node(place).type != Type::real) continue;
    const double divisor = std::fabs(values[graph[place].args[1]].real);
    if (divisor < 1e-6) return true;
  }
  return false;
}

TEST(NearMinScores, AreToldOfEveryProgram) {
  int near = 0;
  for (unsigned seed = 0; seed < 6000; ++seed) {
    test::RandomProgramOptions options{.depth = 4 + static_cast<int>(seed % 3), .grad = false};
    const Expr score = test::RandomProgram(seed, options).score_program();
    if (facts_of(ScoreProgram(score), {}).near_min_scores) continue;
    ++near;
    std::vector<test::Given> given;
    for (const Declaration& declared : test::random_program_declarations())
      given.push_back({declared, std::vector<std::int64_t>(static_cast<std::size_t>(declared.rank), 3), {}});
    test::fill(given, seed);
    std::mt19937 random(seed);
    for (test::Given& one : given)
      for (double& value : one.values)
        if (one.declaration.type == ElementType::int32 && random() % 2)
          value = random() % 2 ? INT32_MIN : INT32_MAX;
    Graph graph;
    graph.add(score.pointer());
    Evaluation evaluation(test::bounds_of(given), Floats::rounded);
    const int place = evaluation.add(score.pointer());
    for (int at = 0; at < 12; ++at) {
      const Point point{.b = at % 2,
                        .h = at % 3,
                        .q = at,
                        .kv = 11 - at,
                        .seqlen_q = 12,
                        .seqlen_kv = 12,
                        .score = at - 4.5};
      const std::vector<Value> values = evaluation.run(point);
      if (!std::isfinite(values[place].real) || divides_by_little(graph, values)) continue;
      EXPECT_GT(values[place].real, -2e38) << to_string(score);
    }
  }
  EXPECT_GT(near, 3000);
}

}  // namespace
}  // namespace flashjit::expr
