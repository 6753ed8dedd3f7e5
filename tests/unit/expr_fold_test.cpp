// Folding: what becomes smaller, and what must not.
#include <gtest/gtest.h>

#include <cmath>
#include <initializer_list>
#include <utility>

#include "expr/evaluate.hpp"
#include "expr/fold.hpp"
#include "expr/ops.hpp"
#include "tests/support/random_program.hpp"

namespace flashjit::expr {
namespace {

std::string folded(std::string_view text) { return to_string(Expr(fold(parse(text).pointer()))); }

/// Texts, and what they fold to.
void expect_folded(std::initializer_list<std::pair<const char*, const char*>> cases) {
  for (const auto& [text, wanted] : cases) EXPECT_EQ(folded(text), wanted) << text;
}

TEST(ExprFold, ComparisonsOfInt64sAreOfInts) {
  const std::string t = "t: int64 1d; ";
  EXPECT_EQ(folded(t + "t[q] == t[kv]"),
            t + "low_word(t[q]) == low_word(t[kv]) && high_word(t[q]) == high_word(t[kv])");
  EXPECT_EQ(folded(t + "kv < t[b]"), t + "kv < to_int(t[b])");
  EXPECT_EQ(folded(t + "kv <= q + t[b]"), t + "kv - q <= to_int(t[b])");
  EXPECT_EQ(folded(t + "q + t[b] >= kv"), t + "kv - q <= to_int(t[b])");
  EXPECT_EQ(folded("to_int64(q) >= to_int64(kv)"), "q >= kv");
}

/// Whichever side has the sum, and however large it is.
TEST(ExprFold, ComparisonsOfInt64SumsKeepTheirValues) {
  const std::vector<std::int64_t> size = {9}, exact = {INT64_MAX,
                                                       INT64_MAX - 1,
                                                       INT64_MAX - INT32_MAX,
                                                       INT64_MIN,
                                                       INT64_MIN + 1,
                                                       INT64_MIN + INT32_MAX,
                                                       1LL + INT32_MAX,
                                                       -3,
                                                       0};
  const std::vector<double> values(exact.begin(), exact.end());
  for (const char* op : {"<", "<=", ">", ">=", "==", "!="})
    for (const char* sides :
         {"to_int64(kv) {} to_int64(q) + l[b]", "l[b] + to_int64(q) {} to_int64(kv)", "q + l[b] {} kv + l[h]",
          "to_int64(kv) {} to_int64(q) - l[b]", "kv + l[b] {} q + 3", "to_int64(kv - q) {} l[b] + l[h]",
          "l[b] {} 2147483647", "l[b] {} -2147483647 - 1"}) {
      std::string text = std::string("l: int64 1d; ") + sides;
      text.replace(text.find("{}"), 2, op);
      const NodePtr mask = parse(text).pointer();
      Evaluation evaluation({{"l", size, values, exact}}, Floats::rounded);
      const int before = evaluation.add(mask), after = evaluation.add(fold(mask));
      for (int i = 0; i < 81 * 25; ++i) {
        constexpr std::int32_t kPositions[] = {0, 1, 2, 7, INT32_MAX - 1};
        const std::vector<Value> found = evaluation.run(
            {.b = i % 9, .h = i / 9 % 9, .q = kPositions[i / 81 % 5], .kv = kPositions[i / 405]});
        ASSERT_EQ(found[before].integer, found[after].integer) << text << " of " << i;
      }
    }
}

TEST(ExprFold, IntsWrapAndZeroDividesToZero) {
  expect_folded({{"2147483647 + 1", "-2147483648"},
                 {"-2147483648 - 1", "2147483647"},
                 {"65536 * 65536", "0"},
                 {"-(-2147483648)", "-2147483648"},
                 {"abs(-2147483648)", "-2147483648"},
                 {"-2147483648 / -1", "-2147483648"},
                 {"-2147483648 % -1", "0"},
                 {"7 / 0", "0"},
                 {"7 % 0", "0"},
                 {"-7 / 2", "-3"},
                 {"-7 % 2", "-1"},
                 {"1 << 33", "2"},
                 {"1 << -1", "-2147483648"},
                 {"-8 >> 1", "-4"},
                 {"6 & 3 | 8 ^ 1", "11"},
                 {"max(min(3, 4), 1)", "3"},
                 {"~5", "-6"}});
}

TEST(ExprFold, FloatsAreThoseOfFp32) {
  expect_folded({{"0.1 + 0.2", "0.3"},
                 {"16777216.0 + 1.0", "16777216.0"},
                 {"1.0 / 3.0", "0.33333334"},
                 {"score * to_float(2)", "score * 2.0"},
                 {"to_float(16777217)", "16777216.0"},
                 {"to_int(1e10)", "2147483647"},
                 {"to_int(-1.9)", "-1"},
                 {"floor(-1.5)", "-2.0"},
                 {"abs(-1.5)", "1.5"},
                 {"min(1.0, -2.0)", "-2.0"},
                 {"to_float(true) + to_float(false)", "1.0"}});
}

TEST(ExprFold, WhatWouldNotBeFiniteOrNormalStays) {
  for (const char* text : {"1e+38 * 10.0", "1.0 / 0.0", "1e-30 * 1e-30", "1e-45 + 1e-45", "exp(1.0)",
                           "sqrt(2.0)", "min(0.0, -0.0)", "0.0 / 0.0"}) {
    EXPECT_EQ(folded(text), text);
  }
}

TEST(ExprFold, WhatHasNoEffectGoes) {
  for (const char* text :
       {"q + 0", "0 + q", "q - 0", "q * 1", "1 * q", "q / 1", "q << 0", "q >> 0", "q | 0", "q ^ 0", "q & -1",
        "-(-q)", "~~q", "select(true, q, kv)", "false ? kv : q", "to_int(score) * 0 + q", "q + (3 - 3)"}) {
    EXPECT_EQ(folded(text), "q") << text;
  }
  for (const char* text :
       {"score * 1.0", "score * 1", "score / 1.0", "score - 0.0", "score + -0.0", "-(-score)"})
    EXPECT_EQ(folded(text), "score") << text;
  for (const char* text : {"true && q < b", "q < b && true", "q < b || false", "!!(q < b)"})
    EXPECT_EQ(folded(text), "q < b") << text;
  expect_folded({{"q < b && false", "false"}, {"true || q < b", "true"}, {"q % 1", "0"}, {"q / 0", "0"}});
}

TEST(ExprFold, WhatMayHaveAnEffectStays) {
  // -0.0 + 0.0 is 0.0; infinity and NaN times zero are no zero; sums of floats depend on their order.
  for (const char* text : {"score + 0.0", "0.0 - score", "score * 0.0", "0.0 / score", "score + 1.0 + 2.0",
                           "score - score", "q + 1 - 1"}) {
    EXPECT_EQ(folded(text), text);
  }
}

TEST(ExprFold, ATreeThatDoesNotFoldIsTheSame) {
  const Expr program = parse("t: fp32 1d; score + t[q] * to_float(kv)");
  EXPECT_EQ(fold(program.pointer()), program.pointer());
  EXPECT_EQ(folded("t: fp32 1d; score + t[q + 0]"), "t: fp32 1d; score + t[q]");
}

TEST(ExprFold, SharedTreesFoldOnce) {
  Expr twice = q;
  for (int i = 0; i < 18; ++i) twice = twice + twice;
  EXPECT_EQ(fold((twice * 1).pointer()), twice.pointer());
}

TEST(ExprFold, RandomProgramsKeepTheirTypesShrinkAndSettle) {
  for (std::uint64_t seed = 0; seed < 3000; ++seed) {
    test::RandomProgram random(seed, {.depth = 5});
    for (const Expr& program : {random.score_program(), random.mask_program()}) {
      const NodePtr once = fold(program.pointer());
      ASSERT_EQ(once->type, program.type());
      ASSERT_LE(once->size, program.node().size);
      ASSERT_EQ(fold(once), once) << to_string(Expr(once));
    }
  }
}

/// A value for each name that random programs declare; tensors are small, so that indices are clamped, too.
struct RandomCaptures {
  explicit RandomCaptures(test::RandomProgram& random) {
    for (const Declaration& d : test::random_program_declarations()) {
      sizes.push_back(std::vector<std::int64_t>(d.rank, 3));
      const auto count = static_cast<std::size_t>(std::pow(3, d.rank));
      values.emplace_back();
      for (std::size_t i = 0; i < count; ++i) {
        const bool boolean = read_type(d.type) == Type::boolean, real = read_type(d.type) == Type::real;
        values.back().push_back(boolean ? random.below(2) : (random.below(41) - 20) / (real ? 4.0 : 1.0));
      }
      names.push_back(d.name);
    }
  }
  std::vector<Bound> bound() const {
    std::vector<Bound> out;
    for (std::size_t i = 0; i < names.size(); ++i) out.push_back({names[i], sizes[i], values[i]});
    return out;
  }

  std::vector<std::string> names;
  std::vector<std::vector<std::int64_t>> sizes;
  std::vector<std::vector<double>> values;
};

Point random_point(test::RandomProgram& random) {
  Point p{.b = random.below(4), .h = random.below(4), .h_kv = random.below(2)};
  p.seqlen_q = 1 + random.below(50);
  p.seqlen_kv = 1 + random.below(50);
  p.q = random.below(p.seqlen_q);
  p.kv = random.below(p.seqlen_kv);
  p.score = (random.below(161) - 80) / 16.0;
  return p;
}

TEST(ExprFold, RandomProgramsKeepTheirValues) {
  int smaller = 0;
  for (std::uint64_t seed = 0; seed < 4000; ++seed) {
    test::RandomProgram random(seed, {.depth = 5});
    const RandomCaptures captures(random);
    for (const Expr& program : {random.score_program(), random.mask_program()}) {
      const NodePtr folded = fold(program.pointer());
      smaller += folded != program.pointer();
      Evaluation evaluation(captures.bound(), Floats::rounded);
      const int before = evaluation.add(program.pointer()), after = evaluation.add(folded);
      for (int i = 0; i < 8; ++i) {
        const std::vector<Value> values = evaluation.run(random_point(random));
        const Value a = values[before], b = values[after];
        if (program.type() != Type::real) {
          ASSERT_EQ(a.integer, b.integer) << to_string(program) << "\n" << to_string(Expr(folded));
        } else if (!std::isnan(a.real) || !std::isnan(b.real)) {
          ASSERT_EQ(a.real, b.real) << to_string(program) << "\n" << to_string(Expr(folded));
        }
      }
    }
  }
  EXPECT_GT(smaller, 2000);
}

}  // namespace
}  // namespace flashjit::expr
