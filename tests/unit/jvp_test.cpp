// The reference's tangents against finite differences of its forward pass, and what is refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "call/jvp_arguments.hpp"
#include "expr/declarations.hpp"
#include "reference/inputs.hpp"
#include "reference/reference.hpp"
#include "tests/support/expectations.hpp"

namespace flashjit::test {
namespace {

using reference::Problem;

std::vector<double> normal(std::size_t count, std::mt19937& generator) {
  std::normal_distribution<double> one(0, 1);
  std::vector<double> values(count);
  for (double& value : values) value = one(generator);
  return values;
}

/// A problem with plausible values and tangents of them.
Problem problem_of(const std::string& spec, const AttentionShape& shape) {
  std::mt19937 generator(5);
  Problem problem{.spec = parse_spec(spec), .shape = shape};
  const auto& [batch, heads_q, heads_kv, seqlen_q, seqlen_kv] = shape;
  std::int64_t queries = batch * seqlen_q, keys = batch * seqlen_kv;
  if (problem.spec.varlen) {
    problem.cu_seqlens_q = reference::random_offsets(batch, seqlen_q, 1, 3);
    problem.cu_seqlens_kv = reference::random_offsets(batch, seqlen_kv, 2, 4);
    queries = problem.cu_seqlens_q.back(), keys = problem.cu_seqlens_kv.back();
  }
  problem.q = normal(heads_q * queries * problem.spec.head_dim, generator);
  problem.k = normal(heads_kv * keys * problem.spec.head_dim, generator);
  problem.v = normal(heads_kv * keys * problem.spec.v_dim(), generator);
  if (problem.spec.dropout) problem.dropout_p = 0.3, problem.seed = 7;
  if (problem.spec.kv.is_padded()) problem.kv_lengths = {static_cast<std::int32_t>(seqlen_kv - 2), 0};
  if (problem.spec.sinks) problem.sinks = reference::random_sinks(heads_q, 2);
  problem.captures = reference::plausible_captures(problem.spec, shape, 1);
  problem.q_tangent = normal(problem.q.size(), generator);
  problem.k_tangent = normal(problem.k.size(), generator);
  problem.v_tangent = normal(problem.v.size(), generator);
  problem.sinks_tangent = normal(problem.sinks.size(), generator);
  const auto declared = expr::declarations(problem.spec.score, problem.spec.mask);
  for (const reference::Captured& captured : problem.captures) {
    const auto found = std::ranges::find(declared, captured.name, &expr::Declaration::name);
    problem.capture_tangents.push_back(normal(found->wants_grad ? captured.values.size() : 0, generator));
  }
  return problem;
}

/// The problem a step along its tangents.
Problem moved(Problem problem, double step) {
  const auto move = [&](std::vector<double>& values, const std::vector<double>& tangent) {
    for (std::size_t i = 0; i < tangent.size(); ++i) values[i] += step * tangent[i];
  };
  move(problem.q, problem.q_tangent);
  move(problem.k, problem.k_tangent);
  move(problem.v, problem.v_tangent);
  move(problem.sinks, problem.sinks_tangent);
  for (std::size_t i = 0; i < problem.captures.size(); ++i)
    move(problem.captures[i].values, problem.capture_tangents[i]);
  return problem;
}

class Jvp : public testing::TestWithParam<const char*> {};

TEST_P(Jvp, IsTheLimitOfDifferences) {
  // Packed sequences of three lengths, the second without queries.
  const bool packed = parse_spec(GetParam()).varlen;
  const Problem problem = problem_of(GetParam(), {packed ? 4 : 2, 4, 2, 7, 9});
  const reference::Jvp jvp = reference::jvp(problem);
  constexpr double kStep = 1e-5;
  const reference::Forward before = reference::forward(moved(problem, -kStep)),
                           after = reference::forward(moved(problem, kStep)),
                           here = reference::forward(problem);
  EXPECT_EQ(jvp.out, here.out);
  ASSERT_EQ(jvp.lse_tangent.size(), here.lse.size());
  for (std::size_t i = 0; i < here.lse.size(); ++i)
    EXPECT_TRUE(jvp.lse[i] == here.lse[i] || std::isnan(here.lse[i])) << i;
  for (std::size_t i = 0; i < here.out.size(); ++i)
    EXPECT_NEAR(jvp.out_tangent[i], (after.out[i] - before.out[i]) / (2 * kStep), 1e-7) << i;
  for (std::size_t i = 0; i < here.lse.size(); ++i) {
    if (std::isnan(here.lse[i])) continue;  // past a sequence's end
    const double wanted = std::isinf(here.lse[i]) ? 0 : (after.lse[i] - before.lse[i]) / (2 * kStep);
    EXPECT_NEAR(jvp.lse_tangent[i], wanted, 1e-7) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, Jvp,
    testing::Values("fp32:d8", "fp32:d16x8:causal", "fp32:d8:dropout:sinks", "fp32:d8:causal:varlen:dropout",
                    "fp32:d8:kvlen", "fp32:d8:mask{q >= kv && q - kv < 3}",
                    "fp32:d8:score{5.0 * tanh(score / 5.0)}:sinks",
                    "fp32:d8:score{gate: fp32 2d grad; score * exp(gate[h, kv]) - score * score}",
                    "fp32:d8:score{slopes: fp32 1d grad; other: fp32 1d; score + slopes[h] * other[q]}"));

TEST(JvpOfReference, SeesNaNWhereAQueryAttendsAlone) {
  Problem problem = problem_of("fp32:d8:causal", {1, 1, 1, 4, 4});
  problem.k_tangent[2 * 8] = std::nan("");  // of key 2
  const reference::Jvp jvp = reference::jvp(problem);
  for (int q = 0; q < 4; ++q) {
    EXPECT_EQ(std::isnan(jvp.out_tangent[q * 8]), q >= 2) << q;
    EXPECT_EQ(std::isnan(jvp.lse_tangent[q]), q >= 2) << q;
    EXPECT_FALSE(std::isnan(jvp.out[q * 8])) << q;
  }
}

TEST(JvpOfReference, ChecksTheSizesOfTangents) {
  Problem problem = problem_of("fp32:d8", {1, 1, 1, 4, 4});
  problem.k_tangent.pop_back();
  EXPECT_THROW(reference::jvp(problem), Error);
}

/// Addresses that nothing reads: the checks look at pointers, not at memory.
JvpArgs arguments() {
  const auto at = [](std::uintptr_t value) { return reinterpret_cast<void*>(value); };
  const auto view = [&](std::uintptr_t value) { return TensorView::bhsd(at(value), 2, 4, 100, 64); };
  JvpArgs args;
  args.q = view(0x1000000), args.k = view(0x2000000), args.v = view(0x3000000), args.out = view(0x4000000);
  args.q_tangent = view(0x5000000), args.k_tangent = view(0x6000000), args.v_tangent = view(0x7000000);
  args.out_tangent = view(0x8000000);
  return args;
}

TEST(JvpArguments, AreCheckedLikeTheirTensors) {
  const AttentionSpec spec{.dtype = DType::bf16, .head_dim = 64};
  const auto refusal = [&](auto change) {
    return failure(ErrorCode::invalid_argument, [&] {
      JvpArgs args = arguments();
      change(args);
      check_arguments(spec, args);
    });
  };
  EXPECT_NO_THROW(check_arguments(spec, arguments()));
  JvpArgs zero = arguments();
  zero.q_tangent = zero.v_tangent = {};
  EXPECT_NO_THROW(check_arguments(spec, zero));
  expect_in("k_tangent", refusal([](JvpArgs& args) { args.k_tangent.size[2] = 99; }));
  expect_in("out_tangent", refusal([](JvpArgs& args) { args.out_tangent = args.out; }));
  expect_in("out_tangent", refusal([](JvpArgs& args) { args.out_tangent.data = nullptr; }));
  float tangent = 0;
  expect_in("lse_tangent is written, but has memory of lse", refusal([&](JvpArgs& args) {
              args.lse = args.lse_tangent = reinterpret_cast<float*>(0x9000000);
            }));
  expect_in("sinks_tangent is given", refusal([&](JvpArgs& args) { args.sinks_tangent = &tangent; }));
}

TEST(JvpSpec, IsWithoutWhatHasNoTangent) {
  for (const char* option : {":cache", ":pages16", ":indices", ":running_state", ":row_max", ":kve4m3"}) {
    const KernelSpec spec{parse_spec(std::string("bf16:d64") + option), Pass::jvp};
    try {
      spec.validate();
      ADD_FAILURE() << option;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      EXPECT_NE(std::string(error.what()).find("the pass is jvp"), std::string::npos) << error.what();
    }
  }
  EXPECT_EQ(to_string(parse_spec("jvp:bf16:d64:causal:det:invariant").normalized()), "jvp:bf16:d64:causal");
}

}  // namespace
}  // namespace flashjit::test
