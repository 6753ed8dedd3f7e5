#include "autotune/inputs.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "flashjit/error.hpp"
#include "plan/tiles.hpp"
#include "reference/inputs.hpp"

namespace flashjit::autotune {
namespace {

constexpr std::int64_t kSampledRows = 256;

std::int64_t keys_by_map(const BlockPattern& map, BlockSize block, std::int64_t q, std::int64_t visible) {
  std::int64_t keys = 0;
  for (std::int64_t column = 0; column * block.kv < visible; ++column) {
    if (map.at(q / block.q, column)) keys += std::min<std::int64_t>(block.kv, visible - column * block.kv);
  }
  return keys;
}

/// Pairs of all batches and heads; of rows that are alike in each.
double prefix_pairs(const KernelSpec& spec, const AttentionShape& shape, const BlockPattern& map) {
  double pairs = 0;
  const std::vector<flashjit::Range> keys =
      plan::keys_of_tiles(spec, shape, 1);  // of no mask or a causal one: a prefix
  for (std::int64_t q = 0; q < shape.seqlen_q; ++q) {
    const std::int64_t visible = std::max(keys[static_cast<std::size_t>(q)].end, 0);
    pairs +=
        static_cast<double>(spec.has_block_map() ? keys_by_map(map, spec.block_map, q, visible) : visible);
  }
  return pairs * static_cast<double>(shape.batch * shape.heads_q);
}

/// The same of any mask, with plausible captures: estimated from some rows where there are many.
double sampled_pairs(KernelSpec spec, const AttentionShape& shape, const BlockPattern& map) {
  constexpr double kGoldenRatio = 0.6180339887498949;
  spec.score = {};
  const auto captures = reference::plausible_captures(spec, shape, kInputSeed);
  const reference::Programs programs(spec, captures);
  const std::int64_t rows = shape.batch * shape.heads_q * shape.seqlen_q;
  const std::int64_t samples = std::min(rows, kSampledRows);
  double pairs = 0;
  for (std::int64_t i = 0; i < samples; ++i) {
    // All rows, or multiples of the golden ratio, which spread evenly and in step with no mask.
    const double share = static_cast<double>(i) * kGoldenRatio;
    const std::int64_t row =
        samples == rows ? i
                        : static_cast<std::int64_t>((share - std::floor(share)) * static_cast<double>(rows));
    const std::int64_t q = row % shape.seqlen_q;
    const std::int64_t head = row / shape.seqlen_q, h = head % shape.heads_q, b = head / shape.heads_q;
    for (std::int64_t kv = 0; kv < shape.seqlen_kv; ++kv) {
      if (spec.has_block_map() && !map.at(q / spec.block_map.q, kv / spec.block_map.kv)) continue;
      const reference::Point point{
          b, h, h / (shape.heads_q / shape.heads_kv), q, kv, shape.seqlen_q, shape.seqlen_kv};
      if (programs.attends(point)) pairs += 1;
    }
  }
  return samples > 0 ? pairs * static_cast<double>(rows) / static_cast<double>(samples) : 0;
}

}  // namespace

BlockPattern plausible_map(const KernelSpec& spec, const AttentionShape& shape, double density) {
  if (!(density > 0 && density <= 1)) {
    throw Error(
        ErrorCode::invalid_argument,
        fmt::format("map density {} is not above 0 and at most 1; give the share of blocks that attend",
                    density));
  }
  if (!spec.has_block_map()) return {};
  BlockPattern map = empty_pattern(shape.seqlen_q, shape.seqlen_kv, spec.block_map);
  const auto width = std::max<std::int64_t>(1, std::llround(density * static_cast<double>(map.columns)));
  for (std::int64_t row = 0; row < map.rows; ++row) {
    const std::int64_t diagonal = row * map.columns / map.rows;
    const std::int64_t end = spec.mask.empty() ? diagonal + (width + 1) / 2 : diagonal + 1;
    const std::int64_t last = std::clamp(end, std::min(width, map.columns), map.columns);
    for (std::int64_t column = std::max<std::int64_t>(last - width, 0); column < last; ++column) {
      map.blocks[row * map.columns + column] = 1;
    }
  }
  return map;
}

Work work_of(const KernelSpec& spec, const AttentionShape& shape, const BlockPattern& map) {
  const double named = static_cast<double>(shape.batch * shape.heads_q * shape.seqlen_q) *
                       static_cast<double>(reference::plausible_top_k(shape.seqlen_kv));
  const bool prefix = spec.mask.empty() || plan::is_causal(spec.mask);
  const double pairs = spec.indices ? named
                       : prefix     ? prefix_pairs(spec, shape, map)
                                    : sampled_pairs(spec, shape, map);
  const double d = spec.head_dim, dv = spec.v_dim();
  const auto [multiply_adds, copies] = [&]() -> std::pair<double, double> {
    switch (spec.pass) {
      case Pass::backward:
        return {3 * d + 2 * dv, 2};  // S, dQ, dK; dP, dV
      case Pass::jvp:
        return {3 * d + 3 * dv, 2};  // S and two of its tangent; O and two of its
      case Pass::backward_jvp:
        return {7 * d + 5 * dv, 3};  // S, three of each tangent of S and dP, two of dQ's, dK's and dV's
      default:
        return {d + dv, 1};  // S, O
    }
  }();
  const auto q_rows = static_cast<double>(shape.batch * shape.heads_q * shape.seqlen_q);
  const auto kv_rows = static_cast<double>(shape.batch * shape.heads_kv * shape.seqlen_kv);
  const double tensors = q_rows * (size_of(spec.q_type()) * d + size_of(spec.dtype) * dv) +
                         kv_rows * size_of(spec.kv_type()) * (d + dv);
  return {pairs, 2 * pairs * multiply_adds, tensors * copies + q_rows * 4};
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

}  // namespace flashjit::autotune
