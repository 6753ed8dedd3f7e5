#include "autotune/coverage.hpp"

#include <algorithm>

#include "autotune/inputs.hpp"
#include "plan/tiles.hpp"
#include "reference/inputs.hpp"

namespace flashjit::autotune {
namespace {

constexpr std::int64_t kMostCells = 256;  // a side
constexpr std::int64_t kFinest = 16;      // no tile is smaller
constexpr int kSamples = 4;               // pairs asked in a cell

std::int64_t step_of(std::int64_t length) {
  const std::int64_t least = (length + kMostCells - 1) / kMostCells;
  return std::max((least + kFinest - 1) / kFinest * kFinest, kFinest);
}

/// A point of a cell that no stride of a mask keeps step with.
std::int64_t sample(std::int64_t begin, std::int64_t end, std::int64_t i) {
  return begin + i * 7919 % (end - begin);
}

struct Cell {
  std::int64_t q_begin, q_end, kv_begin, kv_end;
};

/// Whether a pair of a cell passes a mask program.
class MaskProbe {
 public:
  MaskProbe(const AttentionSpec& spec, const AttentionShape& shape)
      : mask_only_(without_score(spec)),
        shape_(shape),
        captures_(reference::plausible_captures(mask_only_, shape, kInputSeed)),
        programs_(mask_only_, captures_) {}

  bool any(const Cell& cell) const {
    for (int i = 0; i < kSamples; ++i) {
      const std::int64_t salt = cell.q_begin + 3 * cell.kv_begin + i;
      if (attends(sample(cell.q_begin, cell.q_end, salt), sample(cell.kv_begin, cell.kv_end, salt * 31 + i)))
        return true;
    }
    // Masks have their edges along the diagonal more often than elsewhere.
    return attends(cell.q_end - 1, cell.kv_begin) || attends(cell.q_begin, cell.kv_end - 1);
  }

 private:
  static AttentionSpec without_score(AttentionSpec spec) {
    spec.score = {};
    return spec;
  }
  bool attends(std::int64_t q, std::int64_t kv) const {
    const std::int64_t h = shape_.heads_q / 2,
                       h_kv = h / std::max<std::int64_t>(shape_.heads_q / shape_.heads_kv, 1);
    return programs_.attends({0, h, h_kv, q, kv, shape_.seqlen_q, shape_.seqlen_kv});
  }

  AttentionSpec mask_only_;
  AttentionShape shape_;
  std::vector<reference::Captured> captures_;
  reference::Programs programs_;
};

bool map_has(const BlockPattern& map, BlockSize block, const Cell& cell) {
  for (std::int64_t row = cell.q_begin / block.q; row * block.q < cell.q_end; ++row)
    for (std::int64_t column = cell.kv_begin / block.kv; column * block.kv < cell.kv_end; ++column)
      if (map.at(row, column)) return true;
  return false;
}

}  // namespace

Coverage::Coverage(const AttentionSpec& spec, const AttentionShape& shape, const BlockPattern& map)
    : seqlen_q_(shape.seqlen_q),
      seqlen_kv_(shape.seqlen_kv),
      full_(spec.mask.empty() && !spec.has_block_map()),
      q_step_(step_of(shape.seqlen_q)),
      kv_step_(step_of(shape.seqlen_kv)),
      rows_((shape.seqlen_q + q_step_ - 1) / q_step_),
      columns_((shape.seqlen_kv + kv_step_ - 1) / kv_step_) {
  if (full_ || seqlen_q_ == 0 || seqlen_kv_ == 0 || shape.heads_kv == 0) {
    full_ = true;
    return;
  }
  std::optional<MaskProbe> probe;
  if (!spec.mask.empty()) probe.emplace(spec, shape);
  sums_.assign((rows_ + 1) * (columns_ + 1), 0);
  for (std::int64_t row = 0; row < rows_; ++row) {
    std::int32_t in_row = 0;
    for (std::int64_t column = 0; column < columns_; ++column) {
      const Cell cell{row * q_step_, std::min((row + 1) * q_step_, seqlen_q_), column * kv_step_,
                      std::min((column + 1) * kv_step_, seqlen_kv_)};
      in_row += (!spec.has_block_map() || map_has(map, spec.block_map, cell)) && (!probe || probe->any(cell));
      sums_[(row + 1) * (columns_ + 1) + column + 1] = sums_[row * (columns_ + 1) + column + 1] + in_row;
    }
  }
}

bool Coverage::any(std::int64_t q_begin, std::int64_t q_end, std::int64_t kv_begin,
                   std::int64_t kv_end) const {
  const std::int64_t top = q_begin / q_step_, bottom = (std::min(q_end, seqlen_q_) + q_step_ - 1) / q_step_;
  const std::int64_t left = kv_begin / kv_step_,
                     right = (std::min(kv_end, seqlen_kv_) + kv_step_ - 1) / kv_step_;
  const auto sum = [&](std::int64_t row, std::int64_t column) {
    return sums_[row * (columns_ + 1) + column];
  };
  return sum(bottom, right) - sum(top, right) - sum(bottom, left) + sum(top, left) > 0;
}

std::vector<std::int64_t> Coverage::tiles_of_rows(int br, int bc) const {
  const std::int64_t q_tiles = plan::tiles(seqlen_q_, br), kv_tiles = plan::tiles(seqlen_kv_, bc);
  std::vector<std::int64_t> counts(q_tiles, full_ ? kv_tiles : 0);
  if (full_) return counts;
  for (std::int64_t i = 0; i < q_tiles; ++i)
    for (std::int64_t j = 0; j < kv_tiles; ++j) counts[i] += any(i * br, (i + 1) * br, j * bc, (j + 1) * bc);
  return counts;
}

std::vector<std::int64_t> Coverage::tiles_of_columns(int br, int bc) const {
  const std::int64_t q_tiles = plan::tiles(seqlen_q_, br), kv_tiles = plan::tiles(seqlen_kv_, bc);
  std::vector<std::int64_t> counts(kv_tiles, full_ ? q_tiles : 0);
  if (full_) return counts;
  for (std::int64_t j = 0; j < kv_tiles; ++j)
    for (std::int64_t i = 0; i < q_tiles; ++i) counts[j] += any(i * br, (i + 1) * br, j * bc, (j + 1) * bc);
  return counts;
}

}  // namespace flashjit::autotune
