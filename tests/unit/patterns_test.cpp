#include "flashjit/patterns.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "flashjit/error.hpp"

namespace flashjit {
namespace {

using Rows = std::vector<std::string>;

/// A pattern as a picture: '#' attends.
Rows picture(const BlockPattern& pattern) {
  Rows rows(pattern.rows);
  for (std::int64_t r = 0; r < pattern.rows; ++r) {
    for (std::int64_t c = 0; c < pattern.columns; ++c) rows[r] += pattern.at(r, c) ? '#' : '.';
  }
  return rows;
}

std::int64_t count_row(const BlockPattern& pattern, std::int64_t row) {
  const auto begin = pattern.blocks.begin() + row * pattern.columns;
  return std::count(begin, begin + pattern.columns, 1);
}

template <class Call>
void expect_refusal(Call call, const std::string& part) {
  try {
    call();
    FAIL() << "accepted; a refusal with '" << part << "' was expected";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_NE(error.message().find(part), std::string::npos) << error.message();
  }
}

TEST(Patterns, ButterflyJoinsBlocksThatDifferInOneBit) {
  EXPECT_EQ(picture(butterfly(8, 8)), (Rows{"###.#...", "##.#.#..", "#.##..#.", ".###...#",  //
                                            "#...###.", ".#..##.#", "..#.#.##", "...#.###"}));
  EXPECT_DOUBLE_EQ(butterfly(64, 64).density(), 7.0 / 64);
  EXPECT_EQ(picture(butterfly(2, 5)), (Rows{"###.#", "##.#."}));
}

TEST(Patterns, LocalWindowKeepsTheRadius) {
  EXPECT_EQ(picture(local_window(4, 5, 1)), (Rows{"##...", "###..", ".###.", "..###"}));
  EXPECT_EQ(picture(local_window(3, 3, 0)), (Rows{"#..", ".#.", "..#"}));
  EXPECT_DOUBLE_EQ(local_window(3, 3, 100).density(), 1.0);
}

TEST(Patterns, StridedKeepsTheLastBlocksAndEveryStrideth) {
  EXPECT_EQ(picture(strided(7, 7, 3)),
            (Rows{"####..#", "#####..", "######.", "#######", ".######", "..#####", "#..####"}));
  EXPECT_DOUBLE_EQ(strided(5, 5, 1).density(), 1.0);
}

TEST(Patterns, LocalGlobalAddsRowsAndColumns) {
  EXPECT_EQ(picture(local_global(5, 5, 1, 1)), (Rows{"#####", "###..", "####.", "#.###", "#..##"}));
  EXPECT_EQ(local_global(6, 6, 2, 0), local_window(6, 6, 2));
}

TEST(Patterns, BigBirdAddsExactlyTheRandomBlocks) {
  const BlockPattern base = local_global(40, 40, 1, 2), pattern = big_bird(40, 40, 1, 2, 3, 7);
  for (std::int64_t row = 0; row < 40; ++row) {
    EXPECT_EQ(count_row(pattern, row), std::min<std::int64_t>(40, count_row(base, row) + 3)) << "row " << row;
  }
  for (std::size_t i = 0; i < base.blocks.size(); ++i) EXPECT_GE(pattern.blocks[i], base.blocks[i]);
  EXPECT_EQ(pattern, big_bird(40, 40, 1, 2, 3, 7));
  EXPECT_NE(pattern, big_bird(40, 40, 1, 2, 3, 8));
  EXPECT_NE(pattern, big_bird(40, 40, 1, 2, 3, 7 + (std::uint64_t{1} << 40)));
  EXPECT_DOUBLE_EQ(big_bird(6, 6, 0, 0, 100, 1).density(), 1.0);
  EXPECT_EQ(big_bird(6, 6, 1, 1, 0, 1), local_global(6, 6, 1, 1));
}

TEST(Patterns, BigBirdDrawsEveryColumnEquallyOften) {
  std::vector<std::int64_t> drawn(16, 0);
  constexpr std::int64_t kRows = 8000;
  const BlockPattern pattern = big_bird(kRows + 16, 16, 0, 0, 4, 3);
  for (std::int64_t row = 16; row < pattern.rows; ++row) {
    for (std::int64_t column = 0; column < 16; ++column) drawn[column] += pattern.at(row, column);
  }
  // Binomial with mean 2000 and standard deviation 38.7: five of them.
  for (const std::int64_t count : drawn) EXPECT_NEAR(count, 2000, 194);
}

TEST(Patterns, FromDenseMaskKeepsABlockWithAnyPair) {
  std::vector<std::uint8_t> mask(5 * 7, 0);
  mask[0 * 7 + 6] = 1;
  mask[4 * 7 + 2] = 255;
  EXPECT_EQ(picture(from_dense_mask(mask, 5, 7, {2, 3})), (Rows{"..#", "...", "#.."}));
  EXPECT_EQ(picture(from_dense_mask(mask, 5, 7, {16, 16})), Rows{"#"});
  EXPECT_EQ(from_dense_mask({}, 0, 7, {16, 16}).rows, 0);
}

TEST(Patterns, EmptyPatternHasTheMapsSizes) {
  const BlockPattern pattern = empty_pattern(129, 128, {128, 64});
  EXPECT_EQ(pattern.rows, 2);
  EXPECT_EQ(pattern.columns, 2);
  EXPECT_EQ(pattern.density(), 0);
  EXPECT_EQ(empty_pattern(0, 5, {16, 16}).density(), 0);
}

TEST(Patterns, RefuseWhatMakesNoPattern) {
  expect_refusal([] { butterfly(-1, 4); }, "rows is -1");
  expect_refusal([] { butterfly(4, -2); }, "columns is -2");
  expect_refusal([] { butterfly(1 << 20, 1 << 20); }, "too large");
  expect_refusal([] { local_window(4, 4, -1); }, "radius is -1");
  expect_refusal([] { strided(4, 4, 0); }, "stride is 0");
  expect_refusal([] { local_global(4, 4, 1, -1); }, "global is -1");
  expect_refusal([] { big_bird(4, 4, 1, 1, -5, 0); }, "random is -5");
  expect_refusal([] { empty_pattern(4, 4, {0, 16}); }, "number of queries is 0");
  expect_refusal([] { empty_pattern(-4, 4, {16, 16}); }, "seqlen_q is -4");
  expect_refusal([] { from_dense_mask(std::vector<std::uint8_t>(10), 3, 4, {16, 16}); }, "10 elements");
}

}  // namespace
}  // namespace flashjit
