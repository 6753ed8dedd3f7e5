// Weights that a program gives in place of a softmax: their text, what is refused beside them, who plans
// them, and the reference's results against formulas.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "flashjit/error.hpp"
#include "plan/family.hpp"
#include "plan/plan.hpp"
#include "reference/reference.hpp"
#include "tests/support/expectations.hpp"
#include "tests/support/refused_call.hpp"

namespace flashjit {
namespace {

using test::refused_spec;

const std::string kSigmoid = "bf16:d64:score{sigmoid(score - 4.0)}";

TEST(WeightMod, IsAnOptionOfTheText) {
  const KernelSpec spec = parse_spec("fwd:" + kSigmoid + ":weight_mod:causal");
  EXPECT_TRUE(spec.score.is_weight());
  EXPECT_EQ(to_string(spec), "fwd:bf16:d64:score{sigmoid(score - 4.0)}:causal:weight_mod");
  EXPECT_EQ(parse_spec(to_string(spec)), spec.normalized());
  AttentionSpec built{.head_dim = 64};
  built.score = weights(sigmoid(expr::score - 4.0f));
  EXPECT_EQ(to_string(built), kSigmoid + ":weight_mod");
}

TEST(WeightMod, RefusesWhatASoftmaxIsFor) {
  EXPECT_EQ(refused_spec(kSigmoid + ":causal:kvlen:map64x64:weight_mod"), "accepted");
  EXPECT_EQ(refused_spec(kSigmoid + ":cache:fp32_out:weight_mod"), "accepted");
  for (const std::string option : {"dropout", "sinks", "row_max", "indices", "invariant", "running_state"}) {
    const std::string message = refused_spec(kSigmoid + ":" + option + ":weight_mod");
    const std::string named = option == "invariant" ? "batch_invariant" : option;
    expect_in("weight_mod is set and " + named + " is, too", message);
    expect_in("leave one out", message);
  }
  for (const char* none : {"bf16:d64:weight_mod", "bf16:d64:score{score}:weight_mod"}) {
    expect_in("weight_mod is set and its program is empty or the score itself", refused_spec(none));
    expect_in("sigmoid(score + bias)", refused_spec(none));
  }
  expect_in("the pass is jvp and weight_mod is set", refused_spec("jvp:" + kSigmoid + ":weight_mod"));
}

TileConfig planned(const KernelSpec& spec, const AttentionShape& shape, const char* arch) {
  return plan::make_plan(spec, shape, DeviceInfo::parse(arch), {}).config;
}

TEST(WeightMod, IsPlannedForFamiliesWithoutASoftmax) {
  const AttentionShape shape{2, 8, 2, 512, 4096};
  for (const char* pass : {"fwd:", "bwd:"}) {
    const KernelSpec spec = parse_spec(pass + kSigmoid + ":weight_mod");
    EXPECT_EQ(planned(spec, shape, "sm_90a").family, Family::sm90);
    EXPECT_EQ(planned(spec, shape, "sm_120").family, Family::sm80);
    EXPECT_EQ(planned(spec, shape, "sm_75").family, Family::simt);
    EXPECT_FALSE(plan::traits(Family::sm75).supports(spec, DeviceInfo::parse("sm_80")));
  }
}

/// Hopper's caches have stream-K, which joins parts of rows by their LSE.
TEST(WeightMod, IsForOtherFamiliesOverACache) {
  const KernelSpec spec = parse_spec("fwd:" + kSigmoid + ":cache:weight_mod");
  EXPECT_EQ(planned(spec, {2, 8, 2, 1, 4096}, "sm_90a").family, Family::sm80);
}

/// Splits are joined by their LSE.
TEST(WeightMod, IsNotSplit) {
  const DeviceInfo device = DeviceInfo::parse("sm_80");
  const KernelSpec spec = parse_spec("fwd:" + kSigmoid + ":weight_mod");
  EXPECT_FALSE(planned(spec, {1, 1, 1, 1, 100000}, "sm_80").split);
  const Support support =
      plan::traits(Family::sm80).admits(spec, parse_config("sm80:br64:bc64:w4:s2:split"), device);
  ASSERT_FALSE(support);
  expect_in("split is not for weight_mod", support.reason);
}

// --- The reference ----------------------------------------------------------------------------------------

constexpr std::int64_t kQueries = 5, kKeys = 7, kDim = 8;
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

reference::Problem problem_of(const std::string& options) {
  reference::Problem problem{.spec = parse_spec("fp32:d8:" + options), .shape = {1, 1, 1, kQueries, kKeys}};
  const auto filled = [](std::int64_t rows, double step) {
    std::vector<double> values;
    for (std::int64_t i = 0; i < rows * kDim; ++i)
      values.push_back(static_cast<float>(std::sin(step * static_cast<double>(i + 1))));
    return values;
  };
  problem.q = filled(kQueries, 0.7), problem.k = filled(kKeys, 1.3), problem.v = filled(kKeys, 2.1);
  problem.dout = filled(kQueries, 0.4);
  return problem;
}

double dot_of(const std::vector<double>& a, std::int64_t i, const std::vector<double>& b, std::int64_t j) {
  double sum = 0;
  for (std::int64_t c = 0; c < kDim; ++c) sum += a[i * kDim + c] * b[j * kDim + c];
  return sum;
}

TEST(WeightMod, ReferenceFollowsTheFormula) {
  const reference::Problem problem = problem_of("score{sigmoid(score - 1.0)}:mask{q >= kv}:weight_mod");
  const double scale = 1 / std::sqrt(double{kDim});
  const reference::Forward forward = reference::forward(problem);
  const reference::Backward backward = reference::backward(problem);
  std::vector<double> out(kQueries * kDim), dq(kQueries * kDim), dk(kKeys * kDim), dv(kKeys * kDim);
  for (std::int64_t i = 0; i < kQueries; ++i)
    for (std::int64_t j = 0; j <= i; ++j) {
      const double p = 1 / (1 + std::exp(1 - scale * dot_of(problem.q, i, problem.k, j)));
      const double ds = dot_of(problem.dout, i, problem.v, j) * p * (1 - p) * scale;
      for (std::int64_t c = 0; c < kDim; ++c) {
        out[i * kDim + c] += p * problem.v[j * kDim + c];
        dq[i * kDim + c] += ds * problem.k[j * kDim + c];
        dk[j * kDim + c] += ds * problem.q[i * kDim + c];
        dv[j * kDim + c] += p * problem.dout[i * kDim + c];
      }
    }
  EXPECT_LE(reference::max_abs_error(forward.out, out), 1e-12);
  EXPECT_LE(reference::max_abs_error(backward.dq, dq), 1e-12);
  EXPECT_LE(reference::max_abs_error(backward.dk, dk), 1e-12);
  EXPECT_LE(reference::max_abs_error(backward.dv, dv), 1e-12);
}

/// A weight of 0 is a weight: its gradient is what the program's slope says, which a mask's pair has not.
TEST(WeightMod, AZeroWeightHasAGradientAndAMaskedPairHasNone) {
  reference::Problem problem =
      problem_of("score{x: fp32 1d grad; score * 0.0 + x[kv]}:mask{kv != 3}:weight_mod");
  problem.captures = {{"x", {kKeys}, std::vector<double>(kKeys, 0.0)}};
  for (std::int64_t c = 0; c < kDim; ++c) problem.v[3 * kDim + c] = kNaN;
  const reference::Backward backward = reference::backward(problem);
  ASSERT_EQ(backward.captures.size(), 1u);
  for (std::int64_t j = 0; j < kKeys; ++j) {
    double expected = 0;
    for (std::int64_t i = 0; i < kQueries && j != 3; ++i) expected += dot_of(problem.dout, i, problem.v, j);
    EXPECT_NEAR(backward.captures[0][j], expected, 1e-12) << j;
  }
}

TEST(WeightMod, ARowWithoutKeysIsZeroAndNaNIsSeen) {
  reference::Problem problem = problem_of("score{sigmoid(score)}:mask{q != 2}:weight_mod");
  problem.q[4 * kDim] = kNaN;
  const reference::Forward forward = reference::forward(problem);
  for (std::int64_t c = 0; c < kDim; ++c) {
    EXPECT_EQ(forward.out[2 * kDim + c], 0.0);
    EXPECT_TRUE(std::isnan(forward.out[4 * kDim + c]));
    EXPECT_TRUE(std::isfinite(forward.out[3 * kDim + c]));
  }
}

}  // namespace
}  // namespace flashjit
