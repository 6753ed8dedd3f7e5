// What is measured with, and how much work that is.
#include "autotune/inputs.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "flashjit/flashjit.hpp"
#include "tests/support/tuning_problem.hpp"

namespace flashjit::autotune {
namespace {

using test::problem;

/// Pairs counted one by one.
double count_pairs(const KernelSpec& spec, const AttentionShape& shape, const BlockPattern& map) {
  double pairs = 0;
  for (std::int64_t q = 0; q < shape.seqlen_q; ++q) {
    for (std::int64_t kv = 0; kv < shape.seqlen_kv; ++kv) {
      const bool masked = (spec.mask.text() == "causal" && q + shape.seqlen_kv - shape.seqlen_q < kv) ||
                          (spec.mask.text() == "causal_top_left" && q < kv);
      const bool off = spec.has_block_map() && !map.at(q / spec.block_map.q, kv / spec.block_map.kv);
      pairs += !masked && !off;
    }
  }
  return pairs * static_cast<double>(shape.batch * shape.heads_q);
}

TEST(TuningInputs, AttendingPairsAreExact) {
  for (const char* spec_text : {"fwd:bf16:d64", "fwd:bf16:d64:causal", "fwd:bf16:d64:causal_top_left",
                                "fwd:bf16:d64:map16x32", "fwd:bf16:d64:causal:map32x16"}) {
    for (const char* shape_text :
         {"b1:hq1:hkv1:sq1:skv1", "b2:hq4:hkv2:sq100:skv100", "b1:hq2:hkv1:sq37:skv150",
          "b1:hq1:hkv1:sq150:skv37", "b1:hq1:hkv1:sq0:skv9", "b1:hq1:hkv1:sq9:skv0"}) {
      const KernelSpec spec = parse_spec(spec_text).normalized();
      const AttentionShape shape = parse_shape(shape_text);
      const BlockPattern map = plausible_map(spec, shape, 0.3);
      EXPECT_EQ(work_of(spec, shape, map).pairs, count_pairs(spec, shape, map))
          << spec_text << " " << shape_text;
    }
  }
}

TEST(TuningInputs, CausalCountsHalfAndOtherPassesTheirProducts) {
  const AttentionShape shape = parse_shape("b2:hq16:hkv16:sq4096:skv4096");
  const auto operations = [&](const char* text) {
    return work_of(parse_spec(text).normalized(), shape, {}).operations;
  };
  const double full = 4.0 * 2 * 16 * 4096.0 * 4096.0 * 128;
  EXPECT_DOUBLE_EQ(operations("fwd:bf16:d128"), full);
  EXPECT_NEAR(operations("fwd:bf16:d128:causal") / full, 0.5, 1e-3);
  EXPECT_DOUBLE_EQ(operations("bwd:bf16:d128"), 2.5 * full);
  EXPECT_DOUBLE_EQ(operations("jvp:bf16:d128"), 3 * full);
  EXPECT_DOUBLE_EQ(operations("bwd_jvp:bf16:d128"), 6 * full);
}

TEST(TuningInputs, BytesCountEveryTensorOnce) {
  const AttentionShape shape = parse_shape("b2:hq8:hkv2:sq100:skv300");
  const double q = 2 * 8 * 100 * 64 * 2, o = 2 * 8 * 100 * 32 * 2, k = 2 * 2 * 300 * 64 * 2,
               v = 2 * 2 * 300 * 32 * 2;
  const double lse = 2 * 8 * 100 * 4;
  EXPECT_DOUBLE_EQ(work_of(parse_spec("fwd:fp16:d64x32").normalized(), shape, {}).bytes, q + k + v + o + lse);
  EXPECT_DOUBLE_EQ(work_of(parse_spec("bwd:fp16:d64x32").normalized(), shape, {}).bytes,
                   2 * (q + k + v + o) + lse);
}

TEST(TuningInputs, PlausibleMapHasItsDensityInEveryRow) {
  const KernelSpec spec = parse_spec("fwd:bf16:d64:map64x64").normalized();
  const BlockPattern map = plausible_map(spec, parse_shape("b1:hq1:hkv1:sq4096:skv4096"), 0.25);
  EXPECT_EQ(map.rows, 64);
  EXPECT_EQ(map.columns, 64);
  EXPECT_DOUBLE_EQ(map.density(), 0.25);
  for (std::int64_t row = 0; row < map.rows; ++row) {
    EXPECT_EQ(map.at(row, row), 1) << "the diagonal attends";
  }
  EXPECT_DOUBLE_EQ(plausible_map(spec, parse_shape("b1:hq1:hkv1:sq4096:skv4096"), 1.0).density(), 1.0);
}

TEST(TuningInputs, PlausibleMapUnderACausalMaskLiesBelowTheDiagonal) {
  const KernelSpec spec = parse_spec("fwd:bf16:d64:causal:map64x64").normalized();
  const BlockPattern map = plausible_map(spec, parse_shape("b1:hq1:hkv1:sq4096:skv4096"), 0.25);
  for (std::int64_t row = 16; row < map.rows; ++row) {
    EXPECT_EQ(map.at(row, row), 1);
    EXPECT_EQ(map.at(row, row - 15), 1);
    EXPECT_EQ(map.at(row, row - 16), 0);
    if (row + 1 < map.columns) {
      EXPECT_EQ(map.at(row, row + 1), 0);
    }
  }
}

TEST(TuningInputs, DensityOutOfRangeIsRefused) {
  const KernelSpec spec = parse_spec("fwd:bf16:d64:map64x64").normalized();
  for (double density : {-0.1, 0.0, 1.5, std::nan("")}) {
    EXPECT_THROW(plausible_map(spec, problem().shape, density), Error) << density;
  }
}

TEST(TuningInputs, MedianOfOddAndEvenCounts) {
  EXPECT_EQ(median({3, 1, 2}), 2);
  EXPECT_EQ(median({4, 1, 2, 3}), 2.5);
  EXPECT_EQ(median({7}), 7);
}

}  // namespace
}  // namespace flashjit::autotune
