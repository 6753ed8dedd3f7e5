// Skip-softmax beside the exact result: keys in blocks, of which every fifth has large scores, so that tiles
// between these lie far below each row's maximum.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "tests/support/attention_case.hpp"
#include "tests/support/spread.hpp"

namespace flashjit::test {

struct SkipSoftmaxCase {
  const char* spec;
  AttentionShape shape;
  const char* config = "";  ///< empty: the planner's choices of all families that can
};
inline void PrintTo(const SkipSoftmaxCase& test, std::ostream* out) {
  *out << test.spec << " " << to_string(test.shape) << " " << test.config;
}

constexpr std::int64_t kKeysOfBlock = 64;

/// Scores of at least +8 in blocks 0, 5, .. and as far below 0 in the others, by the first column. Padding,
/// if any, leaves several blocks.
inline void make_blocks(reference::Problem& problem) {
  const std::int64_t d = problem.spec.head_dim, rows = problem.shape.seqlen_kv;
  for (std::int32_t& length : problem.kv_lengths)
    length = static_cast<std::int32_t>(problem.shape.seqlen_kv - 7 * (&length - problem.kv_lengths.data()));
  for (std::size_t i = 0; i < problem.q.size(); i += d) problem.q[i] = 4.0;
  for (std::size_t i = 0; i < problem.k.size(); i += d) {
    const auto row = static_cast<std::int64_t>(i) / d % rows;  // packed: of all sequences
    problem.k[i] = row / kKeysOfBlock % 5 == 0 ? 48.0 : -48.0;
  }
}

/// With a threshold of 0 the bits of the plain kernel and nothing skipped; with others O and LSE as near as
/// the keys left out allow.
inline void expect_skips(Runtime& runtime, const SkipSoftmaxCase& test, Family family, unsigned seed) {
  const AttentionCase given{.spec = spec_for(family, test.spec),
                            .shape = test.shape,
                            .family = family,
                            .layout = seed % 2 == 0 ? Layout::bshd : Layout::padded,
                            .seed = seed};
  SCOPED_TRACE(to_string(given.spec) + " " + to_string(given.shape) + " " + to_string(family));
  KernelSpec spec = with_pass(given.spec, Pass::forward);
  spec.epilogue.skip_softmax = true;
  const TileConfig config =
      *test.config ? parse_config(test.config) : heuristic(family, spec, given.shape, Pass::forward);
  reference::Problem problem = make_problem(given);
  make_blocks(problem);
  AttentionRun run(given, problem);

  run.check_forward(runtime, config);
  const std::vector<double> plain = run.out(), plain_lse = run.lse();
  const std::vector<std::int64_t> none = run.launch_skipping(runtime, config, 0.0f);
  EXPECT_GT(none[0], 0);
  EXPECT_EQ(none[1], 0) << "tiles skipped with a threshold of 0";
  const auto same_bits = [](const std::vector<double>& a, const std::vector<double>& b) {
    return std::ranges::equal(a, b, [](double x, double y) { return x == y || (x != x && y != y); });
  };
  EXPECT_TRUE(same_bits(run.out(), plain)) << "O with a threshold of 0";
  EXPECT_TRUE(same_bits(run.lse(), plain_lse)) << "LSE with a threshold of 0";

  const double largest_v = largest_finite(problem.v), keys = static_cast<double>(test.shape.seqlen_kv);
  for (const float threshold : {1e-6f, 0.9f}) {
    SCOPED_TRACE(threshold);
    const std::vector<std::int64_t> counts = run.launch_skipping(runtime, config, threshold);
    EXPECT_EQ(counts[0], none[0]);
    EXPECT_GE(counts[1], config.bc <= 2 * kKeysOfBlock && !config.split ? 1 : 0);
    EXPECT_LT(counts[1], counts[0]);
    const std::vector<double> out = run.out();
    const double allowed = 2 * largest_v * std::min(keys * threshold, 1.0) + 0.05;
    EXPECT_LE(reference::max_abs_error(reference::existing_rows(run.problem(), out),
                                       reference::existing_rows(run.problem(), run.exact().out)),
              allowed);
  }
}

/// A key whose score is NaN makes each row that attends to it NaN, though its tile lies far below the
/// maximum.
inline void expect_nan_is_seen(Runtime& runtime, const SkipSoftmaxCase& test) {
  const TileConfig config = parse_config(test.config);
  const AttentionCase given{.spec = parse_spec(test.spec), .shape = test.shape, .family = config.family};
  SCOPED_TRACE(to_string(config));
  reference::Problem problem = make_problem(given);
  make_blocks(problem);
  constexpr std::int64_t kKey = 2 * kKeysOfBlock;  // of the first head of K
  problem.k[kKey * given.spec.head_dim] = std::numeric_limits<double>::quiet_NaN();
  AttentionRun run(given, problem);
  EXPECT_GT(run.launch_skipping(runtime, config, 0.9f)[1], 0);
  const std::vector<double> out = run.out();
  EXPECT_TRUE(std::all_of(out.begin(), out.begin() + given.shape.seqlen_q * given.spec.v_dim(),
                          [](double x) { return x != x; }));
}

/// By each family that can. A run has a third of these (is_drawn()).
inline void expect_skips(Runtime& runtime, const SkipSoftmaxCase& test, unsigned seed = 3) {
  for (const Family family : {Family::sm80, Family::sm90}) {
    KernelSpec spec = with_pass(spec_for(family, test.spec), Pass::forward);
    spec.epilogue.skip_softmax = true;
    if (*test.config ? parse_config(test.config).family != family : !supports(family, spec)) continue;
    if (!is_drawn(fmt::format("{} {} {}", to_string(spec), test.config, to_string(family)), 3)) continue;
    expect_skips(runtime, test, family, seed);
  }
}

}  // namespace flashjit::test
