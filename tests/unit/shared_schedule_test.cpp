// Every pair that attends is in one call of one rank, and no other is in any.
#include "api/shared_schedule.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

namespace flashjit {
namespace {

/// The position of a rank's row in the whole sequence, as the header says it.
std::int64_t position(const SharedSequence& s, int rank, int ranks, std::int64_t row) {
  if (s.layout == ShardLayout::contiguous) return rank * s.rows + row;
  const std::int64_t half = s.rows / 2;
  return row < half ? rank * half + row : (2 * ranks - 1 - rank) * half + row - half;
}

bool attends(const SharedSequence& s, std::int64_t q, std::int64_t kv) {
  const auto document = [&](std::int64_t at) {
    return std::ranges::upper_bound(s.documents, at) - s.documents.begin();
  };
  if (!s.documents.empty() && document(q) != document(kv)) return false;
  return s.spec.mask.empty() || (kv <= q && (s.window == 0 || q - kv < s.window));
}

bool mask_shows(const SharedSequence& s, const SharedCall& call, const RowChunk& rows, std::int64_t i,
                std::int64_t j) {
  const std::int64_t distance = rows.first + i - (call.keys.first + j);
  switch (call.mask) {
    case CallMask::none:
      return true;
    case CallMask::causal:
      return j - call.keys.count <= i - rows.count;
    case CallMask::program:  // the sequence's
      return distance >= 0 && (s.window == 0 || distance < s.window);
  }
  return false;
}

void check(const SharedSequence& s, int ranks) {
  std::map<std::pair<std::int64_t, std::int64_t>, int> found;
  for (int rank = 0; rank < ranks; ++rank) {
    const auto segments = segments_of(s, rank, ranks);
    std::vector<int> firsts(segments.size());
    for (int owner = 0; owner < ranks; ++owner)
      for (const SharedCall& call : calls_with(s, rank, owner, ranks)) {
        const RowChunk& rows = segments.at(call.segment);
        if (call.first) ++firsts[call.segment];
        for (std::int64_t i = 0; i < rows.count; ++i)
          for (std::int64_t j = 0; j < call.keys.count; ++j)
            if (mask_shows(s, call, rows, i, j))
              ++found[{position(s, rank, ranks, rows.begin + i),
                       position(s, owner, ranks, call.keys.begin + j)}];
      }
    EXPECT_EQ(firsts, std::vector<int>(segments.size(), 1));
  }
  for (std::int64_t q = 0; q < s.rows * ranks; ++q)
    for (std::int64_t kv = 0; kv < s.rows * ranks; ++kv)
      ASSERT_EQ((found[{q, kv}]), attends(s, q, kv))
          << q << ", " << kv << " of " << ranks << " ranks, window " << s.window;
}

TEST(SharedSchedule, HasEachPairOnce) {
  for (const int ranks : {1, 2, 3, 5})
    for (const ShardLayout layout : {ShardLayout::contiguous, ShardLayout::zigzag})
      for (const bool masked : {false, true})
        for (const std::int64_t window : {0, 1, 7, 20})
          for (const bool dropout : {false, true})
            for (const bool documents : {false, true}) {
              if (window > 0 && !masked) continue;
              SharedSequence s{.spec = {.head_dim = 64, .dropout = dropout},
                               .rows = 12,
                               .layout = layout,
                               .window = window};
              if (masked) s.spec.mask = causal();
              if (documents) s.documents = {0, 5, 5, 12 * ranks / 2 + 1, 12 * ranks};
              check(s, ranks);
            }
}

TEST(SharedSchedule, JoinsWhatIsSeenAsAWhole) {
  const SharedSequence s{.spec = {.head_dim = 64, .mask = causal()}, .rows = 8};
  EXPECT_EQ(calls_with(s, 0, 0, 2), (std::vector<SharedCall>{{0, {0, 4, 0}, CallMask::causal, true},
                                                             {1, {0, 8, 0}, CallMask::causal, true}}));
  EXPECT_EQ(calls_with(s, 0, 1, 2), (std::vector<SharedCall>{{1, {0, 8, 4}, CallMask::none}}));
  EXPECT_EQ(calls_with(s, 1, 0, 2),
            (std::vector<SharedCall>{{0, {0, 4, 0}, CallMask::none}, {1, {0, 4, 0}, CallMask::none}}));
}

}  // namespace
}  // namespace flashjit
