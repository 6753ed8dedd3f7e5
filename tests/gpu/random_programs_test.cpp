// Random score and mask programs in whole kernels, forward and backward, against the fp64 reference.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "expr/declarations.hpp"
#include "tests/support/attention_case.hpp"
#include "tests/support/host_tiles.hpp"
#include "tests/support/tame_program.hpp"

namespace flashjit::test {
namespace {

/// Masks have no gradients.
std::vector<Given> without_grads(std::vector<Given> captures) {
  for (Given& given : captures) given.declaration.wants_grad = false;
  return captures;
}

/// One capture for each name that the spec's programs declare, in their order.
std::vector<reference::Captured> captures_of(const AttentionSpec& spec, const std::vector<Given>& given) {
  std::vector<reference::Captured> captures;
  for (const expr::Declaration& declared : expr::declarations(spec.score, spec.mask)) {
    const auto found =
        std::ranges::find(given, declared.name, [](const Given& g) { return g.declaration.name; });
    captures.push_back({found->declaration.name, found->size, found->values});
  }
  return captures;
}

/// A random mask, or its opposite where it leaves hardly a pair.
expr::Expr random_mask(unsigned seed, const AttentionShape& shape, const std::vector<Given>& given) {
  const expr::Expr mask = TameProgram(seed, given).mask();
  const test::HostTiles pairs(mask.pointer(), test::bounds_of(given));
  constexpr int kLooks = 1000;
  int attending = 0;
  for (int i = 0; i < kLooks; ++i) {
    const int h = i % static_cast<int>(shape.heads_q), q = i * 37 % static_cast<int>(shape.seqlen_q),
              kv = i * 53 % static_cast<int>(shape.seqlen_kv);
    attending += pairs.attends({.b = i % 2,
                                .h = h,
                                .h_kv = h / 2,
                                .q = q,
                                .kv = kv,
                                .seqlen_q = static_cast<int>(shape.seqlen_q),
                                .seqlen_kv = static_cast<int>(shape.seqlen_kv)});
  }
  return attending < kLooks / 100 ? !mask : mask;
}

/// The features besides the programs rotate with the seed, so that each meets many programs.
AttentionCase random_case(unsigned seed) {
  constexpr std::array kFamilies = {Family::sm90, Family::sm80, Family::simt};
  constexpr std::array kDTypes = {DType::bf16, DType::fp16};
  constexpr std::array<int, 3> kDims = {64, 128, 40};
  const std::vector<Given> given = test::tame_captures(seed), plain = without_grads(given);
  AttentionCase test{.spec = {}, .shape = {2, 4, 2, 150, 170}, .family = kFamilies[seed % 3], .seed = seed};
  test.spec.dtype = test.family == Family::simt ? DType::fp32 : kDTypes[seed / 3 % 2];
  test.spec.head_dim = kDims[seed / 6 % 3];
  test.spec.score = TameProgram(seed, given).score();
  test.spec.mask = random_mask(seed, test.shape, plain);
  test.spec.varlen = seed % 5 == 1;
  test.spec.sinks = seed % 7 == 2;
  test.spec.dropout = seed % 7 == 4;
  if (seed % 11 == 3) test.spec.block_map = {64, 32};
  test.dropout_p = test.spec.dropout ? 0.2 : 0;
  test.built_lists = seed % 4 == 1;
  test.captures = [values = captures_of(test.spec, given)](const AttentionShape&) { return values; };
  test.variant = "random";
  return test;
}

/// Whether a pair lies at a kink of the score program, such as where the arms of a min() meet: fp32 may take
/// the other arm there, and the exact gradients jump when Q moves by as little as scores are rounded.
bool is_at_a_kink(const reference::Problem& problem) {
  constexpr double kRounding = 2e-6, kJump = 1e-3;
  const std::vector<double> exact = reference::backward(problem).dq;
  for (const double sign : {1.0, -1.0}) {
    reference::Problem moved = problem;
    for (double& q : moved.q) q *= 1 + sign * kRounding;
    const std::vector<double> dq = reference::backward(moved).dq;
    double largest = 0, change = 0;
    for (std::size_t i = 0; i < dq.size(); ++i) {
      largest = std::max(largest, std::abs(exact[i]));
      change = std::max(change, std::abs(dq[i] - exact[i]));
    }
    if (change > kJump * largest) return true;
  }
  return false;
}

/// 20 programs: the seed of the first.
class RandomPrograms : public GpuTestWith<unsigned> {};

TEST_P(RandomPrograms, MatchTheReference) {
  std::vector<AttentionCase> cases;
  for (unsigned i = 0; i < 20; ++i) cases.push_back(random_case(GetParam() + i));
  TemporaryRuntime runtime;
  prepare_all(runtime.get(), kernels_of(cases));
  int compared = 0;
  for (const AttentionCase& test : cases) {
    const Support support = supports(test.family, test.spec);
    ASSERT_TRUE(support) << to_string(test.spec) << ": " << support.reason;
    SCOPED_TRACE(to_string(test.spec) + " with seed " + std::to_string(test.seed));
    AttentionRun run(test);
    if (!run.has_limits()) continue;
    run.check_forward(runtime.get(), config_of(test, Pass::forward));
    if (!is_at_a_kink(run.problem())) run.check_backward(runtime.get(), config_of(test, Pass::backward));
    ++compared;
  }
  // Scores that overflow are few.
  EXPECT_GE(compared, 18);
  testing::Test::RecordProperty("compared", compared);
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomPrograms,
                         testing::Values(0u, 20u, 40u, 60u, 80u, 100u, 120u, 140u, 160u, 180u, 200u, 220u));

}  // namespace
}  // namespace flashjit::test
