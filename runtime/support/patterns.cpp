#include "flashjit/patterns.hpp"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <limits>
#include <utility>

#include "flashjit/error.hpp"
#include "support/refuse.hpp"
#include "templates/common/philox.cuh"

namespace flashjit {
namespace {

constexpr std::int64_t kMaxBlocks = std::numeric_limits<std::int32_t>::max();

void check_at_least(const char* name, std::int64_t value, std::int64_t least) {
  if (value < least) refuse("{} is {}; a block pattern needs at least {}", name, value, least);
}

BlockPattern blank(std::int64_t rows, std::int64_t columns) {
  check_at_least("rows", rows, 0);
  check_at_least("columns", columns, 0);
  if (columns > 0 && rows > kMaxBlocks / columns) {
    refuse("a pattern of {} x {} blocks is too large; at most {} blocks are allowed, take larger blocks",
           rows, columns, kMaxBlocks);
  }
  return {rows, columns, std::vector<std::uint8_t>(rows * columns, 0)};
}

/// The pattern of the blocks for which attends(row, column) holds.
template <class Attends>
BlockPattern pattern_of(std::int64_t rows, std::int64_t columns, Attends attends) {
  BlockPattern pattern = blank(rows, columns);
  auto block = pattern.blocks.begin();
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t column = 0; column < columns; ++column) *block++ = attends(row, column) ? 1 : 0;
  }
  return pattern;
}

/// Turns `wanted` of the row's free blocks on: the first steps of a Fisher-Yates shuffle.
void add_random_blocks(BlockPattern& pattern, std::int64_t row, std::int64_t wanted, std::uint64_t seed) {
  std::vector<std::int64_t> free;
  for (std::int64_t column = 0; column < pattern.columns; ++column) {
    if (!pattern.at(row, column)) free.push_back(column);
  }
  const std::int64_t picks = std::min<std::int64_t>(wanted, std::ssize(free));
  for (std::int64_t i = 0; i < picks; ++i) {
    const unsigned word = philox4x32<10>(static_cast<unsigned>(i), static_cast<unsigned>(row), 0, 0,
                                         static_cast<unsigned>(seed), static_cast<unsigned>(seed >> 32))
                              .word[0];
    const std::uint64_t left = free.size() - i;
    std::swap(free[i], free[i + static_cast<std::int64_t>(word * left >> 32)]);
    pattern.blocks[row * pattern.columns + free[i]] = 1;
  }
}

void check_block(BlockSize block) {
  check_at_least("the block's number of queries", block.q, 1);
  check_at_least("the block's number of keys", block.kv, 1);
}

}  // namespace

double BlockPattern::density() const {
  if (blocks.empty()) return 0;
  const auto zeros = std::count(blocks.begin(), blocks.end(), 0);
  return 1 - static_cast<double>(zeros) / static_cast<double>(blocks.size());
}

BlockPattern empty_pattern(std::int64_t seqlen_q, std::int64_t seqlen_kv, BlockSize block) {
  check_at_least("seqlen_q", seqlen_q, 0);
  check_at_least("seqlen_kv", seqlen_kv, 0);
  check_block(block);
  return blank(seqlen_q / block.q + (seqlen_q % block.q != 0),
               seqlen_kv / block.kv + (seqlen_kv % block.kv != 0));
}

BlockPattern butterfly(std::int64_t rows, std::int64_t columns) {
  return pattern_of(rows, columns, [](std::int64_t row, std::int64_t column) {
    return std::popcount(static_cast<std::uint64_t>(row ^ column)) <= 1;
  });
}

BlockPattern local_window(std::int64_t rows, std::int64_t columns, std::int64_t radius) {
  check_at_least("radius", radius, 0);
  return pattern_of(rows, columns,
                    [=](std::int64_t row, std::int64_t column) { return std::abs(row - column) <= radius; });
}

BlockPattern strided(std::int64_t rows, std::int64_t columns, std::int64_t stride) {
  check_at_least("stride", stride, 1);
  return pattern_of(rows, columns, [=](std::int64_t row, std::int64_t column) {
    return std::abs(row - column) < stride || (row - column) % stride == 0;
  });
}

BlockPattern local_global(std::int64_t rows, std::int64_t columns, std::int64_t radius, std::int64_t global) {
  check_at_least("radius", radius, 0);
  check_at_least("global", global, 0);
  return pattern_of(rows, columns, [=](std::int64_t row, std::int64_t column) {
    return row < global || column < global || std::abs(row - column) <= radius;
  });
}

BlockPattern big_bird(std::int64_t rows, std::int64_t columns, std::int64_t radius, std::int64_t global,
                      std::int64_t random, std::uint64_t seed) {
  check_at_least("random", random, 0);
  BlockPattern pattern = local_global(rows, columns, radius, global);
  for (std::int64_t row = 0; row < rows; ++row) add_random_blocks(pattern, row, random, seed);
  return pattern;
}

BlockPattern from_dense_mask(const std::vector<std::uint8_t>& mask, std::int64_t seqlen_q,
                             std::int64_t seqlen_kv, BlockSize block) {
  BlockPattern pattern = empty_pattern(seqlen_q, seqlen_kv, block);
  const auto size = static_cast<std::int64_t>(mask.size());
  const bool matches =
      seqlen_q == 0 || seqlen_kv == 0 ? size == 0 : size % seqlen_q == 0 && size / seqlen_q == seqlen_kv;
  if (!matches) {
    refuse("the dense mask has {} elements; seqlen_q {} x seqlen_kv {} are needed", size, seqlen_q,
           seqlen_kv);
  }
  for (std::int64_t q = 0; q < seqlen_q; ++q) {
    for (std::int64_t kv = 0; kv < seqlen_kv; ++kv) {
      if (mask[q * seqlen_kv + kv]) pattern.blocks[q / block.q * pattern.columns + kv / block.kv] = 1;
    }
  }
  return pattern;
}

}  // namespace flashjit
