// Expressions built in C++, the programs made of them, and what those declare.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "expr/declarations.hpp"
#include "expr/ops.hpp"
#include "flashjit/programs.hpp"
#include "flashjit/spec.hpp"
#include "tests/support/expectations.hpp"
#include "tests/support/variants.hpp"

namespace flashjit {
namespace {

using namespace flashjit::expr;

std::string refusal(const std::function<void()>& action) {
  return failure(ErrorCode::invalid_argument, action);
}

TEST(ExprBuild, CppAndTextGiveTheSameTree) {
  const Tensor slopes = tensor("slopes", ElementType::fp32, 1), bias = tensor("bias", ElementType::bf16, 4);
  const auto expect_same = [](const Expr& built, const char* text) {
    EXPECT_TRUE(same(built, parse(text))) << to_string(built) << " is not " << text;
  };
  expect_same(score + slopes[h] * to_float(kv - q), "slopes: fp32 1d; score + slopes[h] * to_float(kv - q)");
  expect_same(score + slopes[h] * (kv - q), "slopes: fp32 1d; score + slopes[h] * (kv - q)");
  expect_same(score + bias.with_grad()(b, h, q, kv), "bias: bf16 4d grad; score + bias[b, h, q, kv]");
  expect_same(q >= kv && q - kv < 1024, "q >= kv && q - kv < 1024");
  expect_same(50.0 * tanh(score / 50.0), "50.0 * tanh(score / 50.0)");
  expect_same(q - kv < scalar_int("window"), "window: int; q - kv < window");
  expect_same(score * scalar_float("c"), "c: float; score * c");
  expect_same(!(q % 2 == 0) || (kv & 3) != 1, "!(q % 2 == 0) || (kv & 3) != 1");
  expect_same(select(q < kv, score, 0), "q < kv ? score : 0");
  expect_same(max(min(score, 1.5f), -1.5), "max(min(score, 1.5), -1.5)");
  expect_same(~(((q << 2) ^ (kv >> 1)) | h), "~(q << 2 ^ kv >> 1 | h)");
  expect_same(
      abs(floor(score)) + exp(q) + exp2(q) + log(q) + log2(q) + sqrt(q) + rsqrt(q) + sin(q) + cos(q) +
          sigmoid(score) + tanh(score) + trunc(round(score)) + erf(q) + expm1(q) + log1p(q) +
          pow(q, score % 2.5),
      "abs(floor(score)) + exp(q) + exp2(q) + log(q) + log2(q) + sqrt(q) + rsqrt(q) + sin(q) + cos(q) + "
      "sigmoid(score) + tanh(score) + trunc(round(score)) + erf(q) + expm1(q) + log1p(q) + pow(q, score % "
      "2.5)");
  expect_same(bias.size(1) - 1 + bias(b, h, q, kv), "bias: bf16 4d; size(bias, 1) - 1 + bias[b, h, q, kv]");
  expect_same(to_bool(seqlen_q / h_kv) == (to_int(score) > -seqlen_kv),
              "to_bool(seqlen_q / h_kv) == (to_int(score) > -seqlen_kv)");
}

TEST(ExprBuild, IntsBecomeFloatsWhereAFloatStands) {
  EXPECT_EQ(to_string(score + 1), "score + to_float(1)");
  EXPECT_EQ(to_string(1 + score), "to_float(1) + score");
  EXPECT_EQ(to_string(q < score), "to_float(q) < score");
  EXPECT_EQ(to_string(select(true, q, score)), "select(true, to_float(q), score)");
  EXPECT_EQ(to_string(exp(q)), "exp(to_float(q))");
  EXPECT_EQ(to_string(abs(q)), "abs(q)");
  EXPECT_EQ((q + 1).type(), Type::integer);
  EXPECT_EQ((q + 1.0).type(), Type::real);
  EXPECT_EQ((q == 1.0).type(), Type::boolean);
}

TEST(ExprBuild, ConversionsToTheOwnTypeAreNothing) {
  EXPECT_EQ(to_string(to_float(score)), "score");
  EXPECT_EQ(to_string(to_int(q)), "q");
  EXPECT_EQ(to_string(to_bool(q < kv)), "q < kv");
  EXPECT_EQ(to_string(to_float(q < kv)), "to_float(q < kv)");
}

TEST(ExprBuild, TypesOfReads) {
  EXPECT_EQ(tensor("t", ElementType::fp16, 1)[q].type(), Type::real);
  EXPECT_EQ(tensor("t", ElementType::uint8, 1)[q].type(), Type::integer);
  EXPECT_EQ(tensor("t", ElementType::int64, 1)[q].type(), Type::int64);
  EXPECT_EQ(tensor("t", ElementType::boolean, 1)[q].type(), Type::boolean);
}

TEST(ExprBuild, WrongUseIsRefused) {
  expect_in("operator + takes int or float, not bool: 'q < kv'", refusal([] { score + (q < kv); }));
  expect_in("operator | takes int, not float: 'score'", refusal([] { score | 2; }));
  expect_in("literals are finite", refusal([] { score + 1e300; }));
  expect_in("the name 'a b'", refusal([] { scalar_int("a b"); }));
  expect_in("declares 'kv', which means something already", refusal([] { scalar_float("kv"); }));
  expect_in("declares 'uint8'", refusal([] { tensor("uint8", ElementType::fp32, 1); }));
  expect_in("the tensor 't' has 7 dimensions; 1 to 6", refusal([] { tensor("t", ElementType::fp32, 7); }));
  expect_in("has no gradient", refusal([] { tensor("t", ElementType::int32, 1).with_grad(); }));
  expect_in("is read with 2 indices", refusal([] { tensor("t", ElementType::fp32, 1)(q, kv); }));
  expect_in("an index of 't' is int, not float", refusal([] { tensor("t", ElementType::fp32, 1)[score]; }));
}

TEST(ExprBuild, SharedTreesThatGrowWithoutBoundAreRefused) {
  Expr twice = score;
  expect_in("grew beyond", refusal([&] {
              for (int i = 0; i < 64; ++i) twice = twice + twice;
            }));
  Expr deep = q;
  expect_in("grew beyond", refusal([&] {
              for (int i = 0; i < 100000; ++i) deep = deep + 1;
            }));
  Expr chain = score;
  for (int i = 0; i < 300; ++i) chain = chain + 1.0;
  expect_in("301 levels deep; at most 200", refusal([&] { ScoreProgram{chain}; }));
}

TEST(Programs, TextIsCanonical) {
  EXPECT_EQ(MaskProgram("q>=kv").text(), "q >= kv");
  EXPECT_EQ(MaskProgram("q>=kv"), MaskProgram(q >= kv));
  EXPECT_EQ(ScoreProgram("score*2").text(), "score * to_float(2)");
  EXPECT_EQ(ScoreProgram("q").text(), "to_float(q)");
  EXPECT_EQ(MaskProgram("kv <= q"), causal(CausalAlignment::top_left));
  EXPECT_EQ(causal().text(), "causal");
  AttentionSpec spec;
  spec.mask = q >= kv && q - kv < 1024;
  spec.score = score / 2.0;
  EXPECT_EQ(spec.mask.text(), "q >= kv && q - kv < 1024");
  EXPECT_EQ(spec.score.text(), "score / 2.0");
}

TEST(Programs, TheIdentityIsEmpty) {
  for (const ScoreProgram& program : {ScoreProgram("score"), ScoreProgram(" ( score ) "), ScoreProgram(""),
                                      ScoreProgram(expr::score), ScoreProgram()}) {
    EXPECT_TRUE(program.empty());
    EXPECT_EQ(tree(program), nullptr);
    EXPECT_EQ(program, ScoreProgram());
  }
  for (const MaskProgram& program : {MaskProgram("true"), MaskProgram(" \n"), MaskProgram(Expr(true))})
    EXPECT_TRUE(program.empty());
  EXPECT_FALSE(MaskProgram("false").empty());
  ASSERT_NE(tree(causal()), nullptr);
  EXPECT_TRUE(same(Expr(tree(causal())), kv <= q + seqlen_kv - seqlen_q));
}

TEST(Programs, WrongOnesAreRefused) {
  expect_in("a score program is float, not bool: 'q < kv'", refusal([] { ScoreProgram("q < kv"); }));
  expect_in("a mask program is bool (whether a pair attends), not float: 'score'",
            refusal([] { MaskProgram("score"); }));
  expect_in("a mask program reads score", refusal([] { MaskProgram("kv <= q && score > 1.0"); }));
  expect_in("a mask has no gradients", refusal([] { MaskProgram("t: fp32 1d grad; t[q] > 0.0"); }));
  const Expr two_ways = tensor("t", ElementType::fp32, 1)[q] + tensor("t", ElementType::fp16, 1)[q];
  expect_in("one name in two ways: 't: fp32 1d' and 't: fp16 1d'", refusal([&] { ScoreProgram{two_ways}; }));
  Expr tensors = score, scalars = score;
  for (int i = 0; i < 17; ++i) {
    tensors = tensors + tensor(fmt::format("t{}", i), ElementType::fp32, 1)[h];
    scalars = scalars + scalar_int(fmt::format("s{}", i));
  }
  expect_in("a score program declares 17 tensors; at most 16", refusal([&] { ScoreProgram{tensors}; }));
  expect_in("a score program declares 17 scalars; at most 8", refusal([&] { ScoreProgram{scalars}; }));
}

TEST(Programs, VariantsAreReadAndHaveValuesForAllNames) {
  const AttentionShape shape{2, 4, 2, 40, 50};
  for (const test::Variant& variant : test::variants()) {
    SCOPED_TRACE(variant.name);
    const AttentionSpec spec = variant.in({.head_dim = 64});
    EXPECT_EQ(parse_spec(to_string(spec)), spec.normalized());
    EXPECT_EQ(declarations(spec.score, spec.mask).size(), variant.captures(shape).size());
  }
}

TEST(Declarations, AreTheScoresThenTheMasksNewOnes) {
  const ScoreProgram score("c: float; a: fp32 2d grad; score * c + a[h, q]");
  const MaskProgram mask("w: int; a: fp32 2d; c: float; a[h, kv] < c && q < w");
  std::string names;
  for (const Declaration& d : declarations(score, mask)) names += to_string(d) + "; ";
  EXPECT_EQ(names, "c: float; a: fp32 2d grad; w: int; ");
  EXPECT_TRUE(declarations({}, {}).empty());
  EXPECT_EQ(declarations({}, mask).size(), 3u);
  EXPECT_EQ(declarations({}, mask)[0].name, "a");
}

TEST(Declarations, DisagreementIsRefused) {
  expect_in("the score program declares 'w: float', but the mask program 'w: int'",
            refusal([] { declarations(ScoreProgram("w: float; score * w"), MaskProgram("w: int; q < w")); }));
  std::string score = "score", mask = "q < kv", score_names, mask_names;
  for (int i = 0; i < 9; ++i) {
    score_names += fmt::format("a{}: fp32 1d; ", i), score += fmt::format(" + a{}[h]", i);
    mask_names += fmt::format("m{}: bool 1d; ", i), mask += fmt::format(" || m{}[kv]", i);
  }
  expect_in("declare together 18 tensors; at most 16", refusal([&] {
              declarations(ScoreProgram(score_names + score), MaskProgram(mask_names + mask));
            }));
}

}  // namespace
}  // namespace flashjit
