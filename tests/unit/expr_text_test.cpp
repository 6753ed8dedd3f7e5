// Programs as text: what is parsed, what is printed, and what is refused with which words.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>

#include "expr/ops.hpp"
#include "flashjit/expr.hpp"
#include "tests/support/expectations.hpp"
#include "tests/support/random_program.hpp"

namespace flashjit::expr {
namespace {

std::string canonical(std::string_view text) { return to_string(parse(text)); }

void expect_canonical(const std::string& text) { EXPECT_EQ(canonical(text), text); }

/// Texts, and what their canonical form is.
void expect_becomes(std::initializer_list<std::pair<const char*, const char*>> cases) {
  for (const auto& [text, wanted] : cases) EXPECT_EQ(canonical(text), wanted) << text;
}

/// The message of the refusal of a text; it must hold all the parts.
void expect_refused(std::string_view text, const std::vector<std::string>& parts) {
  const std::string message = failure(ErrorCode::invalid_argument, [&] { parse(text); });
  for (const std::string& part : parts) expect_in(part, message);
}

TEST(ExprText, CanonicalTextStays) {
  for (const char* text : {"score",
                           "1",
                           "1.0",
                           "true",
                           "-1",
                           "-1.5",
                           "-2147483648",
                           "2147483647",
                           "1e+30",
                           "-0.0",
                           "q + kv * 2",
                           "(q + kv) * 2",
                           "q - (kv - 1)",
                           "q - kv - 1",
                           "-q",
                           "-(-q)",
                           "-(1)",
                           "-(-1)",
                           "~-1",
                           "~~q",
                           "-~q",
                           "~-q",
                           "!!true",
                           "(q & 1) == 0",
                           "q & -2 | kv ^ 3",
                           "q << 1 >> 2",
                           "q << (1 >> 2)",
                           "1 - -1",
                           "-1 * q",
                           "(-1 - q) % 3",
                           "q == kv == (b == h)",
                           "q < kv && b == 0 || h != 1",
                           "(q < kv || b == 0) && h > 1",
                           "select(q < kv, score, 0.0)",
                           "max(min(score, 1.5), -1.5)",
                           "score * to_float(2)",
                           "to_int(score)",
                           "to_bool(q)",
                           "slopes: fp32 1d; score + slopes[h] * to_float(kv - q)",
                           "bias: bf16 4d grad; score + bias[b, h, q, kv]",
                           "cap: float; cap * tanh(score / cap)",
                           "window: int; doc: int64 2d; q - kv < window && doc[b, q] == doc[b, kv]",
                           "keep: bool 1d; keep[kv]",
                           "table: int8 1d; table[table[q]]"}) {
    expect_canonical(text);
  }
}

TEST(ExprText, OtherSpellingsBecomeCanonical) {
  expect_becomes({{"score*2", "score * to_float(2)"},
                  {" ( (q) )\n+\t1 ", "q + 1"},
                  {"q < kv ? 1 : 2.5", "select(q < kv, to_float(1), 2.5)"},
                  {"q == 0 ? 1 : q == 1 ? 2 : 3", "select(q == 0, 1, select(q == 1, 2, 3))"},
                  {"n:int;a:float; a + n", "a: float; n: int; a + to_float(n)"}});
}

TEST(ExprText, NumbersAreRead) {
  expect_becomes({{"1.", "1.0"},
                  {".5", "0.5"},
                  {"1e-3", "0.001"},
                  {"1E+2", "100.0"},
                  {"- 1", "-1"},
                  {"0.1000000014901161", "0.1"},
                  {"00012", "12"}});
}

TEST(ExprText, CausalMasksHaveNames) {
  expect_becomes({{"causal", "causal"},
                  {"causal_top_left", "causal_top_left"},
                  {"kv <= q + seqlen_kv - seqlen_q", "causal"},
                  {"kv<=(q)", "causal_top_left"}});
  EXPECT_EQ(to_string(kv <= q), "causal_top_left");
  EXPECT_EQ(canonical("causal && q - kv < 9"), "kv <= q + seqlen_kv - seqlen_q && q - kv < 9");
  EXPECT_EQ(canonical("q >= kv"), "q >= kv");
}

TEST(ExprText, RandomProgramsComeBack) {
  std::size_t longest = 0;
  int count = 0;
  for (std::uint64_t seed = 0; seed < 6000; ++seed) {
    test::RandomProgram random(seed, {.depth = 2 + static_cast<int>(seed % 6)});
    for (const Expr& program : {random.score_program(), random.mask_program()}) {
      if (program.node().depth > kMaxDepth || program.node().size > kMaxNodes) continue;
      const std::string text = to_string(program);
      longest = std::max(longest, text.size());
      ++count;
      const Expr back = parse(text);
      ASSERT_TRUE(same(back, program)) << text;
      ASSERT_EQ(to_string(back), text);
    }
  }
  EXPECT_GT(count, 11000);
  EXPECT_GT(longest, 1000u);
}

TEST(ExprText, EveryFloatComesBack) {
  std::mt19937 random(7);
  for (int i = 0; i < 20000; ++i) {
    const float value = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
    if (!std::isfinite(value)) continue;
    ASSERT_TRUE(same(parse(to_string(Expr(value))), Expr(value))) << to_string(Expr(value));
  }
}

TEST(ExprText, DeepestProgramsComeBack) {
  Expr deep = q, negated = q, wide = q;
  for (int i = 1; i < kMaxDepth; ++i) {
    deep = 1 - deep;
    negated = -negated;
  }
  for (int i = 1; i < kMaxDepth; ++i) wide = wide + 1;
  for (const Expr& program : {deep, negated, wide}) {
    EXPECT_TRUE(same(parse(to_string(program)), program));
    expect_refused(to_string(-(program + 1)), {"levels"});
  }
}

TEST(ExprText, ErrorsShowThePlace) {
  const std::string message =
      failure(ErrorCode::invalid_argument, [] { parse("slopes: fp32 1d;\nscore + slope[h]\n* 2"); });
  EXPECT_EQ(message,
            "'slope' is read as a tensor, but not declared; declare it, such as 'slope: fp32 1d; ...'\n"
            "  score + slope[h]\n"
            "          ^");
  expect_refused(std::string(500, ' ') + "score + $ 1", {"cannot hold '$'", "score + $ 1\n", " ^"});
}

TEST(ExprText, SyntaxErrorsSayWhatIsExpected) {
  expect_refused("", {"has the end where an expression should stand"});
  expect_refused("score +", {"the end where an expression"});
  expect_refused("(score", {"the end where an operator or ')'"});
  expect_refused("score score", {"has 'score' where an operator or the end should stand"});
  expect_refused("min(q, kv", {"the end where an operator, ',' or ')'"});
  expect_refused("min q", {"'q' where '(' after the function 'min'"});
  expect_refused("q < kv ? 1", {"':' of '?:'"});
  expect_refused("a: int b; a", {"'b' where ';', which ends a declaration,"});
  expect_refused("a: double; a", {"'a' is declared as 'double'", "int or float", "fp32 2d", "uint8, bool"});
  expect_refused("a: fp32; a", {"the number of dimensions, 1d to 6d"});
  expect_refused("a: fp32 7d; a[1]", {"'7d'", "1d to 6d"});
  expect_refused("score @ 2", {"cannot hold '@'"});
  expect_refused("score = 2", {"cannot hold '='"});
  expect_refused("1.2.3", {"'1.2.3' is no number"});
  expect_refused("1x", {"'1x' is no number"});
  expect_refused("1.5f", {"'1.5f' is no number"});
  expect_refused("2147483648", {"'2147483648' is beyond what an int (32 bits) holds"});
  expect_refused("-2147483649", {"beyond what an int"});
  expect_refused("1e39", {"'1e39' is beyond what a float (fp32) holds"});
}

TEST(ExprText, NamesAreChecked) {
  expect_refused(
      "scores * 2",
      {"unknown name 'scores'",
       "score, b, h, h_kv, q, kv, seqlen_q, seqlen_kv, out, column, element, sum_of_squares", "\n"});
  expect_refused("n: int; n + m", {"unknown name 'm'", "sum_of_squares, n"});
  expect_refused("exp3(score)", {"unknown function 'exp3'", "exp2"});
  expect_refused("q: int; q", {"declares 'q', which means something already"});
  expect_refused("tanh: int; tanh", {"declares 'tanh'"});
  expect_refused("causal: int; causal", {"declares 'causal'"});
  expect_refused("n: int; n: int; n", {"'n' is declared twice"});
  expect_refused("n: int; n: float; n", {"'n' is declared twice"});
  expect_refused("n: int; score", {"'n' is declared, but not used"});
  expect_refused(std::string(65, 'n') + ": int; score", {"1 to 64 letters"});
}

TEST(ExprText, CapturesAreChecked) {
  expect_refused("t: fp32 2d; t[q]", {"'t' has 2 dimensions, but is read with 1 index"});
  expect_refused("t: fp32 1d; t[q, kv]", {"'t' has 1 dimension, but is read with 2 indices"});
  expect_refused("t: fp32 1d; t[]", {"read with 0 indices"});
  expect_refused("t: fp32 1d; t[score]", {"an index of 't' is int, not float: 'score'"});
  expect_refused("t: fp32 1d; t + 1", {"'+' where '[' and 1 index of 't' should stand"});
  expect_refused("t: int32 1d grad; t[q]", {"'t' is int32, which has no gradient", "fp32, fp16 and bf16"});
  expect_refused("n: int; n[q]", {"'n' is declared as a scalar"});
  expect_refused("doc[q] == doc[kv]", {"'doc' is read as a tensor, but not declared"});
}

TEST(ExprText, TypesAreChecked) {
  expect_refused("score + (q < kv)", {"operator + takes int or float, not bool: 'q < kv'"});
  expect_refused("score | 2", {"operator | takes int, not float: 'score'"});
  expect_refused("q && kv", {"operator && takes bool, not int: 'q'"});
  expect_refused("q & 1 == 0", {"operator & takes int, not bool: '1 == 0'"});
  expect_refused("q == true",
                 {"operator == takes two numbers or two bools, not int and bool: 'q' and 'true'"});
  expect_refused("q < kv < b", {"operator < takes int or float, not bool"});
  expect_refused("q ? 1 : 2", {"select takes a bool as its condition, not int: 'q'"});
  expect_refused("select(true, q, false)", {"select takes two numbers or two bools"});
  expect_refused("exp(true)", {"exp takes int or float, not bool"});
  expect_refused("min(q)", {"min takes 2 arguments, not 1"});
  expect_refused("exp()", {"exp takes 1 argument, not 0"});
  expect_refused("!q", {"operator ! takes bool, not int"});
}

TEST(ExprText, LimitsHold) {
  expect_refused(std::string(65537, ' '), {"65537 bytes; at most 65536"});
  expect_refused(std::string(401, '(') + "q" + std::string(401, ')'), {"nests deeper than 400 levels"});
  expect_refused(std::string(60000, '('), {"nests deeper"});
  expect_refused(std::string(60000, '-') + "q", {"nests deeper"});
  expect_refused(std::string(60000, '!'), {"nests deeper"});
  std::string chain = "q", wide = "q", choices;
  for (int i = 0; i < 200; ++i) chain += "+q";
  for (int i = 0; i < 30000; ++i) wide += "+q";
  for (int i = 0; i < 500; ++i) choices += "q==1?1:";
  expect_refused(chain, {"201 levels deep; at most 200"});
  expect_refused(wide, {"levels"});
  expect_refused(choices + "2", {"nests deeper"});
  std::string bushy = "q";
  for (int i = 0; i < 12; ++i) bushy = "(" + bushy + ")+(" + bushy + ")";
  expect_refused(bushy, {"8191 nodes; at most 4096"});
}

}  // namespace
}  // namespace flashjit::expr
