// How many tiles a kernel visits, for any tile size: what masks and block maps leave of S.
#pragma once

#include <cstdint>
#include <vector>

#include "flashjit/patterns.hpp"
#include "flashjit/spec.hpp"

namespace flashjit::autotune {

/// S of one head as a grid of cells, at most 256 a side: of each, whether a pair in it attends. Exact for no
/// mask and causal ones; for other masks some pairs of each cell are asked, of a head in the middle.
class Coverage {
 public:
  /// `map` as given by plausible_map().
  Coverage(const AttentionSpec& spec, const AttentionShape& shape, const BlockPattern& map);

  /// Tiles of Br x Bc with an attending cell: in each row of tiles, and in each column.
  std::vector<std::int64_t> tiles_of_rows(int br, int bc) const;
  std::vector<std::int64_t> tiles_of_columns(int br, int bc) const;

 private:
  bool any(std::int64_t q_begin, std::int64_t q_end, std::int64_t kv_begin, std::int64_t kv_end) const;

  std::int64_t seqlen_q_, seqlen_kv_;
  bool full_;
  std::int64_t q_step_, kv_step_, rows_, columns_;  // of cells
  std::vector<std::int32_t> sums_;                  // attending cells above and left of each corner
};

}  // namespace flashjit::autotune
