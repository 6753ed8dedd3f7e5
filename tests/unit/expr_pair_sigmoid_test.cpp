// Weights of one sigmoid: which programs are, and that what kernels compute from the sigmoid is the same.
#include <gtest/gtest.h>

#include <cmath>

#include "expr/derive.hpp"
#include "expr/emit.hpp"
#include "expr/evaluate.hpp"
#include "expr/nodes.hpp"

namespace flashjit::expr {
namespace {

Trees weights_of(std::string_view program) { return trees_of(weights(ScoreProgram(program)), {}); }

constexpr std::string_view kOfOneSigmoid[] = {
    "sigmoid(score)",
    "sigmoid(score - 4.0)",
    "bias: float; sigmoid(score + bias)",
    "sigmoid(2.0 - (score - 0.5) / 3.0)",
    "score * sigmoid(score) / to_float(seqlen_kv)",
    "sigmoid(score * 0.5) * score * 2.0 - score",
    "slopes: fp32 1d; sigmoid(score + slopes[h] * to_float(kv - q))",
    "(1.0 - sigmoid(-score)) / 7.0",
};
constexpr std::string_view kOthers[] = {
    "max(score, 0.0)",
    "sigmoid(sigmoid(score))",
    "sigmoid(score) + sigmoid(2.0 * score)",
    "sigmoid(score) / (score + 8.0)",
    "sigmoid(max(score, 0.0))",
    "bias: fp16 2d; sigmoid(score + bias[q, kv])",
    "t: fp32 1d; sigmoid(score + t[kv])",
    "score * sigmoid(to_float(seqlen_kv))",
};

TEST(PairSigmoid, OnlyPolynomialsOfOneAreFoundApart) {
  const auto is_one = [](const Trees& trees, const EmitOptions& options = {}) {
    const std::string text = emit_hooks(trees, options);
    const auto says = [&](std::string_view what) { return text.find(what) != std::string::npos; };
    EXPECT_EQ(says("float sigmoid_exponent("), says("kPairSigmoid = true;"));
    return says("kPairSigmoid = true;");
  };
  for (const std::string_view program : kOfOneSigmoid) EXPECT_TRUE(is_one(weights_of(program))) << program;
  for (const std::string_view program : kOthers) EXPECT_FALSE(is_one(weights_of(program))) << program;
  EXPECT_FALSE(is_one(trees_of(ScoreProgram("sigmoid(score)"), {}))) << "a softmax follows";
  EXPECT_FALSE(is_one(weights_of("sigmoid(score)"), {.check_indices = true}));
}

TEST(PairSigmoid, FiniteWeightsAreKnown) {
  const auto finite = [](std::string_view program) {
    return emit_hooks(weights_of(program)).find("kFiniteWeight = true;") != std::string::npos;
  };
  for (const std::string_view program : kOfOneSigmoid) EXPECT_TRUE(finite(program)) << program;
  for (const char* program : {"max(score, 0.0) / to_float(seqlen_kv)", "tanh(score) * abs(score)",
                              "select(score > 0.0, score * score, 0.0)", "sigmoid(sigmoid(score))"})
    EXPECT_TRUE(finite(program)) << program;
  for (const char* program : {"exp(score)", "sqrt(max(score, 0.0))", "1.0 / score", "log(abs(score))",
                              "bias: fp16 2d; sigmoid(score + bias[q, kv])"})
    EXPECT_FALSE(finite(program)) << program;
  EXPECT_EQ(emit_hooks(trees_of(ScoreProgram("sigmoid(score)"), {})).find("kFiniteWeight = true;"),
            std::string::npos);
}

TEST(PairSigmoid, ScoresAreCounted) {
  for (const char* program : {"sigmoid(score - 4.0)", "max(score, 0.0) / to_float(seqlen_kv)"})
    EXPECT_TRUE(names_score_once(ScoreProgram(program).tree())) << program;
  for (const char* program : {"score * sigmoid(score)", "to_float(q)", "select(score > 0.0, score, 0.0)"})
    EXPECT_FALSE(names_score_once(ScoreProgram(program).tree())) << program;
}

TEST(PairSigmoid, SiluIsKnown) {
  const auto silu = [](std::string_view program) {
    Graph graph;
    return pair_sigmoid_of(graph, graph.add(weights_of(program).score)).silu;
  };
  for (const char* program :
       {"score * sigmoid(score)", "sigmoid(score) * score / 4096.0",
        "longest: float; score * sigmoid(score) / longest", "score * sigmoid(score) / to_float(seqlen_kv)"})
    EXPECT_TRUE(silu(program)) << program;
  for (const char* program :
       {"sigmoid(score)", "score * sigmoid(score * 1.702)", "score * sigmoid(score + 1.0)",
        "(score + 1.0) * sigmoid(score)", "score * sigmoid(score) + score"})
    EXPECT_FALSE(silu(program)) << program;
}

TEST(PairSigmoid, FactorsMoveToTheScore) {
  const std::string text = emit_hooks(weights_of("longest: float; score * sigmoid(score) / longest"));
  const auto says = [&](std::string_view what) { return text.find(what) != std::string::npos; };
  EXPECT_TRUE(says("    const float v0 = dot * head.s0;\n    return v0;\n")) << text;
  EXPECT_TRUE(
      says("    const float v0 = dot * head.s1;\n    const float v1 = v0 * sigmoid;\n    return v1;\n"))
      << text;
  // The derivative's x s is the weight's.
  EXPECT_TRUE(
      says("    const float v1 = dot * head.s1;\n    const float v2 = v1 * sigmoid;\n"
           "    const float v3 = v2 * sigmoid;\n    const float v4 = v2 - v3;\n"))
      << text;
}

TEST(PairSigmoid, ValuesAndDerivativesStay) {
  const double bias[] = {-1.5}, slopes[] = {0.25, -0.75};
  const std::int64_t two[] = {2};
  for (const std::string_view program : kOfOneSigmoid) {
    const NodePtr given = weights_of(program).score;
    Graph graph;
    const PairSigmoid found = pair_sigmoid_of(graph, graph.add(given));
    ASSERT_GE(found.place, 0) << program;
    Evaluation evaluation({{"bias", {}, bias}, {"slopes", two, slopes}}, Floats::exact);
    const int value = evaluation.add(given),
              slope = evaluation.add(derivative(given, make_name(Name::score))),
              sigmoid = evaluation.add(graph[found.place].node),
              exponent = evaluation.add(graph[found.exponent].node),
              same_value = evaluation.add(graph[found.score].node),
              same_slope = evaluation.add(graph[found.slope].node);
    for (double score = -9; score < 9; score += 0.37) {
      const std::vector<Value> at =
          evaluation.run({.h = 1, .q = 2, .kv = 5, .seqlen_q = 6, .seqlen_kv = 7, .score = score});
      const auto expect_same = [&](double a, double b) {
        EXPECT_NEAR(a, b, 1e-6 * (1 + std::abs(a))) << program << " at " << score;
      };
      expect_same(at[value].real, at[same_value].real);
      expect_same(at[slope].real, at[same_slope].real);
      expect_same(at[sigmoid].real, 1 / (1 + std::exp2(at[exponent].real)));
    }
  }
}

}  // namespace
}  // namespace flashjit::expr
