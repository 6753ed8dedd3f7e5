// Evaluation on the CPU and derivatives.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "expr/derive.hpp"
#include "expr/evaluate.hpp"
#include "expr/nodes.hpp"
#include "tests/support/tame_program.hpp"

namespace flashjit::expr {
namespace {

using test::bounds_of;
using test::Given;
using test::tame_captures;
using test::TameProgram;

Value value_of(std::string_view text, const Point& point = {}, const std::vector<Given>& given = {}) {
  Evaluation evaluation(bounds_of(given), Floats::exact);
  const int place = evaluation.add(parse(text).pointer());
  return evaluation.run(point)[place];
}
std::int32_t integer(std::string_view text, const Point& point = {}) { return value_of(text, point).integer; }
double real(std::string_view text, const Point& point = {}) { return value_of(text, point).real; }

constexpr std::int32_t kMin = std::numeric_limits<std::int32_t>::min();

TEST(Evaluate, IntsWrap) {
  const Point p{.q = 2147483647, .kv = kMin};
  EXPECT_EQ(integer("q + 1", p), kMin);
  EXPECT_EQ(integer("-kv", p), kMin);
  EXPECT_EQ(integer("abs(kv)", p), kMin);
  EXPECT_EQ(integer("kv - 1", p), 2147483647);
  EXPECT_EQ(integer("q * 2", p), -2);
  EXPECT_EQ(integer("kv / (q - 1 - q)", {.kv = kMin}), kMin);
}

TEST(Evaluate, DivisionTruncatesAndKnowsZero) {
  EXPECT_EQ(integer("q / kv", {.q = -7, .kv = 2}), -3);
  EXPECT_EQ(integer("q % kv", {.q = -7, .kv = 2}), -1);
  EXPECT_EQ(integer("q / kv", {.q = -7}), 0);
  EXPECT_EQ(integer("q % kv", {.q = -7}), 0);
  EXPECT_EQ(integer("q % kv", {.q = kMin, .kv = -1}), 0);
  EXPECT_EQ(integer("q / kv", {.q = kMin, .kv = -1}), kMin);
}

TEST(Evaluate, ShiftsTakeCountsModulo32) {
  EXPECT_EQ(integer("q << kv", {.q = 3, .kv = 33}), 6);
  EXPECT_EQ(integer("q >> kv", {.q = -8, .kv = -31}), -4);
}

TEST(Evaluate, ConversionsSaturate) {
  EXPECT_EQ(integer("to_int(score)", {.score = 1e10}), 2147483647);
  EXPECT_EQ(integer("to_int(score)", {.score = -1e10}), kMin);
  EXPECT_EQ(integer("to_int(score)", {.score = -1.9}), -1);
  EXPECT_EQ(integer("to_int(score)", {.score = std::nan("")}), 0);
  EXPECT_EQ(integer("to_bool(score)", {.score = std::nan("")}), 1);
}

TEST(Evaluate, ReadsAreClamped) {
  const std::vector<Given> values = {test::given("t", ElementType::int64, {2, 3}, {0, 1, 2, 10, 11, 1e12})};
  const auto read = [&](int q, int kv) {
    return value_of("t: int64 2d; t[q, kv]", {.q = q, .kv = kv}, values).integer;
  };
  EXPECT_EQ(read(1, 1), 11);
  EXPECT_EQ(read(-5, 1), 1);
  EXPECT_EQ(read(9, -1), 10);
  EXPECT_EQ(read(9, 9), 1000000000000);
}

TEST(Evaluate, Int64sAreExact) {
  const std::vector<Given> values = {test::given("t", ElementType::int64, {4}, {1e12, 1e12 + 1, -0x1p40, 3})};
  const auto value = [&](const char* text) {
    return value_of(std::string("t: int64 1d; ") + text, {.q = 1, .kv = 3}, values).integer;
  };
  EXPECT_EQ(value("t[1] - t[0]"), 1);
  EXPECT_EQ(value("t[0] == t[1]"), 0);
  EXPECT_EQ(value("t[2] < t[3] && t[0] < t[1] && t[0] >= t[0]"), 1);
  EXPECT_EQ(value("to_int(t[0]) + to_int(t[3])"), INT32_MIN + 2);
  EXPECT_EQ(value("low_word(t[2]) + high_word(t[2])"), -256);
  EXPECT_EQ(value("(to_int64(q) << 40) / t[3]"), (1LL << 40) / 3);
  EXPECT_EQ(value("q < t[3] && kv <= q + t[0]"), 1);
}

TEST(Evaluate, Int64SumsSaturate) {
  Evaluation evaluation({}, Floats::exact);
  const Expr least = to_int64(Expr(INT32_MIN)) * to_int64(Expr(INT32_MIN)) * to_int64(Expr(-2)),
             most = ~least;
  const Expr one = to_int64(q);
  const auto value = [&](const Expr& e) {
    const int place = evaluation.add(e.pointer());
    return evaluation.run({.q = 1})[place].integer;
  };
  EXPECT_EQ(value(least), INT64_MIN);
  EXPECT_EQ(value(most + one), INT64_MAX);
  EXPECT_EQ(value(least + most + one), 0);
  EXPECT_EQ(value(least - one), INT64_MIN);
  EXPECT_EQ(value(most - least), INT64_MAX);
  EXPECT_EQ(value(most - one - most), -1);
  EXPECT_EQ(value(-least), INT64_MIN);
}

TEST(Evaluate, FunctionsAreThoseOfTheLibrary) {
  const Point p{.q = 5, .score = 0.7};
  EXPECT_DOUBLE_EQ(real("sigmoid(score)", p), 1 / (1 + std::exp(-0.7)));
  EXPECT_DOUBLE_EQ(real("rsqrt(score)", p), 1 / std::sqrt(0.7));
  EXPECT_DOUBLE_EQ(real("exp2(score) + log2(score)", p), std::exp2(0.7) + std::log2(0.7));
  EXPECT_DOUBLE_EQ(real("select(q > 4, floor(-score), 1.0)", p), -1);
  EXPECT_DOUBLE_EQ(real("trunc(-score) + round(score) + round(2.5) + round(-1.5)", p), 1 + 2 - 2);
  EXPECT_DOUBLE_EQ(real("erf(score) + expm1(score) + log1p(score)", p),
                   std::erf(0.7) + std::expm1(0.7) + std::log1p(0.7));
  EXPECT_DOUBLE_EQ(real("pow(score, 3.0) + pow(-score, 2.0)", p), std::pow(0.7, 3) + 0.7 * 0.7);
  EXPECT_DOUBLE_EQ(real("-score % 0.5 + score % -0.5", p), std::fmod(-0.7, 0.5) + std::fmod(0.7, -0.5));
}

TEST(Evaluate, SizesAreThoseOfTheCall) {
  const std::vector<Given> values = {test::given("t", ElementType::fp32, {2, 3}, {0, 1, 2, 10, 11, 12})};
  EXPECT_EQ(value_of("t: fp32 2d; size(t, 0) * 10 + size(t, 1)", {}, values).integer, 23);
  EXPECT_EQ(value_of("t: fp32 2d; t[size(t, 0) - 1, size(t, 1) - 2]", {}, values).real, 11);
}

TEST(Evaluate, RoundedFloatsAreThoseOfFp32) {
  Evaluation evaluation({}, Floats::rounded);
  const int place = evaluation.add(parse("to_float(q) * 0.1 + 16777216.0").pointer());
  const float expected = 13.0f * 0.1f + 16777216.0f;
  EXPECT_EQ(evaluation.run({.q = 13})[place].real, expected);
}

std::string derived(std::string_view text) {
  return to_string(Expr(derivative(parse(text).pointer(), make_name(Name::score))));
}

TEST(Derive, TrivialTermsVanish) {
  EXPECT_EQ(derived("score"), "1.0");
  EXPECT_EQ(derived("score + to_float(kv - q)"), "1.0");
  EXPECT_EQ(derived("slopes: fp32 1d; score - slopes[h] * to_float(q - kv)"), "1.0");
  EXPECT_EQ(derived("select(q < kv, score, score * 2.0)"), "select(q < kv, 1.0, 2.0)");
  EXPECT_EQ(derived("50.0 * tanh(score / 50.0)"), "1.0 - tanh(score / 50.0) * tanh(score / 50.0)");
  EXPECT_EQ(derived("floor(score)"), "0.0");
  EXPECT_EQ(derived("trunc(score) + round(score)"), "0.0");
  EXPECT_EQ(derived("score % 3.0"), "1.0");
  EXPECT_EQ(derived("to_float(to_int(score))"), "0.0");
}

double slope_at(std::string_view text, const Point& point) {
  Evaluation evaluation({}, Floats::exact);
  const int place = evaluation.add(derivative(parse(text).pointer(), make_name(Name::score)));
  return evaluation.run(point)[place].real;
}
double slope(std::string_view text, double score) { return slope_at(text, {.score = score}); }

TEST(Derive, KinksAreAsDocumented) {
  EXPECT_EQ(slope("abs(score)", 0), 0);
  EXPECT_EQ(slope("abs(score)", -2), -1);
  EXPECT_EQ(slope("max(score, 0.0)", 0), 1);
  EXPECT_EQ(slope("max(0.0, score)", 0), 0);
  EXPECT_EQ(slope("min(score, 2.0 * score)", 0), 1);
}

TEST(Derive, TheArmThatIsNotTakenMayBeInfinite) {
  EXPECT_EQ(slope("select(score > 0.0, log(score), 0.0)", 0), 0);
  EXPECT_EQ(slope("2.0 * select(score > 0.0, sqrt(score), score)", 0), 2);
}

TEST(Derive, ABranchThatIsNotTakenHandsNothingOnHoweverSteepTheFunctionAroundIt) {
  for (const char* guarded :
       {"sqrt(max(score, 0.0))", "sqrt(max(0.0, score))", "pow(max(score, 0.0), 0.5)",
        "sqrt(min(max(score, 0.0), 4.0))", "sqrt(score > 0.0 ? score : 0.0)",
        "sqrt(max(score, 0.0) + max(score - 1.0, 0.0))", "exp(-1.0 / max(score, 0.0))",
        "-sqrt(2.0 * max(score, 0.0)) / 3.0", "log(max(score, 0.0)) < 0.0 ? 1.0 : score * 0.0"})
    EXPECT_EQ(slope(guarded, -1), 0) << guarded;
  EXPECT_DOUBLE_EQ(slope("sqrt(max(score, 0.0))", 4), 0.25);
  EXPECT_DOUBLE_EQ(slope("pow(max(score, 0.0), 0.5)", 4), 0.25);
  EXPECT_EQ(slope("sqrt(max(0.0, score))", 0), 0);
}

TEST(Derive, ABranchInAFactorGivesZeroBesideAnInfiniteSlope) {
  EXPECT_EQ(slope("sqrt(score * (score > 0.0 ? score : 0.0))", -1), 0);
  EXPECT_DOUBLE_EQ(slope("sqrt(score * (score > 0.0 ? score : 0.0))", 4), 1);
}

/// What several branches hand on is zero if each of them is closed, whatever linear operations come before
/// the steep function.
TEST(Derive, ASumOfClosedBranchesIsZeroBesideANaNSlope) {
  const auto guarded = [](const std::string& x) { return "max(0.0, " + x + ") + max(0.0, " + x + " - 1.0)"; };
  const std::string root = "sqrt(score)", first = "(q < kv ? " + root + " : 3.0)",
                    second = "(q < kv ? 3.0 : " + root + ")";
  EXPECT_EQ(slope(guarded(root), -1), 0);
  EXPECT_EQ(slope(guarded("0.5 * " + root), -1), 0);
  EXPECT_EQ(slope(guarded("-" + root), -1), 0);
  EXPECT_EQ(slope(guarded("-" + root) + " + " + guarded(root), -1), 0);
  EXPECT_EQ(slope_at(guarded(first) + " + exp(" + second + ")", {.q = 0, .kv = 1, .score = -1}), 0);
  EXPECT_EQ(slope_at(guarded(second) + " + exp(" + first + ")", {.q = 1, .kv = 0, .score = -1}), 0);
  EXPECT_DOUBLE_EQ(slope(guarded("0.5 * " + root), 16), 0.125);
}

TEST(Derive, ZeroBasesAndExponentsOfPowersHaveNoSlope) {
  EXPECT_EQ(slope("pow(0.0, score)", 2), 0);
  EXPECT_EQ(slope("pow(score - 1.0, score)", 1), 1);
  EXPECT_EQ(slope_at("pow(score, to_float(q))", {.q = 0, .score = 0}), 0);
  EXPECT_EQ(slope_at("pow(score, to_float(q))", {.q = 2, .score = 3}), 6);
}

TEST(Derive, ADivisorOfARemainderHasTheSlopeOfTheTruncatedQuotient) {
  EXPECT_EQ(slope("7.0 % score", 2), -3);
  EXPECT_EQ(slope("-7.0 % score", 2), 3);
  EXPECT_EQ(slope("-7.0 % score", -2), -3);
  EXPECT_EQ(slope("score % (0.25 * score - 1.0)", 7), 1 - 9 * 0.25);
}

TEST(Derive, ProductsOfLiteralsBeyondFp32AreNotFolded) {
  EXPECT_DOUBLE_EQ(slope("1.0e30 * (1.0e30 * score)", 1), double{1e30f} * double{1e30f});
  EXPECT_DOUBLE_EQ(slope("score / 1.0e-40", 1), 1 / double{1e-40f});
}

TEST(Derive, FollowsTheValueWhereOneOfTwoIsNaN) {
  EXPECT_EQ(slope("max(-10.0, log(score))", -2), 0);
  EXPECT_EQ(slope("max(log(score), -10.0)", -2), 0);
  EXPECT_EQ(slope("min(log(score), 3.0 * score)", -2), 3);
  EXPECT_EQ(slope("min(3.0 * score, log(score))", -2), 3);
  EXPECT_EQ(slope("max(log(score), 3.0 * score)", 0.5), 1.5 < std::log(0.5) ? 2 : 3);
}

/// The derivative is as long as its program, not as its paths.
TEST(Derive, OfSharedNodesIsShared) {
  Expr x = score;
  for (int i = 0; i < 7; ++i) x = sqrt(max(x, 0.0) + max(-x, 0.0)) + 0.5 * x;
  Graph graph;
  const int own = graph.add(x.pointer());
  graph.add(derivative(x.pointer(), make_name(Name::score)));
  EXPECT_LT(graph.size(), 20 * own) << own;
}

TEST(Derive, ReadsWithGradAreFoundOnce) {
  const Expr e = parse("g: fp32 2d grad; f: fp32 1d; score * g[h, q] + g[h, q] * f[q] + g[h, kv]");
  EXPECT_EQ(reads_with_grad(e.pointer()).size(), 2u);
}

/// The slope by differences; NaN where those of two steps disagree: a kink or a wild place.
template <class Function>
double by_differences(Function f) {
  const auto central = [&](double step) { return (f(step) - f(-step)) / (2 * step); };
  const double fine = central(1e-5), coarse = central(2e-5), one_sided = (f(1e-5) - f(0)) / 1e-5;
  const double size = 1 + std::fabs(fine);
  const bool smooth =
      std::fabs(fine - coarse) < 1e-6 * size && std::fabs(fine - one_sided) < 1e-3 * std::fabs(fine) + 2e-5;
  return smooth ? fine : NAN;
}

/// Steep functions with guards inside of them and around them, without products of two such, whose slopes may
/// be infinity times zero in earnest. Guards give zero to the constant at their
/// kink, where other guards may put them.
class GuardedProgram {
 public:
  explicit GuardedProgram(unsigned seed) : random_(seed) {}

  Expr make(int depth) {
    if (depth == 0) return pick(2) ? Expr(score) : score * 0.5 + 0.25;
    const Expr x = make(depth - 1);
    switch (pick(6)) {
      case 0:
        return x + make(depth - 1) * 0.75;
      case 1:
        return x * 0.5 - 1.0;
      case 2:
        return select(x > 0.0, steep(x), constant());
      case 3:
        return pick(2) ? max(constant(), steep(x)) : min(steep(x), constant());
      default:
        return steep(guarded(x));
    }
  }

 private:
  int pick(unsigned count) { return static_cast<int>(random_() % count); }
  Expr constant() { return Expr(static_cast<float>(pick(5) - 2)); }
  Expr guarded(const Expr& x) {
    switch (pick(5)) {
      case 0:
        return max(Expr(0.0), x);
      case 1:
        return max(Expr(0.0), -x);
      case 2:
        return select(x > 0.0, x, Expr(0.0));
      case 3:
        return max(Expr(0.0), x) + max(Expr(0.0), x - 1.0);
      default:
        return min(max(Expr(0.0), x), Expr(2.0));
    }
  }
  Expr steep(const Expr& x) {
    switch (pick(6)) {
      case 0:
        return pow(x, Expr(0.5));
      case 1:
        return 1.0 / (1.0 + rsqrt(x));
      case 2:
        return tanh(log(x));
      case 3:
        return sigmoid(rsqrt(x));
      default:
        return sqrt(x);
    }
  }

  std::mt19937 random_;
};

TEST(Derive, GuardedProgramsMatchDifferences) {
  int checked = 0;
  for (unsigned seed = 0; seed < 3000; ++seed) {
    const NodePtr root = GuardedProgram(seed).make(1 + static_cast<int>(seed % 4)).pointer();
    Evaluation evaluation({}, Floats::exact);
    const int place = evaluation.add(root);
    const int slope = evaluation.add(derivative(root, make_name(Name::score)));
    for (const double at : {-1.3, -0.37, 0.21, 1.7}) {
      const std::vector<Value> values = evaluation.run({.score = at});
      if (!(std::fabs(values[place].real) < 1e3)) continue;
      const double expected =
          by_differences([&](double step) { return evaluation.run({.score = at + step})[place].real; });
      if (std::isnan(expected)) continue;
      ++checked;
      EXPECT_NEAR(values[slope].real, expected, 1e-4 * (1 + std::fabs(expected)))
          << to_string(Expr(root)) << "\nat " << at << " is "
          << to_string(Expr(derivative(root, make_name(Name::score))));
    }
  }
  EXPECT_GT(checked, 5000);
}

TEST(Derive, RandomProgramsMatchDifferences) {
  int checked = 0;
  for (unsigned seed = 0; seed < 2000; ++seed) {
    std::vector<Given> given = tame_captures(seed);
    const NodePtr root = TameProgram(seed, given).score().pointer();
    Evaluation evaluation(bounds_of(given), Floats::exact);
    const int place = evaluation.add(root);
    std::vector<NodePtr> variables = reads_with_grad(root);
    variables.push_back(make_name(Name::score));
    for (const NodePtr& variable : variables) {
      const int slope = evaluation.add(derivative(root, variable)), at = evaluation.add(variable);
      const Point point{.b = 1, .h = 1, .q = 4, .kv = 3, .seqlen_q = 9, .seqlen_kv = 7, .score = 0.8125};
      const std::vector<Value> values = evaluation.run(point);
      if (!(std::fabs(values[place].real) < 1e3)) continue;
      const bool by_score = is_name(*variable, Name::score);
      // Other reads of the same element move with it: then only their sum has a meaning.
      if (!by_score && variables.size() > 2) continue;
      double* moved = nullptr;
      if (!by_score) {
        const Evaluation::Element element = evaluation.element(at, values);
        moved = &given[element.capture].values[element.index];
      }
      const double expected = by_differences([&](double step) {
        Point near = point;
        if (by_score) near.score += step;
        if (moved) *moved += step;
        const double result = evaluation.run(near)[place].real;
        if (moved) *moved -= step;
        return result;
      });
      if (std::isnan(expected)) continue;
      ++checked;
      EXPECT_NEAR(values[slope].real, expected, 1e-4 * (1 + std::fabs(expected)))
          << to_string(Expr(root)) << "\nby " << to_string(Expr(variable)) << " is "
          << to_string(Expr(derivative(root, variable)));
    }
  }
  EXPECT_GT(checked, 1500);
}

}  // namespace
}  // namespace flashjit::expr
