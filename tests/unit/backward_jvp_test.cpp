// The reference's tangents of gradients against finite differences of its backward pass, and what is refused.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "call/backward_jvp_arguments.hpp"
#include "flashjit/can.hpp"
#include "plan/plan.hpp"
#include "render/render.hpp"
#include "tests/support/expectations.hpp"
#include "tests/support/tangent_problem.hpp"

namespace flashjit::test {
namespace {

using reference::Problem;

class BackwardJvp : public testing::TestWithParam<const char*> {};

TEST_P(BackwardJvp, IsTheLimitOfDifferences) {
  const bool packed = parse_spec(GetParam()).varlen;
  const Problem problem = problem_with_tangents(GetParam(), {packed ? 4 : 2, 4, 2, 7, 9});
  const reference::Backward tangents = reference::backward_jvp(problem);
  constexpr double kStep = 1e-5;
  const reference::Backward before = reference::backward(moved_along_tangents(problem, -kStep)),
                            after = reference::backward(moved_along_tangents(problem, kStep));
  const auto expect_limit = [&](const char* name, const std::vector<double>& got,
                                const std::vector<double>& high, const std::vector<double>& low) {
    ASSERT_EQ(got.size(), high.size()) << name;
    for (std::size_t i = 0; i < got.size(); ++i)
      EXPECT_NEAR(got[i], (high[i] - low[i]) / (2 * kStep), 1e-6 * (1 + std::abs(got[i]))) << name << i;
  };
  expect_limit("dq", tangents.dq, after.dq, before.dq);
  expect_limit("dk", tangents.dk, after.dk, before.dk);
  expect_limit("dv", tangents.dv, after.dv, before.dv);
  if (problem.spec.sinks) expect_limit("dsinks", tangents.dsinks, after.dsinks, before.dsinks);
  for (std::size_t i = 0; i < problem.captures.size(); ++i)
    expect_limit(problem.captures[i].name.c_str(), tangents.captures[i], after.captures[i],
                 before.captures[i]);
}

INSTANTIATE_TEST_SUITE_P(
    All, BackwardJvp,
    testing::Values("fp32:d8", "fp32:d16x8:causal", "fp32:d8:dropout:sinks", "fp32:d8:causal:varlen:dropout",
                    "fp32:d8:kvlen", "fp32:d8:mask{q >= kv && q - kv < 3}",
                    "fp32:d8:score{5.0 * tanh(score / 5.0)}:sinks",
                    "fp32:d8:score{gate: fp32 2d grad; score * exp(gate[h, kv]) - score * score}",
                    "fp32:d8:score{bias: fp32 2d grad; score + bias[h, kv - q + 7]}:causal",
                    "fp32:d8:score{slopes: fp32 1d grad; other: fp32 1d; score + slopes[h] * other[q]}",
                    "fp32:d8:score{u: fp32 1d grad; w: fp32 1d grad; sin(score * u[q]) * w[kv]}:sinks"));

/// <t, H t'> = <t', H t> for the Hessian H of <dO, O> by Q, K and V.
TEST(BackwardJvpOfReference, IsSymmetric) {
  Problem problem = problem_with_tangents("fp32:d8:score{3.0 * tanh(score / 3.0)}:causal", {1, 4, 2, 7, 9});
  problem.dout_tangent = problem.dlse_tangent = {};
  Problem other = problem;
  std::mt19937 generator(9);
  for (std::vector<double>* tangent : {&other.q_tangent, &other.k_tangent, &other.v_tangent})
    *tangent = normal_doubles(tangent->size(), generator);
  const auto dot = [](const Problem& tangents, const reference::Backward& product) {
    double sum = 0;
    const auto add = [&](const std::vector<double>& a, const std::vector<double>& b) {
      for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
    };
    add(tangents.q_tangent, product.dq), add(tangents.k_tangent, product.dk);
    add(tangents.v_tangent, product.dv);
    return sum;
  };
  const double forth = dot(other, reference::backward_jvp(problem));
  EXPECT_NEAR(forth, dot(problem, reference::backward_jvp(other)), 1e-9 * (1 + std::abs(forth)));
}

TEST(BackwardJvpOfReference, SeesNaNWhereAQueryAttends) {
  Problem problem = problem_with_tangents("fp32:d8:causal", {1, 1, 1, 4, 4});
  problem.k_tangent[2 * 8] = std::nan("");  // of key 2
  const reference::Backward tangents = reference::backward_jvp(problem);
  for (int q = 0; q < 4; ++q) EXPECT_EQ(std::isnan(tangents.dq[q * 8]), q >= 2) << q;
}

TEST(BackwardJvpOfReference, ChecksTheSizesOfTangents) {
  Problem problem = problem_with_tangents("fp32:d8", {1, 1, 1, 4, 4});
  problem.dout_tangent.pop_back();
  EXPECT_THROW(reference::backward_jvp(problem), Error);
}

/// Addresses that nothing reads: the checks look at pointers, not at memory.
BackwardJvpArgs tangents_of_backward() {
  const auto view = [&](std::uintptr_t value) {
    return TensorView::bhsd(reinterpret_cast<void*>(value), 2, 4, 100, 64);
  };
  BackwardJvpArgs args;
  args.q = view(0x1000000), args.k = view(0x2000000), args.v = view(0x3000000), args.dout = view(0x4000000);
  args.q_tangent = view(0x5000000), args.k_tangent = view(0x6000000), args.v_tangent = view(0x7000000);
  args.dout_tangent = view(0x8000000);
  args.dq = view(0x9000000), args.dk = view(0xa000000), args.dv = view(0xb000000);
  args.lse = reinterpret_cast<const float*>(0xc000000);
  return args;
}

TEST(BackwardJvpArguments, AreCheckedLikeTheirTensors) {
  const AttentionSpec spec{.dtype = DType::bf16, .head_dim = 64};
  const auto refusal = [&](auto change) {
    return failure(ErrorCode::invalid_argument, [&] {
      BackwardJvpArgs args = tangents_of_backward();
      change(args);
      check_arguments(spec, args);
    });
  };
  EXPECT_NO_THROW(check_arguments(spec, tangents_of_backward()));
  BackwardJvpArgs zero = tangents_of_backward();
  zero.q_tangent = zero.v_tangent = zero.dout_tangent = {};
  EXPECT_NO_THROW(check_arguments(spec, zero));
  AttentionSpec wide_out = spec;  // of the forward pass: dO and dO's tangent have Q's type all the same
  wide_out.partial.fp32_out = true;
  BackwardJvpArgs beside = tangents_of_backward();
  beside.dq = TensorView::bhsd(reinterpret_cast<void*>(0x4000000 + 2 * 4 * 100 * 64 * 2), 2, 4, 100, 64);
  EXPECT_NO_THROW(check_arguments(wide_out, beside));
  expect_in("k_tangent", refusal([](BackwardJvpArgs& args) { args.k_tangent.size[2] = 99; }));
  expect_in("dout_tangent", refusal([](BackwardJvpArgs& args) { args.dout_tangent.size[3] = 32; }));
  expect_in("dk is written, but has memory of v_tangent",
            refusal([](BackwardJvpArgs& args) { args.v_tangent = args.dk; }));
  expect_in("lse is null", refusal([](BackwardJvpArgs& args) { args.lse = nullptr; }));
  expect_in("sinks_tangent is given", refusal([](BackwardJvpArgs& args) { args.sinks_tangent = args.lse; }));
  const TileLists lists;
  expect_in("lists are given", refusal([&](BackwardJvpArgs& args) { args.lists = &lists; }));
  float grad = 0;
  const Capture capture = Capture::tensor("a", &grad, {1}, &grad);
  expect_in("a has a grad, but capture_tangents has none", refusal([&](BackwardJvpArgs& args) {
              args.captures = {&capture, 1};
            }));
}

TEST(BackwardJvpSpec, IsWithoutWhatHasNoTangent) {
  for (const char* option : {":cache", ":pages16", ":indices", ":running_state", ":row_max", ":kve4m3",
                             ":score{sigmoid(score)}:weight_mod", ":out_mod{out * 2.0}"}) {
    const KernelSpec spec{parse_spec(std::string("bf16:d64") + option), Pass::backward_jvp};
    expect_in("the pass is bwd_jvp", failure(ErrorCode::invalid_argument, [&] { spec.validate(); }));
  }
  EXPECT_EQ(to_string(parse_spec("bwd_jvp:bf16:d64:causal:invariant").normalized()),
            "bwd_jvp:bf16:d64:causal");
}

TEST(BackwardJvpPlan, IsOfTwoKernelsAndRefusesAnOrderOfCaptures) {
  const DeviceInfo hopper = DeviceInfo::parse("sm_90a");
  const AttentionShape shape{2, 8, 2, 512, 512};
  const plan::ExecutionPlan plan =
      plan::make_plan(parse_spec("bwd_jvp:bf16:d128:sinks:det"), shape, hopper, {});
  EXPECT_EQ(plan.config.family, Family::sm80);
  const KernelSpec wide = parse_spec("bwd_jvp:bf16:d256");
  EXPECT_EQ(plan::make_plan(wide, shape, hopper, {}).config.family, Family::simt);
  ASSERT_EQ(plan.entries.size(), 3u);
  EXPECT_EQ(plan.entries[0].name, "backward_jvp_dq");  // stores what the next one reads
  EXPECT_EQ(plan.entries[1].name, "backward_jvp_dkdv");
  EXPECT_EQ(plan.launches[0].blocks, 2 * 8 * (512 / plan.config.br));
  EXPECT_EQ(plan.launches[1].blocks, 2 * 2 * (512 / plan.config.bc));
  expect_in("says det",
            can(parse_spec("bwd_jvp:bf16:d64:score{a: fp32 1d grad; score + a[h]}:det"), hopper).reason);
}

}  // namespace
}  // namespace flashjit::test
