// NaN and infinities on the CPU: a row sees those of the keys that it attends to, and of no other. And what
// lies past a sequence's keys, or in freed pages, is neither read nor paid for.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "flashjit/error.hpp"
#include "flashjit/reference.hpp"
#include "reference/inputs.hpp"
#include "reference/reference.hpp"
#include "tests/support/expectations.hpp"

namespace flashjit::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr std::int64_t kQueries = 6, kKeys = 9, kDim = 8;

/// One head; dO is normal.
Problem problem_of(const std::string& options) {
  Problem problem{.spec = parse_spec("fp32:d8" + options), .shape = {1, 1, 1, kQueries, kKeys}};
  const auto filled = [](std::int64_t rows, double step) {
    std::vector<double> values;
    for (std::int64_t i = 0; i < rows * kDim; ++i)
      values.push_back(static_cast<float>(std::sin(step * static_cast<double>(i + 1))));
    return values;
  };
  problem.q = filled(kQueries, 0.7);
  problem.k = filled(kKeys, 1.3);
  problem.v = filled(kKeys, 2.1);
  problem.dout = filled(kQueries, 0.4);
  if (problem.spec.sinks) problem.sinks = {0.5};
  if (problem.spec.kv.is_padded()) problem.kv_lengths = {5};
  return problem;
}

/// The rows that have NaN or an infinity.
std::vector<std::int64_t> rows_of_nan(const std::vector<double>& values, std::int64_t columns) {
  std::vector<std::int64_t> rows;
  for (std::int64_t row = 0; row < std::ssize(values) / columns; ++row) {
    const auto begin = values.begin() + row * columns, end = begin + columns;
    if (std::any_of(begin, end, [](double value) { return !std::isfinite(value); })) rows.push_back(row);
  }
  return rows;
}
using Rows = std::vector<std::int64_t>;
Rows first(std::int64_t count) {
  Rows rows;
  for (std::int64_t i = 0; i < count; ++i) rows.push_back(i);
  return rows;
}

/// Expects that NaN in row 3 of Q, or in a score of it, spoils that row and `keys` alone.
void expect_row_3_lost(const Problem& problem, const Rows& keys) {
  const Forward forward = reference::forward(problem);
  EXPECT_EQ(rows_of_nan(forward.out, kDim), Rows{3});
  EXPECT_EQ(rows_of_nan(forward.lse, 1), Rows{3});
  EXPECT_TRUE(std::isnan(forward.lse[3]));
  EXPECT_TRUE(std::isnan(forward.row_max[3]));
  const Backward backward = reference::backward(problem);
  EXPECT_EQ(rows_of_nan(backward.dq, kDim), Rows{3});
  EXPECT_EQ(rows_of_nan(backward.dk, kDim), keys);
  EXPECT_EQ(rows_of_nan(backward.dv, kDim), keys);
}

TEST(ReferenceNaN, OfAQueryIsSeenInItsRowAndItsKeys) {
  for (const double bad : {kNaN, kInfinity, -kInfinity})
    for (const char* options : {"", ":sinks"}) {
      Problem problem = problem_of(options);
      problem.q[3 * kDim + 5] = bad;
      expect_row_3_lost(problem, first(kKeys));
    }
  Problem causal = problem_of(":mask{kv <= q}");
  causal.q[3 * kDim] = kNaN;
  expect_row_3_lost(causal, first(4));
  Problem padded = problem_of(":kvlen");
  padded.q[3 * kDim] = kNaN;
  expect_row_3_lost(padded, first(5));
}

TEST(ReferenceNaN, OfACapturedBiasIsSeen) {
  for (const std::int64_t keys : {std::int64_t{1}, kKeys}) {
    Problem problem = problem_of(":score{bias: fp32 2d; score + bias[q, kv]}");
    problem.captures = {{"bias", {kQueries, kKeys}, std::vector<double>(kQueries * kKeys)}};
    std::fill_n(problem.captures[0].values.begin() + 3 * kKeys, keys, kNaN);
    expect_row_3_lost(problem, first(kKeys));
  }
}

TEST(ReferenceNaN, OfAKeyIsSeenByAllThatAttendToIt) {
  Problem problem = problem_of(":mask{kv <= q}");
  problem.k[4 * kDim] = kNaN;
  const Forward forward = reference::forward(problem);
  EXPECT_EQ(rows_of_nan(forward.lse, 1), (Rows{4, 5}));
  EXPECT_EQ(rows_of_nan(forward.out, kDim), (Rows{4, 5}));
  EXPECT_EQ(rows_of_nan(reference::backward(problem).dq, kDim), (Rows{4, 5}));
}

TEST(ReferenceNaN, OfHiddenKeysDoesNotMatter) {
  for (const char* options : {":kvlen", ":mask{kv < 5}", ":kvlen:mask{kv <= q}", ":kvlen:sinks",
                              ":kvlen:score{score * exp(score)}"}) {
    const Problem clean = problem_of(options);
    Problem problem = clean;
    for (std::int64_t i = 5 * kDim; i < kKeys * kDim; ++i)
      problem.k[i] = i % 2 ? kNaN : kInfinity, problem.v[i] = i % 3 ? kNaN : -kInfinity;
    const Forward expected = reference::forward(clean), forward = reference::forward(problem);
    EXPECT_EQ(forward.out, expected.out) << options;
    EXPECT_EQ(forward.lse, expected.lse) << options;
    const Backward grads = reference::backward(clean), backward = reference::backward(problem);
    EXPECT_EQ(backward.dq, grads.dq) << options;
    EXPECT_EQ(backward.dk, grads.dk) << options;
    EXPECT_EQ(backward.dv, grads.dv) << options;
    EXPECT_EQ(backward.dsinks, grads.dsinks) << options;
  }
}

TEST(ReferenceNaN, RowsWithoutKeysHaveNone) {
  Problem problem = problem_of(":mask{kv < q}");
  problem.q[0] = kNaN;
  const Forward forward = reference::forward(problem);
  EXPECT_EQ(forward.lse[0], -kInfinity);
  EXPECT_TRUE(rows_of_nan(forward.out, kDim).empty());
  EXPECT_TRUE(rows_of_nan(reference::backward(problem).dq, kDim).empty());
}

TEST(ReferenceNaN, OfOtherKeysReachesGradientsByLse) {
  Problem problem = problem_of("");
  const Forward forward = reference::forward(problem);
  problem.out = forward.out, problem.lse = forward.lse;
  problem.lse[3] = kNaN;
  const Backward backward = reference::backward(problem);
  EXPECT_EQ(rows_of_nan(backward.dq, kDim), Rows{3});
  EXPECT_EQ(rows_of_nan(backward.dv, kDim), first(kKeys));
}

TEST(ReferenceNaN, OfARunningStateStays) {
  Problem problem = problem_of(":running_state");
  problem.state_out.assign(kQueries * kDim, 0.25);
  problem.state_lse = {0, kNaN, 0, -kInfinity, 0, 0};
  problem.q[5 * kDim] = kNaN;
  const Forward forward = reference::forward(problem);
  EXPECT_EQ(rows_of_nan(forward.out, kDim), (Rows{1, 5}));
  EXPECT_EQ(rows_of_nan(forward.lse, 1), (Rows{1, 5}));
}

TEST(ReferenceNaN, OfAStateIsMerged) {
  std::vector<float> a(3 * 8, 1.0f), b(3 * 8, 3.0f), out(3 * 8), lse(3);
  const float nan = std::nanf(""), none = -std::numeric_limits<float>::infinity();
  const std::vector<float> lse_a = {nan, 0.5f, none}, lse_b = {0.5f, nan, nan};
  const auto view = [](auto& values) { return TensorView::bhsd(values.data(), 1, 1, 3, 8); };
  const PartialState states[] = {{view(a), lse_a.data()}, {view(b), lse_b.data()}};
  reference_merge(parse_spec("merge:fp32:d8"), {.states = states, .out = view(out), .lse = lse.data()});
  for (int row = 0; row < 3; ++row) {
    EXPECT_TRUE(std::isnan(lse[row])) << row;
    EXPECT_TRUE(std::isnan(out[row * 8])) << row;
  }
}

TEST(ReferenceNaN, OfAStateWhoseWeightUnderflowsIsSeen) {
  std::vector<float> a(8, std::nanf("")), b(8, 3.0f), out(8);
  const float low = -2000.0f, high = 2000.0f;
  const auto view = [](auto& values) { return TensorView::bhsd(values.data(), 1, 1, 1, 8); };
  const PartialState states[] = {{view(a), &low}, {view(b), &high}};
  reference_merge(parse_spec("merge:fp32:d8"), {.states = states, .out = view(out)});
  for (const float value : out) EXPECT_TRUE(std::isnan(value));
}

/// Two sequences of at most 33 keys in pages of 16, with room for many.
struct Paged {
  std::vector<float> q, k, v, out = std::vector<float>(2 * 8), lse = std::vector<float>(2);
  std::vector<std::int32_t> lengths = {33, 20}, table;
  std::int64_t columns;

  explicit Paged(std::int64_t columns_) : table(2 * columns_, 0), columns(columns_) {
    for (int i = 0; i < 2 * 8; ++i) q.push_back(std::sin(0.7f * static_cast<float>(i)));
    for (int i = 0; i < 6 * 16 * 8; ++i) k.push_back(std::sin(1.3f * static_cast<float>(i)));
    v = k;
    for (int i = 0; i < 3; ++i) table[i] = i, table[columns + i] = 3 + i;
  }
  void run(const std::string& spec) {
    const auto pool = [](std::vector<float>& values) { return TensorView::bhsd(values.data(), 6, 1, 16, 8); };
    reference_forward(parse_spec(spec), {.q = TensorView::bhsd(q.data(), 2, 1, 1, 8),
                                         .k = pool(k),
                                         .v = pool(v),
                                         .out = TensorView::bhsd(out.data(), 2, 1, 1, 8),
                                         .lse = lse.data(),
                                         .kv_lengths = lengths.data(),
                                         .page_table = {table.data(), 2, columns}});
  }
};

TEST(ReferenceCache, CostsWhatItsKeysDoNotItsRoom) {
  Paged narrow(3), wide(1 << 20);
  narrow.run("fwd:fp32:d8:causal:pages16");
  wide.run("fwd:fp32:d8:causal:pages16");  // 17 GB once
  EXPECT_EQ(wide.out, narrow.out);
  EXPECT_EQ(wide.lse, narrow.lse);
}

TEST(ReferenceCache, PagesThatNoQueryReachesMayBeFreed) {
  const std::string window = "fwd:fp32:d8:pages16:mask{kv >= q + seqlen_kv - seqlen_q - 8}";
  Paged whole(3), freed(3);
  whole.run(window);
  freed.table[0] = -1, freed.table[1] = 6;  // keys 0 to 31 of 33: the window begins at 24
  EXPECT_NE(failure(ErrorCode::invalid_argument, [&] { freed.run(window); }).find("names page 6 for key 24"),
            std::string::npos);
  freed.table[1] = 1;
  std::fill_n(freed.k.begin(), 16 * 8, std::nanf(""));
  std::fill_n(freed.v.begin(), 16 * 8, std::nanf(""));
  freed.run(window);
  EXPECT_EQ(freed.out, whole.out);
  EXPECT_EQ(freed.lse, whole.lse);
}

}  // namespace
}  // namespace flashjit::reference
