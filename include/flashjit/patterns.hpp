// Patterns for block maps: which blocks of queries and keys attend. Plain host values: upload `blocks` and
// point a BlockMapView at it. All count rows and columns in blocks; combine them with a mask program such as
// causal() freely.
#pragma once

#include <cstdint>
#include <vector>

#include "flashjit/spec.hpp"
#include "flashjit/types.hpp"

namespace flashjit {

/// One head's block map, [rows, columns] in C order: 1 where the block attends, else 0.
struct BlockPattern {
  std::int64_t rows = 0;     ///< ceil(seqlen_q / block.q)
  std::int64_t columns = 0;  ///< ceil(seqlen_kv / block.kv)
  std::vector<std::uint8_t> blocks;

  std::uint8_t at(std::int64_t row, std::int64_t column) const { return blocks[row * columns + column]; }
  /// Share of the blocks that attend, 0 to 1; 0 for a pattern without blocks.
  FLASHJIT_API double density() const;
  bool operator==(const BlockPattern&) const = default;
};

/// Rows and columns of the block map of a shape. Throws Error(invalid_argument) on negative lengths or block
/// sizes < 1.
FLASHJIT_API BlockPattern empty_pattern(std::int64_t seqlen_q, std::int64_t seqlen_kv, BlockSize block);

// The builders below throw Error(invalid_argument) when rows, columns or a parameter is negative, when a
// stride is not positive, or when rows * columns exceeds 2^31 - 1.

/// The butterfly of Dao et al., "Pixelated Butterfly" (2022), which the first FlashAttention paper uses: the
/// diagonal and the blocks whose row and column differ in exactly one bit. The number of blocks per row grows
/// with log2(columns).
FLASHJIT_API BlockPattern butterfly(std::int64_t rows, std::int64_t columns);

/// A sliding window: |row - column| <= radius. Radius 0 is the diagonal.
FLASHJIT_API BlockPattern local_window(std::int64_t rows, std::int64_t columns, std::int64_t radius);

/// The strided pattern of Child et al., "Generating Long Sequences with Sparse Transformers" (2019): the last
/// `stride` blocks (and the next, which a causal mask removes) and every stride-th block before and after.
FLASHJIT_API BlockPattern strided(std::int64_t rows, std::int64_t columns, std::int64_t stride);

/// Beltagy et al., "Longformer" (2020): a window of `radius`; the first `global` blocks attend to all blocks,
/// and all attend to them.
FLASHJIT_API BlockPattern local_global(std::int64_t rows, std::int64_t columns, std::int64_t radius,
                                       std::int64_t global);

/// Zaheer et al., "Big Bird" (2020): local_global, and `random` further distinct blocks in every row, drawn
/// by Philox from `seed`. The same arguments give the same pattern on every machine. A row with fewer free
/// blocks takes them all.
FLASHJIT_API BlockPattern big_bird(std::int64_t rows, std::int64_t columns, std::int64_t radius,
                                   std::int64_t global, std::int64_t random, std::uint64_t seed);

/// The smallest map that keeps every attending pair of a dense mask, uint8 [seqlen_q, seqlen_kv], nonzero:
/// attends. The map does not mask within a block. Throws Error(invalid_argument) when mask's size is not
/// seqlen_q * seqlen_kv.
FLASHJIT_API BlockPattern from_dense_mask(const std::vector<std::uint8_t>& mask, std::int64_t seqlen_q,
                                          std::int64_t seqlen_kv, BlockSize block);

}  // namespace flashjit
