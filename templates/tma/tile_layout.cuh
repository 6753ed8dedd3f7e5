// Tiles as TMA writes them to shared memory, and how Q tiles are divided. Host and device include this file.
#pragma once

namespace flashjit::tma {

/// A tile in shared memory is slices of 64 columns: [slice][row][64], each row 128 bytes, swizzled by TMA in
/// groups of eight rows. Columns past the head dimension are zeros.
constexpr int kSliceColumns = 64;
constexpr int kRowBytes = 128;
constexpr int kAlignment = 1024;  ///< of every slice: the period of the swizzle

constexpr int slices(int columns) { return (columns + kSliceColumns - 1) / kSliceColumns; }
constexpr int tile_bytes(int rows, int columns) { return slices(columns) * rows * kRowBytes; }

constexpr int next_power_of_two(int x) {
  int power = 1;
  while (power < x) power *= 2;
  return power;
}

constexpr int kWarpgroupRows = 64;  ///< rows of Q, O or dQ that a warpgroup computes
/// Warpgroups with rows of their own; few rows of a tile are all of them one's.
constexpr int row_warpgroups(int br) { return br < kWarpgroupRows ? 1 : br / kWarpgroupRows; }
constexpr int warpgroup_rows(int br) { return br < kWarpgroupRows ? br : kWarpgroupRows; }

/// Columns of V that each of `groups` warpgroups with the same rows has, in whole slices; the last may have
/// fewer.
constexpr int own_columns(int head_dim_v, int groups) {
  return groups == 1 ? head_dim_v : (slices(head_dim_v) + groups - 1) / groups * kSliceColumns;
}

/// Into how many splits each of the `over` Q tiles of the forward pass's tail wave is divided: at most one a
/// warpgroup, and so few that all splits run at once in `slots` slots.
constexpr unsigned tail_splits(unsigned warpgroups, unsigned over, unsigned slots) {
  unsigned splits = warpgroups;
  while (over * splits > slots) --splits;
  return splits;
}

/// Rows of K and V that TMA copies at a time: a KV tile's, or as many up to `most` as divide both a tile and
/// a page.
constexpr int kv_box_rows(int page_rows, int bc, int most) {
  int rows = most < bc ? most : bc;
  while (bc % rows != 0 || page_rows % rows != 0) --rows;
  return rows;
}

}  // namespace flashjit::tma
