// Programs of O's elements: their text, what is refused, who plans them, and the reference's results and
// gradients against formulas and finite differences.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "expr/facts.hpp"
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
class OutMod : public test::ProgramProblem {};

const std::string kGate = "out_mod{gate: bf16 4d; out * sigmoid(gate[b, q, h, column])}";

TEST_F(OutMod, IsAFieldOfTheText) {
  const KernelSpec spec = parse_spec("fwd:bf16:d64:" + kGate + ":causal:sinks");
  EXPECT_EQ(to_string(spec), "fwd:bf16:d64:causal:" + kGate + ":sinks");
  EXPECT_EQ(parse_spec(to_string(spec)), spec.normalized());
  AttentionSpec built{.head_dim = 64};
  using namespace expr;
  built.epilogue.out_mod = out * sigmoid(tensor("gate", ElementType::bf16, 4)(b, q, h, column));
  EXPECT_EQ(to_string(built), "bf16:d64:" + kGate);
  EXPECT_TRUE(OutProgram("out").empty());
  EXPECT_TRUE(OutProgram(" ").empty());
  // One scalar is one thing in all programs.
  EXPECT_EQ(to_string(parse_spec("bf16:d64:score{n: int; score * n}:out_mod{n: int; out / n}")),
            "fwd:bf16:d64:score{n: float; score * n}:out_mod{n: float; out / n}");
}

TEST_F(OutMod, RefusesWhatItCannotRead) {
  expect_in("an out_mod program reads score;", refused_spec("bf16:d64:out_mod{score * out}"));
  expect_in("an out_mod program reads kv;", refused_spec("bf16:d64:out_mod{x: fp32 1d; out * x[kv]}"));
  expect_in("an out_mod program is float, not bool", refused_spec("bf16:d64:out_mod{out > 0.0}"));
  expect_in("a score program reads out, which is for programs of O", refused_spec("bf16:d64:score{out}"));
  expect_in("a mask program reads column;", refused_spec("bf16:d64:mask{kv == column}"));
  expect_in("the score program declares 'w: fp32 1d', but the out_mod program 'w: fp16 1d'",
            refused_spec("bf16:d64:score{w: fp32 1d; score * w[h]}:out_mod{w: fp16 1d; out * w[h]}"));
  expect_in("the score program declares 'w: fp32 1d grad', but the out_mod program 'w: fp32 1d'",
            refused_spec("bf16:d64:score{w: fp32 1d grad; score * w[h]}:out_mod{w: fp32 1d; out * w[h]}"));
}

TEST_F(OutMod, RefusesWhatChangesOLater) {
  const std::string spec = "bf16:d64:" + kGate;
  EXPECT_EQ(refused_spec(spec + ":causal:kvlen:map64x64:dropout:sinks:row_max:fp32_out"), "accepted");
  EXPECT_EQ(refused_spec(spec + ":varlen:pages16:kve4m3"), "accepted");
  expect_in("out_mod is set and indices is, too", refused_spec(spec + ":indices"));
  expect_in("out_mod is set and batch_invariant is, too", refused_spec(spec + ":invariant"));
  expect_in("out_mod is set and running_state is, too", refused_spec(spec + ":running_state"));
  expect_in("the pass is jvp and out_mod is set", refused_spec("jvp:" + spec));
}

/// Rows of a tensor of 16 bits at q, whose last index is the column, are loaded as a tile.
TEST_F(OutMod, FindsTheTensorWhoseRowsAreOs) {
  const auto has_tile = [](const std::string& program, bool check_indices = false) {
    return expr::facts_of({}, {}, {.check_indices = check_indices}, OutProgram(program)).out_tile;
  };
  EXPECT_TRUE(has_tile("gate: bf16 4d; out * sigmoid(gate[b, q, h, column])"));
  EXPECT_TRUE(has_tile("gate: fp16 3d; n: int; out + gate[h_kv, q + n, column]"));
  EXPECT_FALSE(has_tile("gate: bf16 4d; out * gate[b, q, h, column]", true));
  EXPECT_FALSE(has_tile("gate: fp32 4d; out * gate[b, q, h, column]"));
  EXPECT_FALSE(has_tile("gate: bf16 3d; out * gate[b, q, h]"));
  EXPECT_FALSE(has_tile("gate: bf16 2d; out * gate[h, column]"));
  EXPECT_FALSE(has_tile("gate: bf16 2d; out * gate[q, column + 1]"));
  EXPECT_FALSE(has_tile("gate: bf16 2d; out * gate[2 * q, column]"));
  EXPECT_FALSE(has_tile("gate: bf16 3d; out * gate[q, q, column]"));
}

plan::ExecutionPlan planned(const std::string& text, const AttentionShape& shape, const char* arch) {
  return plan::make_plan(parse_spec(text), shape, DeviceInfo::parse(arch), {});
}

TEST_F(OutMod, IsPlannedForFamiliesWithAnEpilogueForIt) {
  const AttentionShape shape{2, 8, 2, 512, 4096};
  EXPECT_EQ(planned("fwd:bf16:d64:" + kGate, shape, "sm_90a").config.family, Family::sm90);
  EXPECT_EQ(planned("fwd:bf16:d64:" + kGate + ":cache", shape, "sm_90a").config.family, Family::sm80);
  // Elements that are read one by one leave no registers for more than 128 columns.
  EXPECT_EQ(planned("fwd:bf16:d256:" + kGate, shape, "sm_90a").config.family, Family::sm90);
  EXPECT_EQ(planned("fwd:bf16:d256:out_mod{out * 2.0}", shape, "sm_90a").config.family, Family::sm80);
  EXPECT_EQ(planned("fwd:bf16:d64:" + kGate, shape, "sm_120").config.family, Family::sm80);
  EXPECT_EQ(planned("fwd:fp16:d64:" + kGate, shape, "sm_75").config.family, Family::sm75);
  EXPECT_EQ(planned("fwd:fp32:d64:" + kGate, shape, "sm_90a").config.family, Family::simt);
  // A part of O is not modified, nor are heads that count as queries.
  for (const char* arch : {"sm_80", "sm_90a"})
    EXPECT_FALSE(planned("fwd:bf16:d64:" + kGate, {1, 1, 1, 1, 100000}, arch).config.split);
  EXPECT_FALSE(planned("fwd:bf16:d64:" + kGate, {1, 8, 1, 1, 1000}, "sm_80").fold_gqa);
}

TEST_F(OutMod, GivesItsGradientToTheBackwardPassOfEachFamily) {
  const AttentionShape shape{2, 8, 2, 500, 600};
  for (const auto& [arch, family] : {std::pair{"sm_90a", Family::sm90}, {"sm_80", Family::sm80}}) {
    const plan::ExecutionPlan plan = planned("bwd:bf16:d64:" + kGate + ":causal", shape, arch);
    EXPECT_EQ(plan.config.family, family);
    EXPECT_EQ(plan.steps.at(0), plan::Step::out_grads);
    EXPECT_EQ(plan.launches.at(0).blocks, 2 * 8 * 4);
    EXPECT_EQ(plan.workspace.lse_padded - plan.workspace.dout, std::size_t{2} * 8 * 500 * 64 * 2);
  }
  const std::string grads = "bwd:bf16:d64:out_mod{w: fp32 1d grad; out * w[h]}";
  EXPECT_EQ(planned(grads, shape, "sm_90a").config.family, Family::sm90);
  try {
    planned(grads + ":det", shape, "sm_90a");
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported);
    expect_in("adds gradients of what out_mod reads up in any order", error.message());
  }
}

// --- The reference ----------------------------------------------------------------------------------------

TEST_F(OutMod, ReferenceFollowsTheFormula) {
  reference::Problem problem =
      problem_of("causal:out_mod{gate: fp32 3d; out * gate[h, q, column] + to_float(column)}");
  problem.captures = {{"gate", {kHeads, kQueries, kDim}, filled(kHeads * kQueries * kDim, 0.9)}};
  reference::Problem plain = problem_of("causal");
  const reference::Forward forward = reference::forward(problem), before = reference::forward(plain);
  EXPECT_EQ(forward.out_before_mod, before.out);
  EXPECT_EQ(forward.lse, before.lse);
  for (std::size_t i = 0; i < before.out.size(); ++i)
    EXPECT_NEAR(forward.out[i], before.out[i] * problem.captures[0].values[i] + static_cast<double>(i % kDim),
                1e-12);
  const reference::Backward backward = reference::backward(problem);
  for (std::size_t i = 0; i < plain.dout.size(); ++i) plain.dout[i] *= problem.captures[0].values[i];
  const reference::Backward expected = reference::backward(plain);
  EXPECT_LE(reference::max_abs_error(backward.dq, expected.dq), 1e-12);
  EXPECT_LE(reference::max_abs_error(backward.dk, expected.dk), 1e-12);
  EXPECT_LE(reference::max_abs_error(backward.dv, expected.dv), 1e-12);
}

/// A tensor that the score and O's program both read has the sum of both gradients.
TEST_F(OutMod, GradientsAreThoseOfFiniteDifferences) {
  reference::Problem problem = problem_of(
      "score{w: fp32 1d grad; score * w[h]}:out_mod{w: fp32 1d grad; x: fp32 2d grad; "
      "tanh(out * w[h]) * x[q, column] + exp(x[q, 0])}");
  problem.captures = {{"w", {kHeads}, {0.8, 1.3}}, {"x", {kQueries, kDim}, filled(kQueries * kDim, 0.3)}};
  const reference::Backward backward = reference::backward(problem);
  for (const std::size_t i : {0, 11, 55}) {
    expect_slope(problem, problem.q[i], backward.dq[i], "q");
    expect_slope(problem, problem.k[i], backward.dk[i], "k");
    expect_slope(problem, problem.v[i], backward.dv[i], "v");
  }
  for (const std::size_t i : {0, 1})
    expect_slope(problem, problem.captures[0].values[i], backward.captures[0][i], "w");
  for (const std::size_t i : {0, 8, 21})
    expect_slope(problem, problem.captures[1].values[i], backward.captures[1][i], "x");
}

/// O of a row without keys is 0, of which the program makes what it makes of any 0.
TEST_F(OutMod, ARowWithoutKeysIsTheProgramOfZero) {
  const reference::Forward forward = reference::forward(problem_of("mask{q != 2}:out_mod{out + 3.0}"));
  for (std::int64_t c = 0; c < kDim; ++c) EXPECT_EQ(forward.out[2 * kDim + c], 3.0);
}

}  // namespace
}  // namespace flashjit
