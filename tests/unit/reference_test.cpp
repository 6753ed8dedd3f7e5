// The oracle itself: against hand-computed cases, the plain formula, finite differences and its own
// invariants.
#include "reference/reference.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "flashjit/error.hpp"
#include "support/dropout.hpp"
#include "support/small_float.hpp"
#include "templates/common/philox.cuh"

namespace flashjit::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

std::vector<double> normal_values(std::int64_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal;
  std::vector<double> values(count);
  for (double& value : values) value = normal(generator);
  return values;
}

/// Normal Q, K, V and dO for a spec and shape, rounded to the element type.
Problem random_problem(const KernelSpec& spec, const AttentionShape& shape, unsigned seed = 1) {
  const std::int64_t rows_q = shape.batch * shape.heads_q * shape.seqlen_q;
  const std::int64_t rows_kv = shape.batch * shape.heads_kv * shape.seqlen_kv;
  Problem problem{.spec = spec, .shape = shape};
  problem.q = normal_values(rows_q * spec.head_dim, seed);
  problem.k = normal_values(rows_kv * spec.head_dim, seed + 1);
  problem.v = normal_values(rows_kv * spec.v_dim(), seed + 2);
  problem.dout = normal_values(rows_q * spec.v_dim(), seed + 3);
  for (auto* tensor : {&problem.q, &problem.k, &problem.v, &problem.dout}) {
    for (double& value : *tensor) value = round_to(spec.dtype, value);
  }
  return problem;
}

/// Every feature at once, small enough for finite differences.
Problem full_problem() {
  const KernelSpec spec{{.dtype = DType::fp32,
                         .head_dim = 8,
                         .head_dim_v = 16,
                         .mask = causal(),
                         .dropout = true,
                         .kv = KvLayout::padded(),
                         .block_map = {16, 16}}};
  Problem problem = random_problem(spec, {2, 4, 2, 20, 36});
  problem.softmax_scale = 0.7;
  problem.kv_lengths = {36, 17};
  problem.map_heads = 4;
  problem.block_map = {1, 0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 0, 0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1};
  problem.dropout_p = 0.3;
  problem.seed = 0x123456789abcdef0;
  problem.offset = 0xfedcba9876543210;
  return problem;
}

/// Queries of zero and V the identity: O[q, kv] is the dropped P, whose kept entries are all equal.
Problem mask_problem(std::int64_t batch, std::int64_t heads, double p, std::uint64_t seed,
                     std::uint64_t offset) {
  const std::int64_t length = 64;
  Problem problem = random_problem({{.dtype = DType::fp32, .head_dim = 64, .dropout = true}},
                                   {batch, heads, heads, length, length});
  std::fill(problem.q.begin(), problem.q.end(), 0.0);
  for (std::size_t i = 0; i < problem.v.size(); ++i) problem.v[i] = i / length % length == i % length;
  problem.dropout_p = p;
  problem.seed = seed;
  problem.offset = offset;
  return problem;
}

/// Sequences of unlike lengths, one without queries and one without keys, with sinks.
Problem packed_problem() {
  const KernelSpec spec{{.dtype = DType::fp32,
                         .head_dim = 8,
                         .head_dim_v = 16,
                         .mask = causal(),
                         .block_map = {16, 16},
                         .varlen = true,
                         .sinks = true}};
  // Rows for all: the packed tensors have the same heads.
  Problem problem = random_problem(spec, {1, 4, 2, 52, 77}, 5);
  problem.shape = {4, 4, 2, 30, 40};
  problem.cu_seqlens_q = {0, 15, 15, 22, 52};
  problem.cu_seqlens_kv = {0, 20, 37, 37, 77};
  problem.map_batch = 4;
  problem.block_map = {1, 0, 1, 1, 1, 0, 1, 0, 1, 0, 1, 0, 0, 0, 0, 1, 1, 1, 0, 1, 1, 1, 0, 1};
  problem.sinks = {0.5, -1, 3, -kInfinity};
  return problem;
}

/// Sequence `b` of a packed problem by itself.
Problem sequence_of(const Problem& packed, std::int64_t b) {
  const auto rows_of = [](const std::vector<double>& tensor, const std::vector<std::int32_t>& offsets,
                          std::int64_t b, std::int64_t heads) {
    const std::int64_t row = static_cast<std::int64_t>(tensor.size()) / (heads * offsets.back());
    std::vector<double> rows;
    for (std::int64_t h = 0; h < heads; ++h) {
      const auto head = tensor.begin() + h * offsets.back() * row;
      rows.insert(rows.end(), head + offsets[b] * row, head + offsets[b + 1] * row);
    }
    return rows;
  };
  Problem one{.spec = packed.spec, .shape = packed.shape};
  one.spec.varlen = false;
  one.shape.batch = 1;
  one.shape.seqlen_q = packed.cu_seqlens_q[b + 1] - packed.cu_seqlens_q[b];
  one.shape.seqlen_kv = packed.cu_seqlens_kv[b + 1] - packed.cu_seqlens_kv[b];
  one.q = rows_of(packed.q, packed.cu_seqlens_q, b, 4);
  one.dout = rows_of(packed.dout, packed.cu_seqlens_q, b, 4);
  one.k = rows_of(packed.k, packed.cu_seqlens_kv, b, 2);
  one.v = rows_of(packed.v, packed.cu_seqlens_kv, b, 2);
  one.sinks = packed.sinks;
  for (std::int64_t row = 0; row * 16 < one.shape.seqlen_q; ++row)
    for (std::int64_t column = 0; column * 16 < one.shape.seqlen_kv; ++column)
      one.block_map.push_back(packed.block_map[(b * 2 + row) * 3 + column]);
  return one;
}

std::vector<bool> kept_pairs(const Problem& problem) {
  const Forward result = forward(problem);
  std::vector<bool> kept(result.out.size());
  for (std::size_t i = 0; i < kept.size(); ++i) kept[i] = result.out[i] != 0;
  return kept;
}

void expect_refusal(const Problem& problem, const std::string& part) {
  try {
    backward(problem);
    FAIL() << "accepted; a refusal with '" << part << "' was expected";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_NE(error.message().find(part), std::string::npos) << error.message();
  }
}

TEST(Reference, OneQueryTwoKeysByHand) {
  Problem problem = random_problem({{.dtype = DType::fp32, .head_dim = 8}}, {1, 1, 1, 1, 2});
  problem.softmax_scale = 0.5;
  problem.q = {2, 0, 0, 0, 0, 0, 0, 0};
  problem.k = {0, 1, 0, 0, 0, 0, 0, 0, std::log(3.0), 0, 1, 0, 0, 0, 0, 0};  // S = [0, log 3], P = [1/4, 3/4]
  problem.v = {4, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0};
  problem.dout = {1, 0, 0, 0, 0, 0, 0, 0};  // dP = [4, 0], D = 1, dS = [3/4, -3/4]

  const Forward fwd = forward(problem);
  EXPECT_LT(max_abs_error(fwd.out, {1, 3, 0, 0, 0, 0, 0, 0}), 1e-14);
  EXPECT_NEAR(fwd.lse[0], std::log(4.0), 1e-14);

  const Backward bwd = backward(problem);
  const double dq0 = 0.5 * -0.75 * std::log(3.0);
  EXPECT_LT(max_abs_error(bwd.dq, {dq0, 0.375, -0.375, 0, 0, 0, 0, 0}), 1e-14);
  EXPECT_LT(max_abs_error(bwd.dk, {0.75, 0, 0, 0, 0, 0, 0, 0, -0.75, 0, 0, 0, 0, 0, 0, 0}), 1e-14);
  EXPECT_LT(max_abs_error(bwd.dv, {0.25, 0, 0, 0, 0, 0, 0, 0, 0.75, 0, 0, 0, 0, 0, 0, 0}), 1e-14);
}

TEST(Reference, CausalAlignmentsByHand) {
  // All scores equal: O is the mean of the values that a query sees.
  Problem problem =
      random_problem({{.dtype = DType::fp32, .head_dim = 8, .mask = causal()}}, {1, 1, 1, 2, 4});
  std::fill(problem.q.begin(), problem.q.end(), 0.0);
  for (std::size_t i = 0; i < problem.v.size(); ++i) problem.v[i] = static_cast<double>(i / 8);
  EXPECT_NEAR(forward(problem).out[0], (0 + 1 + 2) / 3.0, 1e-14);
  EXPECT_NEAR(forward(problem).out[8], (0 + 1 + 2 + 3) / 4.0, 1e-14);
  EXPECT_NEAR(forward(problem).lse[0], std::log(3.0), 1e-14);
  problem.spec.mask = causal(CausalAlignment::top_left);
  EXPECT_NEAR(forward(problem).out[0], 0.0, 1e-14);
  EXPECT_NEAR(forward(problem).out[8], (0 + 1) / 2.0, 1e-14);
}

TEST(Reference, AgreesWithThePlainFormula) {
  const Problem problem = full_problem();
  const Forward result = forward(problem);
  const auto [b_count, h_count, hkv_count, sq, skv] = problem.shape;
  const Dropout dropout = dropout_parameters(problem.dropout_p);
  for (std::int64_t b = 0; b < b_count; ++b) {
    for (std::int64_t h = 0; h < h_count; ++h) {
      for (std::int64_t q = 0; q < sq; ++q) {
        const std::int64_t row = (b * h_count + h) * sq + q;
        std::vector<double> out(16, 0.0);
        double sum = 0;
        for (std::int64_t kv = 0; kv < skv; ++kv) {
          if (kv >= problem.kv_lengths[b] || kv > q + skv - sq) continue;
          if (!problem.block_map[(h * 2 + q / 16) * 3 + kv / 16]) continue;
          const std::int64_t kv_row = (b * hkv_count + h / 2) * skv + kv;
          double s = 0;
          for (int i = 0; i < 8; ++i) s += problem.q[row * 8 + i] * problem.k[kv_row * 8 + i];
          const double weight = std::exp(0.7 * s);
          sum += weight;
          const Philox4 words = dropout_words(0x9abcdef0, 0x12345678, 0x76543210, 0xfedcba98,
                                              static_cast<unsigned>(b * h_count + h), static_cast<int>(q),
                                              static_cast<int>(kv));
          const int index = dropout_word_index(static_cast<int>(q), static_cast<int>(kv));
          if (is_dropped(draw_dropped(words.word[index], dropout.drop_share), kv % 2)) continue;
          for (int i = 0; i < 16; ++i) out[i] += weight * dropout.keep_scale * problem.v[kv_row * 16 + i];
        }
        EXPECT_LT(max_abs_error({result.lse[row]}, {std::log(sum)}), 1e-12);
        for (int i = 0; i < 16; ++i) ASSERT_NEAR(result.out[row * 16 + i], sum ? out[i] / sum : 0, 1e-12);
      }
    }
  }
}

TEST(Reference, GradientsAreFiniteDifferences) {
  Problem problem = full_problem();
  const Backward gradients = backward(problem);
  const auto loss = [&problem] {
    const Forward result = forward(problem);
    double sum = 0;
    for (std::size_t i = 0; i < result.out.size(); ++i) sum += result.out[i] * problem.dout[i];
    return sum;
  };
  const auto check = [&](const char* name, std::vector<double>& tensor, const std::vector<double>& gradient) {
    constexpr double kStep = 1e-5;
    ASSERT_EQ(tensor.size(), gradient.size());
    for (std::size_t i = 0; i < tensor.size(); i += tensor.size() / 61) {
      const double value = tensor[i];
      tensor[i] = value + kStep;
      const double above = loss();
      tensor[i] = value - kStep;
      const double below = loss();
      tensor[i] = value;
      EXPECT_NEAR(gradient[i], (above - below) / (2 * kStep), 1e-7) << name << "[" << i << "]";
    }
  };
  check("dq", problem.q, gradients.dq);
  check("dk", problem.k, gradients.dk);
  check("dv", problem.v, gradients.dv);
}

TEST(Reference, ProbabilitiesOfARowSumToOne) {
  Problem problem = full_problem();
  problem.spec.dropout = false;
  problem.dropout_p = 0;
  std::fill(problem.v.begin(), problem.v.end(), 1.0);
  const Forward result = forward(problem);
  for (std::size_t i = 0; i < result.out.size(); ++i) {
    const bool masked = result.lse[i / 16] == -kInfinity;
    ASSERT_NEAR(result.out[i], masked ? 0.0 : 1.0, 1e-14);
  }
}

TEST(Reference, RowsThatAttendToNothingAreZero) {
  Problem problem = random_problem(
      {{.dtype = DType::fp16, .head_dim = 16, .mask = causal(), .kv = KvLayout::padded()}}, {2, 1, 1, 9, 4});
  problem.kv_lengths = {4, 0};
  for (const Precision precision : {Precision::exact, Precision::rounded}) {
    const Forward fwd = forward(problem, precision);
    const Backward bwd = backward(problem, precision);
    for (int row = 0; row < 18; ++row) {
      const bool masked =
          row < 5 || row >= 9;  // queries 0 to 4 precede the first key; batch entry 1 has no keys
      EXPECT_EQ(fwd.lse[row] == -kInfinity, masked) << row;
      for (int i = 0; i < 16; ++i) {
        EXPECT_EQ(fwd.out[row * 16 + i] == 0, masked) << row;
        // Query 5 attends to one key: its P is constantly 1.
        if (row == 5) continue;
        EXPECT_EQ(bwd.dq[row * 16 + i] == 0, masked) << row;
      }
    }
    for (std::size_t i = 4 * 16; i < bwd.dk.size(); ++i) EXPECT_TRUE(bwd.dk[i] == 0 && bwd.dv[i] == 0);
  }
}

TEST(Reference, NoKeysAndNoQueriesAreAllowed) {
  const KernelSpec spec{{.dtype = DType::bf16, .head_dim = 8}};
  const Problem no_keys = random_problem(spec, {2, 2, 1, 3, 0});
  EXPECT_EQ(forward(no_keys).out, std::vector<double>(2 * 2 * 3 * 8, 0.0));
  EXPECT_EQ(forward(no_keys).lse, std::vector<double>(2 * 2 * 3, -kInfinity));
  EXPECT_EQ(backward(no_keys).dq, std::vector<double>(2 * 2 * 3 * 8, 0.0));
  const Problem no_queries = random_problem(spec, {2, 2, 1, 0, 3});
  EXPECT_TRUE(forward(no_queries).out.empty());
  EXPECT_EQ(backward(no_queries).dk, std::vector<double>(2 * 3 * 8, 0.0));
  EXPECT_EQ(backward(no_queries).dv, std::vector<double>(2 * 3 * 8, 0.0));
  EXPECT_TRUE(forward(random_problem(spec, {0, 0, 0, 3, 3})).lse.empty());
}

TEST(Reference, GroupedHeadsAreRepeatedHeads) {
  const KernelSpec spec{{.dtype = DType::fp32, .head_dim = 8, .mask = causal()}};
  const Problem grouped = random_problem(spec, {2, 6, 2, 10, 12});
  Problem repeated = grouped;
  repeated.shape.heads_kv = 6;
  const std::int64_t head_size = 12 * 8;
  const auto repeat = [&](const std::vector<double>& tensor) {
    std::vector<double> result;
    for (std::int64_t head = 0; head < 12; ++head) {
      const auto from = tensor.begin() + (head / 6 * 2 + head % 6 / 3) * head_size;
      result.insert(result.end(), from, from + head_size);
    }
    return result;
  };
  const auto sum = [&](const std::vector<double>& tensor) {
    std::vector<double> result(4 * head_size, 0.0);
    for (std::int64_t i = 0; i < 12 * head_size; ++i) {
      const std::int64_t head = i / head_size;
      result[(head / 6 * 2 + head % 6 / 3) * head_size + i % head_size] += tensor[i];
    }
    return result;
  };
  repeated.k = repeat(grouped.k);
  repeated.v = repeat(grouped.v);
  EXPECT_EQ(forward(grouped).out, forward(repeated).out);
  const Backward a = backward(grouped), b = backward(repeated);
  EXPECT_EQ(a.dq, b.dq);
  EXPECT_LT(max_abs_error(a.dk, sum(b.dk)), 1e-13);
  EXPECT_LT(max_abs_error(a.dv, sum(b.dv)), 1e-13);
}

TEST(Reference, ExtremeScoresStayFinite) {
  Problem problem = random_problem({{.dtype = DType::fp32, .head_dim = 8}}, {1, 1, 1, 4, 6});
  problem.softmax_scale = 1e4;
  const Forward result = forward(problem);
  for (const double value : result.out) EXPECT_TRUE(std::isfinite(value));
  for (const double value : result.lse) EXPECT_TRUE(std::isfinite(value));
}

TEST(Reference, MapThatIsFullChangesNothingAndBroadcasts) {
  const KernelSpec dense{{.dtype = DType::fp32, .head_dim = 8}};
  KernelSpec sparse = dense;
  sparse.block_map = {16, 32};
  Problem problem = random_problem(dense, {2, 2, 2, 40, 70});
  const Forward expected = forward(problem);
  problem.spec = sparse;
  problem.block_map.assign(3 * 3, 1);
  EXPECT_EQ(forward(problem).out, expected.out);

  problem.block_map[1] = 0;
  problem.block_map[5] = 0;
  const Forward broadcast = forward(problem);
  EXPECT_NE(broadcast.out, expected.out);
  const std::vector<std::uint8_t> one = problem.block_map;
  problem.map_batch = problem.map_heads = 2;
  for (int copy = 0; copy < 3; ++copy)
    problem.block_map.insert(problem.block_map.end(), one.begin(), one.end());
  EXPECT_EQ(forward(problem).out, broadcast.out);
}

TEST(Reference, PackedSequencesAreThoseSequencesByThemselves) {
  const Problem packed = packed_problem();
  const Forward fwd = forward(packed);
  const Backward bwd = backward(packed);
  std::vector<double> dsinks(4, 0.0);
  for (std::int64_t b = 0; b < 4; ++b) {
    SCOPED_TRACE(b);
    const Problem one = sequence_of(packed, b);
    const Forward fwd_one = forward(one);
    const Backward bwd_one = backward(one);
    const auto check = [&](const std::vector<double>& all, const std::vector<double>& part,
                           const std::vector<std::int32_t>& offsets, std::int64_t heads, std::int64_t dim) {
      const std::int64_t length = offsets[b + 1] - offsets[b];
      ASSERT_EQ(part.size(), static_cast<std::size_t>(heads * length * dim));
      for (std::int64_t h = 0; h < heads; ++h)
        for (std::int64_t i = 0; i < length * dim; ++i)
          ASSERT_EQ(all[(h * offsets.back() + offsets[b]) * dim + i], part[h * length * dim + i]);
    };
    check(fwd.out, fwd_one.out, packed.cu_seqlens_q, 4, 16);
    check(bwd.dq, bwd_one.dq, packed.cu_seqlens_q, 4, 8);
    check(bwd.dk, bwd_one.dk, packed.cu_seqlens_kv, 2, 8);
    check(bwd.dv, bwd_one.dv, packed.cu_seqlens_kv, 2, 16);
    const std::int64_t length = one.shape.seqlen_q;
    for (std::int64_t h = 0; h < 4; ++h) {
      dsinks[h] += bwd_one.dsinks[h];
      for (std::int64_t i = 0; i < length; ++i)
        ASSERT_EQ(fwd.lse[h * packed.cu_seqlens_q.back() + packed.cu_seqlens_q[b] + i],
                  fwd_one.lse[h * length + i]);
    }
  }
  EXPECT_LT(max_abs_error(bwd.dsinks, dsinks), 1e-14);
  EXPECT_EQ(existing_rows(packed, fwd.lse).size(), 4u * 52);
  EXPECT_EQ(max_abs_error(existing_rows(packed, fwd.lse), existing_rows(packed, fwd.lse)), 0);
}

TEST(Reference, WrongOffsetsOfPackedSequencesAreCutToTheRowsThatThereAre) {
  constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
  const Problem right = packed_problem();
  const auto expect_same = [&](std::vector<std::int32_t> q, std::vector<std::int32_t> kv) {
    Problem wrong = right;
    wrong.cu_seqlens_q = std::move(q);
    wrong.cu_seqlens_kv = std::move(kv);
    EXPECT_EQ(forward(wrong).out, forward(right).out);
    EXPECT_EQ(existing_rows(wrong, forward(wrong).lse), existing_rows(right, forward(right).lse));
    const Backward got = backward(wrong), wanted = backward(right);
    EXPECT_EQ(got.dq, wanted.dq);
    EXPECT_EQ(got.dk, wanted.dk);
    EXPECT_EQ(got.dv, wanted.dv);
    EXPECT_EQ(got.dsinks, wanted.dsinks);
  };
  expect_same({-7, 15, 15, 22, 53}, {-kMost, 20, 37, 37, 1000});
  expect_same({-kMost - 1, 15, 15, 22, kMost}, {0, 20, 37, 37, kMost});

  // Sequences that share rows, have none, or are longer than the shape says.
  for (const std::vector<std::int32_t>& offsets : std::vector<std::vector<std::int32_t>>{
           {0, 40, 10, 50, -3}, {60, 70, 80, 90, kMost}, {0, kMost, -kMost, kMost, 5}}) {
    Problem wrong = right;
    wrong.cu_seqlens_q = wrong.cu_seqlens_kv = offsets;
    EXPECT_EQ(forward(wrong).out.size(), right.dout.size());
    EXPECT_EQ(backward(wrong).dk.size(), right.k.size());
  }
}

TEST(Reference, OffsetsOfPackedSequencesCanBeChecked) {
  const auto refusal = [](const std::function<void(Problem&)>& change) -> std::string {
    Problem problem = packed_problem();
    change(problem);
    try {
      check_problem(problem);
    } catch (const Error& error) {
      return error.message();
    }
    return "accepted";
  };
  const auto expect_said = [&](const std::function<void(Problem&)>& change, const std::string& what) {
    const std::string said = refusal(change);
    EXPECT_NE(said.find(what), said.npos) << said;
  };
  expect_said([](Problem&) {}, "accepted");
  expect_said([](Problem& p) { p = full_problem(); }, "accepted");
  expect_said([](Problem& p) { p.cu_seqlens_q[0] = 1; }, "begins with 1");
  expect_said([](Problem& p) { p.cu_seqlens_kv[1] = 60; }, "sequence 0 the length 60");
  expect_said([](Problem& p) { p.cu_seqlens_kv[2] = 10; }, "sequence 1 the length -10");
  expect_said([](Problem& p) { p.cu_seqlens_kv[4] = 76; }, "accepted");  // a row that belongs to none
  expect_said([](Problem& p) { p.cu_seqlens_kv = {0, 30, 50, 60, 78}; }, "cu_seqlens_kv ends with 78");
  expect_said([](Problem& p) { p.cu_seqlens_q.pop_back(); }, "cu_seqlens_q has 4");
}

TEST(Reference, ASinkByHand) {
  Problem problem = random_problem({{.dtype = DType::fp32, .head_dim = 8, .sinks = true}}, {1, 1, 1, 1, 2});
  problem.softmax_scale = 0.5;
  problem.q = {2, 0, 0, 0, 0, 0, 0, 0};
  problem.k = {0, 1, 0, 0, 0, 0, 0, 0, std::log(3.0), 0, 1, 0, 0, 0, 0, 0};
  problem.v = {4, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0};
  problem.dout = {1, 0, 0, 0, 0, 0, 0, 0};
  problem.sinks = {std::log(4.0)};  // the weights are 1, 3 and 4: P = [1/8, 3/8], D = 1/2
  const Forward fwd = forward(problem);
  EXPECT_LT(max_abs_error(fwd.out, {0.5, 1.5, 0, 0, 0, 0, 0, 0}), 1e-14);
  EXPECT_NEAR(fwd.lse[0], std::log(8.0), 1e-14);
  const Backward bwd = backward(problem);
  EXPECT_NEAR(bwd.dsinks[0], -0.5 * 0.5, 1e-14);
  EXPECT_LT(max_abs_error(bwd.dv, {0.125, 0, 0, 0, 0, 0, 0, 0, 0.375, 0, 0, 0, 0, 0, 0, 0}), 1e-14);
}

TEST(Reference, RowsThatAttendToNothingHaveTheirSinkAsLse) {
  Problem problem = random_problem({{.dtype = DType::bf16, .head_dim = 8, .mask = causal(), .sinks = true}},
                                   {2, 2, 1, 9, 4});
  problem.sinks = {-2.5, -kInfinity};
  for (const Precision precision : {Precision::exact, Precision::rounded}) {
    const Forward fwd = forward(problem, precision);
    const Backward bwd = backward(problem, precision);
    for (int row = 0; row < 36; ++row) {
      if (row % 9 >= 5) continue;  // sees a key
      EXPECT_EQ(fwd.lse[row], problem.sinks[row / 9 % 2]) << row;
      for (int i = 0; i < 8; ++i) {
        EXPECT_EQ(fwd.out[row * 8 + i], 0) << row;
        EXPECT_EQ(bwd.dq[row * 8 + i], 0) << row;
      }
    }
    EXPECT_NE(bwd.dsinks[0], 0);
    EXPECT_EQ(bwd.dsinks[1], 0);
  }
}

TEST(Reference, GradientsOfPackedSequencesAndSinksAreFiniteDifferences) {
  Problem problem = packed_problem();
  problem.spec.dropout = true;
  problem.dropout_p = 0.2;
  const std::vector<double> lse = forward(problem).lse;
  // Rows that attend to nothing, and those past a sequence's end, may have any gradient.
  for (std::size_t i = 0; i < lse.size(); ++i)
    problem.dlse.push_back(std::isfinite(lse[i]) ? std::sin(static_cast<double>(i)) : kNaN);
  const Backward gradients = backward(problem);
  const auto loss = [&problem] {
    const Forward result = forward(problem);
    double sum = 0;
    for (std::size_t i = 0; i < result.out.size(); ++i) sum += result.out[i] * problem.dout[i];
    for (std::size_t i = 0; i < result.lse.size(); ++i)
      if (std::isfinite(result.lse[i])) sum += result.lse[i] * problem.dlse[i];
    return sum;
  };
  const auto check = [&](const char* name, std::vector<double>& tensor, const std::vector<double>& gradient) {
    constexpr double kStep = 1e-5;
    ASSERT_EQ(tensor.size(), gradient.size());
    for (std::size_t i = 0; i < tensor.size(); i += 1 + tensor.size() / 61) {
      const double value = tensor[i];
      if (!std::isfinite(value)) continue;
      tensor[i] = value + kStep;
      const double above = loss();
      tensor[i] = value - kStep;
      const double below = loss();
      tensor[i] = value;
      EXPECT_NEAR(gradient[i], (above - below) / (2 * kStep), 1e-7) << name << "[" << i << "]";
    }
  };
  check("dq", problem.q, gradients.dq);
  check("dk", problem.k, gradients.dk);
  check("dv", problem.v, gradients.dv);
  check("dsinks", problem.sinks, gradients.dsinks);
}

TEST(ReferenceDropout, KeepsTheShareItShould) {
  for (const double p : {0.1, 0.5, 0.9}) {
    const Problem problem = mask_problem(2, 4, p, 42, 0);
    const Forward result = forward(problem);
    const auto count = static_cast<double>(result.out.size());
    double kept = 0;
    for (const double value : result.out) {
      if (value == 0) continue;
      ++kept;
      ASSERT_NEAR(value, 1.0 / 64 * dropout_parameters(p).keep_scale, 1e-15);
    }
    EXPECT_NEAR(kept / count, 1 - p, 5 * std::sqrt(p * (1 - p) / count)) << "p " << p;
  }
  EXPECT_EQ(std::ranges::count(kept_pairs(mask_problem(1, 2, 0.0, 42, 0)), false), 0);
}

TEST(ReferenceDropout, NeighboursAreUncorrelated) {
  const std::vector<bool> kept = kept_pairs(mask_problem(2, 4, 0.5, 7, 9));
  for (const std::size_t distance : {1, 7, 8, 9, 15, 16, 64, 8 * 64, 16 * 64, 64 * 64}) {
    double equal = 0;
    const std::size_t pairs = kept.size() - distance;
    for (std::size_t i = 0; i < pairs; ++i) equal += kept[i] == kept[i + distance];
    const double count = static_cast<double>(pairs);
    EXPECT_NEAR(equal / count, 0.5, 5 * 0.5 / std::sqrt(count)) << "distance " << distance;
  }
}

TEST(ReferenceDropout, DependsOnSeedOffsetBatchAndHead) {
  std::set<std::vector<bool>> masks;
  for (const std::uint64_t seed : {1ull, 2ull, 1ull << 32, 1ull << 63})
    masks.insert(kept_pairs(mask_problem(1, 1, 0.5, seed, 5)));
  for (const std::uint64_t offset : {1ull, 2ull, 1ull << 32, 1ull << 63}) {
    masks.insert(kept_pairs(mask_problem(1, 1, 0.5, 77, offset)));
  }
  const std::vector<bool> all = kept_pairs(mask_problem(2, 3, 0.5, 123, 5));
  for (std::size_t head = 0; head < 6; ++head) {
    masks.emplace(all.begin() + head * 64 * 64, all.begin() + (head + 1) * 64 * 64);
  }
  EXPECT_EQ(masks.size(), 4u + 4 + 6);
}

TEST(ReferenceDropout, DependsOnNothingElse) {
  const Problem base = mask_problem(1, 2, 0.5, 5, 6);
  const std::vector<bool> expected = kept_pairs(base);
  EXPECT_EQ(kept_pairs(base), expected);

  Problem masked = base;
  masked.spec.mask = causal();
  const std::vector<bool> causal_kept = kept_pairs(masked);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const std::size_t q = i / 64 % 64, kv = i % 64;
    ASSERT_EQ(causal_kept[i], kv <= q && expected[i]);
  }

  Problem other = base;
  other.spec.dtype = DType::bf16;
  other.q = normal_values(static_cast<std::int64_t>(other.q.size()), 3);
  other.softmax_scale = 0.01;
  EXPECT_EQ(kept_pairs(other), expected);

  Problem shorter = base;  // its first 32 queries only
  shorter.shape.seqlen_q = 32;
  shorter.q.resize(shorter.q.size() / 2);
  const std::vector<bool> some = kept_pairs(shorter);
  for (std::size_t i = 0; i < some.size(); ++i)
    ASSERT_EQ(some[i], expected[i / (32 * 64) * 64 * 64 + i % (32 * 64)]);
}

TEST(ReferenceDropout, ParametersAreRoundedOnce) {
  EXPECT_EQ(dropout_parameters(0).drop_share, 0u);
  EXPECT_EQ(dropout_parameters(0).keep_scale, 1.0);
  EXPECT_EQ(dropout_parameters(0.5).drop_share, 0x40004000u);
  EXPECT_EQ(dropout_parameters(0.5).keep_scale, 2.0);
  EXPECT_EQ(dropout_parameters(0.25).drop_share, 0x20002000u);
  EXPECT_EQ(dropout_parameters(0x1p-40).drop_share, 0u);
  EXPECT_EQ(dropout_parameters(1 - 0x1p-40).drop_share, 0x7fff7fffu);  // a pair of 2^15 stays
  for (const double p : {-0.1, 1.0, 2.0, std::nan(""), kInfinity})
    EXPECT_THROW(dropout_parameters(p), Error) << p;
}

/// Every finite value of a format, ascending and without -0.
template <class Format>
std::vector<double> all_values() {
  std::vector<double> values;
  for (unsigned bits = 0; bits < 0x10000; ++bits) {
    const double value = Format::decode(static_cast<std::uint16_t>(bits));
    if (std::isfinite(value) && bits != 0x8000) values.push_back(value);
  }
  std::sort(values.begin(), values.end());
  return values;
}

template <class Format>
void check_rounding(DType dtype, double largest) {
  for (unsigned bits = 0; bits < 0x10000; ++bits) {
    const double value = Format::decode(static_cast<std::uint16_t>(bits));
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(Format::decode(Format::encode(value))));
      continue;
    }
    ASSERT_EQ(Format::encode(value), bits);
    ASSERT_EQ(round_to(dtype, value), value);
  }
  const std::vector<double> values = all_values<Format>();
  ASSERT_EQ(values.back(), largest);
  for (std::size_t i = 0; i + 1 < values.size(); ++i) {
    const double low = values[i], high = values[i + 1], middle = low + (high - low) / 2;
    const double even = Format::encode(low) % 2 == 0 ? low : high;
    ASSERT_EQ(round_to(dtype, middle), even) << middle;
    ASSERT_EQ(round_to(dtype, std::nextafter(middle, -kInfinity)), low) << middle;
    ASSERT_EQ(round_to(dtype, std::nextafter(middle, kInfinity)), high) << middle;
    ASSERT_EQ(Format::decode(Format::encode(middle)), even) << middle;
  }
  const double half_step = (values.back() - values[values.size() - 2]) / 2;
  EXPECT_EQ(round_to(dtype, std::nextafter(largest + half_step, 0)), largest);
  EXPECT_EQ(round_to(dtype, largest + half_step), kInfinity);
  EXPECT_EQ(round_to(dtype, -largest - half_step), -kInfinity);
  EXPECT_EQ(round_to(dtype, 1e300), kInfinity);
  EXPECT_EQ(round_to(dtype, -kInfinity), -kInfinity);
  EXPECT_TRUE(std::isnan(round_to(dtype, std::nan(""))));
  EXPECT_EQ(round_to(dtype, 1e-300), 0.0);
  EXPECT_TRUE(std::signbit(round_to(dtype, -1e-300)));
}

TEST(RoundTo, Fp16IsNearestEvenEverywhere) { check_rounding<Fp16>(DType::fp16, 65504); }
TEST(RoundTo, Bf16IsNearestEvenEverywhere) { check_rounding<Bf16>(DType::bf16, 0x1.fep127); }

TEST(RoundTo, Fp32IsTheConversion) {
  for (const double value : normal_values(1000, 5))
    EXPECT_EQ(round_to(DType::fp32, value), static_cast<float>(value));
}

TEST(Precision, RoundedResultsAreOfTheElementTypeAndNearTheExact) {
  const struct {
    DType dtype;
    double epsilon;
  } cases[] = {{DType::fp16, 0x1p-11}, {DType::bf16, 0x1p-8}, {DType::fp32, 0x1p-24}};
  for (const auto& of_type : cases) {
    const DType dtype = of_type.dtype;  // clang 14 has no structured bindings in lambdas
    const double epsilon = of_type.epsilon;
    KernelSpec spec{{.dtype = dtype, .head_dim = 32, .mask = causal(), .dropout = true}};
    Problem problem = random_problem(spec, {1, 2, 1, 50, 60});
    problem.dropout_p = 0.2;
    const Forward exact = forward(problem), rounded = forward(problem, Precision::rounded);
    const Backward exact_grad = backward(problem), rounded_grad = backward(problem, Precision::rounded);
    const auto check = [&](const std::vector<double>& a, const std::vector<double>& b) {
      EXPECT_GT(max_abs_error(a, b), epsilon / 8) << to_string(dtype);
      EXPECT_LT(max_abs_error(a, b), epsilon * 64) << to_string(dtype);
      for (const double value : b) ASSERT_EQ(round_to(dtype, value), value);
    };
    check(exact.out, rounded.out);
    check(exact_grad.dq, rounded_grad.dq);
    check(exact_grad.dk, rounded_grad.dk);
    check(exact_grad.dv, rounded_grad.dv);
  }
}

TEST(Precision, FusedKeepsScoresThatRoundingDestroys) {
  Problem problem = random_problem({{.dtype = DType::bf16, .head_dim = 16}}, {1, 2, 2, 100, 100});
  problem.softmax_scale = 100;
  const std::vector<double> exact = forward(problem).out;
  EXPECT_GT(max_abs_error(forward(problem, Precision::rounded).out, exact), 0.1);
  EXPECT_LT(max_abs_error(forward(problem, Precision::fused).out, exact), 0.02);
  for (const double value : forward(problem, Precision::fused).out)
    ASSERT_EQ(round_to(DType::bf16, value), value);
}

TEST(Judge, AppliesTheProjectsRule) {
  const std::vector<double> exact{1, 2, 3}, rounded{1, 2.01, 3};
  EXPECT_TRUE(judge({1, 2, 3.0199}, exact, rounded, 2).ok());
  EXPECT_FALSE(judge({1, 2, 3.0201}, exact, rounded, 2).ok());
  EXPECT_TRUE(judge({1, 2, 3.0201}, exact, rounded, 3).ok());
  EXPECT_NEAR(judge(exact, exact, rounded, 2).limit, 0.02 + 1e-5, 1e-12);
  EXPECT_FALSE(judge({1, 2, std::nan("")}, exact, rounded, 2).ok());
  EXPECT_FALSE(judge({1, 2, kInfinity}, exact, rounded, 2).ok());
  EXPECT_THROW(judge(exact, exact, {1, std::nan(""), 3}, 2), Error);
  EXPECT_THROW(judge({1, 2}, exact, rounded, 2), Error);
}

TEST(Judge, GradientsOfSinksAreMeasuredByTheirRowsErrors) {
  // Two heads, of two rows in each of two batch entries; the first head's errors cancel in the sum.
  const AttentionShape shape{2, 2, 1, 2, 5};
  const std::vector<double> sums{10, 20}, rows{1, 2, 7, 3, 3, 4, 5, 5};
  const std::vector<double> rounded_sums{10, 20.1}, rounded_rows{1.3, 2, 7.1, 3, 2.7, 4, 5, 5};
  const SinkGrads exact{sums, rows}, rounded{rounded_sums, rounded_rows};
  const double yardstick = std::sqrt(0.3 * 0.3 * 2);
  EXPECT_NEAR(judge_dsinks(shape, sums, exact, rounded, 3).limit, 3 * yardstick + 1e-5, 1e-9);
  EXPECT_TRUE(judge_dsinks(shape, {10, 20 + 2.9 * yardstick}, exact, rounded, 3).ok());
  EXPECT_FALSE(judge_dsinks(shape, {10, 20 + 3.1 * yardstick}, exact, rounded, 3).ok());
  EXPECT_FALSE(judge_dsinks(shape, {std::nan(""), 20}, exact, rounded, 3).ok());

  // Where all errors have one sign, the sum's is the larger one.
  const std::vector<double> biased{11, 20};
  EXPECT_NEAR(judge_dsinks(shape, sums, exact, {biased, rounded_rows}, 3).limit, 3 + 1e-5, 1e-9);
}

TEST(Judge, GradientsOfCapturesAreMeasuredByWhatTheirTermsRoundingBrings) {
  const std::vector<double> sums{0, 5}, squares{4, 1};  // the first is a difference of equals
  const auto judged = [&](DType dtype, double first, double second, double count) {
    const std::vector<double> counts{1, count};
    return judge_capture(dtype, {first, second}, {sums, squares, counts}, sums, 3);
  };
  const double yardstick = 2 * 0x1p-9;
  EXPECT_NEAR(judged(DType::bf16, 0, 5, 1).limit, 3 * yardstick + 1e-5, 1e-9);
  EXPECT_TRUE(judged(DType::bf16, 2.9 * yardstick, 5, 1).ok());
  EXPECT_FALSE(judged(DType::bf16, 3.1 * yardstick, 5, 1).ok());
  EXPECT_FALSE(judged(DType::bf16, std::nan(""), 5, 1).ok());
  // In fp32 what counts is how many terms are added one after the other.
  EXPECT_FALSE(judged(DType::fp32, 0, 5.0005, 1).ok());
  EXPECT_TRUE(judged(DType::fp32, 0, 5.0005, 1e6).ok());
}

TEST(Reference, TheRowsOfSinksGradientsAddUpToThem) {
  Problem problem = random_problem({{.dtype = DType::fp32, .head_dim = 8, .mask = causal(), .sinks = true}},
                                   {3, 4, 2, 20, 30});
  problem.sinks = {0.5, -1, 2, 0};
  const Backward grads = backward(problem);
  ASSERT_EQ(grads.dsink_rows.size(), 3u * 4 * 20);
  std::vector<double> sums(4);
  for (std::size_t i = 0; i < grads.dsink_rows.size(); ++i) sums[i / 20 % 4] += grads.dsink_rows[i];
  EXPECT_LT(max_abs_error(sums, grads.dsinks), 1e-12);
  EXPECT_GT(std::fabs(grads.dsinks[0]), 1e-3);
}

TEST(MaxAbsError, TreatsOnlyEqualInfinitiesAsEqual) {
  EXPECT_EQ(max_abs_error({-kInfinity, 1}, {-kInfinity, 1.5}), 0.5);
  EXPECT_EQ(max_abs_error({-kInfinity}, {kInfinity}), kInfinity);
  EXPECT_EQ(max_abs_error({std::nan("")}, {std::nan("")}), kInfinity);
  EXPECT_EQ(max_abs_error({}, {}), 0);
}

TEST(Reference, RefusesWhatDoesNotFit) {
  const auto with = [](const std::function<void(Problem&)>& change) {
    Problem problem = full_problem();
    change(problem);
    return problem;
  };
  expect_refusal(with([](Problem& p) { p.q.pop_back(); }), "q has 1279 elements");
  expect_refusal(with([](Problem& p) { p.k.clear(); }), "k has 0 elements");
  expect_refusal(with([](Problem& p) { p.v.push_back(0); }), "v has");
  expect_refusal(with([](Problem& p) { p.dout.clear(); }), "dout has 0 elements");
  expect_refusal(with([](Problem& p) { p.kv_lengths = {1}; }), "kv_lengths has 1");
  expect_refusal(with([](Problem& p) { p.block_map.pop_back(); }), "block_map has 23");
  expect_refusal(with([](Problem& p) { p.map_heads = 3; }), "1 or 4");
  expect_refusal(with([](Problem& p) { p.map_batch = 0; }), "1 or 2");
  expect_refusal(with([](Problem& p) { p.softmax_scale = 0; }), "softmax_scale is 0");
  expect_refusal(with([](Problem& p) { p.softmax_scale = std::nan(""); }), "softmax_scale is nan");
  expect_refusal(with([](Problem& p) { p.dropout_p = 1; }), "dropout_p is 1");
  expect_refusal(with([](Problem& p) { p.spec.dropout = false; }), "set spec.dropout");
  expect_refusal(with([](Problem& p) { p.spec.mask = MaskProgram("w: int; q > w"); }), "w: int");
  expect_refusal(with([](Problem& p) { p.spec.head_dim = 12; }), "12");
  expect_refusal(with([](Problem& p) { p.shape.heads_kv = 3; }), "heads");
  expect_refusal(with([](Problem& p) { p.spec.sinks = true; }), "sinks has 0");
  expect_refusal(with([](Problem& p) { p.captures = {{.name = "x", .values = {1}}}; }), "'x'");
  const auto packed_with = [](const std::function<void(Problem&)>& change) {
    Problem problem = packed_problem();
    change(problem);
    return problem;
  };
  expect_refusal(packed_with([](Problem& p) { p.cu_seqlens_q.pop_back(); }), "cu_seqlens_q has 4");
  expect_refusal(packed_with([](Problem& p) { p.cu_seqlens_kv.clear(); }), "cu_seqlens_kv has 0");
  expect_refusal(packed_with([](Problem& p) { p.q.pop_back(); }), "q has");
  expect_refusal(with([](Problem& p) { p.shape = {2147480000, 2147480000, 1, 2147480000, 1}; }), "overflow");
}

}  // namespace
}  // namespace flashjit::reference
