// The reference's tangents against finite differences of its forward pass, and what is refused.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "call/jvp_arguments.hpp"
#include "plan/family.hpp"
#include "reference/reference.hpp"
#include "tests/support/expectations.hpp"
#include "tests/support/tangent_problem.hpp"

namespace flashjit::test {
namespace {

using reference::Problem;

class Jvp : public testing::TestWithParam<const char*> {};

TEST_P(Jvp, IsTheLimitOfDifferences) {
  // Packed sequences of three lengths, the second without queries.
  const bool packed = parse_spec(GetParam()).varlen;
  const Problem problem = problem_with_tangents(GetParam(), {packed ? 4 : 2, 4, 2, 7, 9});
  const reference::Jvp jvp = reference::jvp(problem);
  constexpr double kStep = 1e-5;
  const reference::Forward before = reference::forward(moved_along_tangents(problem, -kStep)),
                           after = reference::forward(moved_along_tangents(problem, kStep)),
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
  Problem problem = problem_with_tangents("fp32:d8:causal", {1, 1, 1, 4, 4});
  problem.k_tangent[2 * 8] = std::nan("");  // of key 2
  const reference::Jvp jvp = reference::jvp(problem);
  for (int q = 0; q < 4; ++q) {
    EXPECT_EQ(std::isnan(jvp.out_tangent[q * 8]), q >= 2) << q;
    EXPECT_EQ(std::isnan(jvp.lse_tangent[q]), q >= 2) << q;
    EXPECT_FALSE(std::isnan(jvp.out[q * 8])) << q;
  }
}

TEST(JvpOfReference, ChecksTheSizesOfTangents) {
  Problem problem = problem_with_tangents("fp32:d8", {1, 1, 1, 4, 4});
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

TEST(JvpPlan, HopperHasTilesThatRegistersHold) {
  const plan::FamilyTraits& sm90 = plan::traits(Family::sm90);
  const DeviceInfo device = DeviceInfo::parse("sm_90a");
  const auto most_keys = [&](const char* text) {
    const KernelSpec spec{parse_spec(text), Pass::jvp};
    EXPECT_TRUE(sm90.admits(spec, sm90.heuristic(spec, {1, 2, 2, 300, 300}, device), device).ok) << text;
    int most = 0;
    for (const int bc : {32, 48, 64, 80, 96})
      if (sm90.admits(spec, parse_config(fmt::format("sm90:br128:bc{}:w8:s2", bc)), device).ok) most = bc;
    return most;
  };
  EXPECT_EQ(most_keys("bf16:d64"), 80);
  EXPECT_EQ(most_keys("bf16:d72"), 80);
  EXPECT_EQ(most_keys("bf16:d96"), 64);
  EXPECT_EQ(most_keys("bf16:d128:dropout"), 48);
  EXPECT_EQ(most_keys("bf16:d192x128"), 32);
  const auto chosen = [&](const char* text) {
    return to_string(
        plan::make_plan({parse_spec(text), Pass::jvp}, {4, 16, 16, 4096, 4096}, device, {}).config);
  };
  EXPECT_EQ(chosen("bf16:d64:causal"), "sm90:br128:bc80:w8:s3");
  EXPECT_EQ(chosen("bf16:d128"), "sm90:br128:bc48:w8:s3");
  EXPECT_EQ(chosen("bf16:d192x128"), "sm90:br128:bc32:w8:s3");
  EXPECT_EQ(chosen("bf16:d256x128"), "sm80:br128:bc32:w8");
  const Support wide = sm90.supports(KernelSpec{parse_spec("bf16:d256"), Pass::jvp}, device);
  expect_in("up to 192 columns of Q and 128 of V, not 256 and 256", wide.reason);
}

}  // namespace
}  // namespace flashjit::test
