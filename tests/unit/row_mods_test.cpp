// Programs of Q's and K's rows: their text, what is refused, who plans them, and the reference's results and
// gradients against formulas and finite differences.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "flashjit/error.hpp"
#include "plan/family.hpp"
#include "plan/plan.hpp"
#include "reference/reference.hpp"
#include "tests/support/expectations.hpp"
#include "tests/support/program_problem.hpp"
#include "tests/support/refused_call.hpp"

namespace flashjit {
namespace {

using test::refused_spec;
class RowMods : public test::ProgramProblem {};

const std::string kNorm = "{w: fp32 1d; element * rsqrt(sum_of_squares / 64.0 + 0.001) * w[column]}";

TEST_F(RowMods, AreFieldsOfTheText) {
  const KernelSpec spec = parse_spec("fwd:bf16:d64:k_mod" + kNorm + ":causal:q_mod" + kNorm + ":sinks");
  EXPECT_EQ(to_string(spec), "fwd:bf16:d64:causal:q_mod" + kNorm + ":k_mod" + kNorm + ":sinks");
  EXPECT_EQ(parse_spec(to_string(spec)), spec.normalized());
  AttentionSpec built{.head_dim = 64};
  using namespace expr;
  built.prologue.q_mod =
      element * rsqrt(sum_of_squares / 64.0f + 0.001f) * tensor("w", ElementType::fp32, 1)[column];
  built.prologue.k_mod = element_at(column ^ 1) + to_float(kv);
  EXPECT_EQ(to_string(built), "bf16:d64:q_mod" + kNorm + ":k_mod{element_at(column ^ 1) + to_float(kv)}");
  EXPECT_TRUE(RowProgram("element").empty());
  EXPECT_TRUE(RowProgram(" ").empty());
  // One scalar is one thing in all programs.
  EXPECT_EQ(to_string(parse_spec("bf16:d64:score{n: int; score * n}:q_mod{n: int; element / n}")),
            "fwd:bf16:d64:score{n: float; score * n}:q_mod{n: float; element / n}");
}

TEST_F(RowMods, RefuseWhatTheyCannotRead) {
  expect_in("a q_mod or k_mod program reads score;", refused_spec("bf16:d64:q_mod{score * element}"));
  expect_in("a q_mod program reads kv; its position is q", refused_spec("bf16:d64:q_mod{element + kv}"));
  expect_in("a k_mod program reads q; its position is kv", refused_spec("bf16:d64:k_mod{element + q}"));
  expect_in("a k_mod program reads h;", refused_spec("bf16:d64:k_mod{element + h}"));
  expect_in("a q_mod or k_mod program is float, not bool", refused_spec("bf16:d64:q_mod{element > 0.0}"));
  expect_in("a score program reads element, which is for programs of Q and K",
            refused_spec("bf16:d64:score{score + element}"));
  expect_in("a mask program reads element_at, which is for",
            refused_spec("bf16:d64:mask{element_at(q) > 0.0}"));
  expect_in("an out_mod program reads sum_of_squares",
            refused_spec("bf16:d64:out_mod{out * sum_of_squares}"));
  expect_in("the q_mod program declares 'w: fp32 1d', but the k_mod program 'w: fp16 1d'",
            refused_spec("bf16:d64:q_mod{w: fp32 1d; element * w[h]}:k_mod{w: fp16 1d; element * w[h_kv]}"));
  expect_in("element_at takes int, not float", refused_spec("bf16:d64:q_mod{element_at(element)}"));
}

TEST_F(RowMods, RefuseWhatIsNotOneCallsQAndK) {
  const std::string q_mod = "bf16:d64:q_mod" + kNorm, k_mod = "bf16:d64:k_mod" + kNorm;
  EXPECT_EQ(refused_spec(q_mod + ":causal:kvlen:map64x64:dropout:sinks:row_max:fp32_out"), "accepted");
  EXPECT_EQ(refused_spec(q_mod + ":varlen:pages16"), "accepted");
  EXPECT_EQ(refused_spec(q_mod + ":pages16:k{q8_0}"), "accepted");
  expect_in("k_mod is set and K is in a cache; append() normalizes and rotates rows",
            refused_spec(k_mod + ":pages16"));
  expect_in("k_mod is set and shared_kv is, too", refused_spec(k_mod + ":shared_kv"));
  expect_in("q_mod is set, which does not go with indices", refused_spec(q_mod + ":indices"));
  expect_in("q_mod is set, which does not go with K and V of 8 bits", refused_spec(q_mod + ":cache:kve4m3"));
  expect_in("q_mod is set, which does not go with running_state", refused_spec(q_mod + ":running_state"));
  expect_in("k_mod is set, which does not go with add_grads", refused_spec("bwd:" + k_mod + ":add_grads"));
  expect_in("the pass is jvp and q_mod is set", refused_spec("jvp:" + q_mod));
  expect_in("the pass is bwd_jvp and k_mod is set", refused_spec("bwd_jvp:" + k_mod));
}

plan::ExecutionPlan planned(const std::string& text, const AttentionShape& shape, const char* arch) {
  return plan::make_plan(parse_spec(text), shape, DeviceInfo::parse(arch), {});
}

TEST_F(RowMods, AreLaunchesAroundEachFamilysOwn) {
  const AttentionShape shape{2, 8, 2, 500, 600};
  for (const auto& [arch, family] : {std::pair{"sm_90a", Family::sm90}, {"sm_80", Family::sm80}}) {
    const std::string spec = "bf16:d64:causal:q_mod" + kNorm + ":k_mod" + kNorm;
    const plan::ExecutionPlan forward = planned("fwd:" + spec, shape, arch);
    EXPECT_EQ(forward.config.family, family);
    EXPECT_EQ(forward.steps.front(), plan::Step::row_mods);
    EXPECT_NE(forward.steps.back(), plan::Step::row_mod_grads);
    EXPECT_EQ(forward.launches.front().blocks, 2 * 8 * 8 + 2 * 2 * 10);
    const plan::ExecutionPlan backward = planned("bwd:" + spec, shape, arch);
    EXPECT_EQ(backward.steps.front(), plan::Step::row_mods);
    EXPECT_EQ(backward.steps.back(), plan::Step::row_mod_grads);
    EXPECT_EQ(backward.launches.back().blocks, backward.launches.front().blocks);
    EXPECT_EQ(backward.workspace.k_mod - backward.workspace.q_mod, std::size_t{2} * 8 * 500 * 64 * 2);
    for (const plan::Launch& launch : backward.launches) EXPECT_FALSE(launch.early);
  }
  EXPECT_EQ(planned("fwd:bf16:d64:k_mod" + kNorm, shape, "sm_90a").launches.front().blocks, 2 * 2 * 10);
  EXPECT_FALSE(planned("fwd:bf16:d64:q_mod" + kNorm, {1, 8, 1, 1, 1000}, "sm_80").fold_gqa);
  const std::string grads = "bwd:bf16:d64:q_mod{w: fp32 1d grad; element * w[h]}";
  EXPECT_EQ(planned(grads, shape, "sm_90a").config.family, Family::sm90);
  EXPECT_EQ(planned("bwd:bf16:d64:det:q_mod" + kNorm, shape, "sm_90a").config.family, Family::sm90);
  expect_in("adds gradients of what q_mod and k_mod read up in any order",
            failure(ErrorCode::unsupported, [&] { planned(grads + ":det", shape, "sm_90a"); }));
}

// --- The reference ----------------------------------------------------------------------------------------

/// Rotary embeddings in pairs of neighbours, and the norm of K's rows, by hand.
TEST_F(RowMods, ReferenceFollowsTheFormula) {
  const reference::Problem problem = problem_of(
      "causal:q_mod{element * cos(to_float(q)) + element_at(column ^ 1) * sin(to_float(q)) * "
      "to_float(2 * (column & 1) - 1)}:k_mod{element * rsqrt(sum_of_squares / 8.0)}");
  reference::Problem plain = problem_of("causal");
  for (std::int64_t row = 0; row < kHeads * kQueries; ++row)
    for (std::int64_t pair = 0; pair < kDim; pair += 2) {
      const auto angle = static_cast<double>(row % kQueries);
      const double x = problem.q[row * kDim + pair], y = problem.q[row * kDim + pair + 1];
      plain.q[row * kDim + pair] = x * std::cos(angle) - y * std::sin(angle);
      plain.q[row * kDim + pair + 1] = y * std::cos(angle) + x * std::sin(angle);
    }
  for (std::int64_t row = 0; row < kKeys; ++row) {
    double squares = 0;
    for (std::int64_t c = 0; c < kDim; ++c) squares += problem.k[row * kDim + c] * problem.k[row * kDim + c];
    for (std::int64_t c = 0; c < kDim; ++c) plain.k[row * kDim + c] /= std::sqrt(squares / kDim);
  }
  EXPECT_LE(reference::max_abs_error(reference::forward(problem).out, reference::forward(plain).out), 1e-12);
}

/// A tensor that the score and both programs read has the sum of all gradients.
TEST_F(RowMods, GradientsAreThoseOfFiniteDifferences) {
  reference::Problem problem = problem_of(
      "score{w: fp32 1d grad; score * w[h]}"
      ":q_mod{w: fp32 1d grad; x: fp32 2d grad; tanh(element * w[h]) * x[q, column] + "
      "element_at((column + 3) % 8) * element_at(100)}"
      ":k_mod{w: fp32 1d grad; element * rsqrt(sum_of_squares + 0.1) * w[h_kv] + "
      "sigmoid(element_at(column / 2)) * to_float(kv)}");
  problem.captures = {{"w", {kHeads}, {0.8, 1.3}}, {"x", {kQueries, kDim}, filled(kQueries * kDim, 0.3)}};
  const reference::Backward backward = reference::backward(problem);
  for (const std::size_t i : {0, 11, 55, 7}) {
    expect_slope(problem, problem.q[i], backward.dq[i], "q");
    expect_slope(problem, problem.k[i], backward.dk[i], "k");
    expect_slope(problem, problem.v[i], backward.dv[i], "v");
  }
  for (const std::size_t i : {0, 1})
    expect_slope(problem, problem.captures[0].values[i], backward.captures[0][i], "w");
  for (const std::size_t i : {0, 8, 21})
    expect_slope(problem, problem.captures[1].values[i], backward.captures[1][i], "x");
}

}  // namespace
}  // namespace flashjit
