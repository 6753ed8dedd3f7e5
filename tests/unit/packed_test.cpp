#include "templates/common/packed.cuh"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <vector>

namespace flashjit {
namespace {

constexpr int kLeast = std::numeric_limits<int>::min(), kMost = std::numeric_limits<int>::max();

TEST(PackedRows, ThoseOfRightOffsetsAreTheSequence) {
  for (int begin = 0; begin <= 9; ++begin) {
    for (int end = begin; end <= 9; ++end) {
      const PackedRows rows = packed_rows(begin, end, 9, 9);
      EXPECT_EQ(rows.first, begin);
      EXPECT_EQ(rows.count, end - begin);
    }
  }
}

TEST(PackedRows, AreRowsOfTheTensorWhateverTheOffsets) {
  const std::vector<int> offsets{kLeast, kLeast + 1, -1000, -1, 0, 1, 5, 6, 7, 8, kMost - 1, kMost};
  for (const int rows : {0, 1, 7, kMost}) {
    for (const int longest : {0, 1, 6, 7, 100, kMost}) {
      for (const int begin : offsets) {
        for (const int end : offsets) {
          const PackedRows got = packed_rows(begin, end, rows, longest);
          SCOPED_TRACE(testing::Message() << begin << " to " << end << " of " << rows << ", " << longest);
          EXPECT_GE(got.first, 0);
          EXPECT_GE(got.count, 0);
          EXPECT_LE(got.count, longest);
          EXPECT_LE(std::int64_t{got.first} + got.count, rows);
        }
      }
    }
  }
}

TEST(PackedRows, AreCutAndNotMoved) {
  const auto expect = [](int begin, int end, int first, int count) {
    const PackedRows got = packed_rows(begin, end, 100, 60);
    EXPECT_EQ(got.first, first);
    EXPECT_EQ(got.count, count);
  };
  expect(-20, 30, 0, 30);
  expect(90, 120, 90, 10);
  expect(10, 90, 10, 60);
  expect(50, 40, 50, 0);
  expect(kMost, kLeast, 100, 0);
  expect(kLeast, kMost, 0, 60);
}

}  // namespace
}  // namespace flashjit
