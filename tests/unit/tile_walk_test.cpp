// Which tiles kernels visit (templates/common/tile_walk.cuh, kv_work_tile.cuh, split.cuh), by the kernels'
// own code on the host: every pair that attends is visited once, and tiles without such pairs are not.
#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <set>
#include <tuple>
#include <vector>

#include "tests/support/kernel_headers.hpp"

namespace flashjit {
namespace {

using test::Causal;
using test::NoMask;
using test::Scattered;
using test::TileProblem;
using test::Window;

constexpr int kLengths[] = {1, 63, 64, 65, 130, 200, 321};

Params params_of(int batch, int heads_q, int heads_kv, int seqlen_q, int seqlen_kv, int splits = 1) {
  Params p = {};
  p.batch = batch, p.heads_q = heads_q, p.heads_kv = heads_kv;
  p.seqlen_q = seqlen_q, p.seqlen_kv = seqlen_kv;
  p.num_splits = splits;
  return p;
}

template <class P>
bool any_attends(const typename P::Head& head, Range q, Range kv) {
  return P::classify_tile({}, head, q, kv, nullptr, nullptr) != TileClass::empty;
}
template <class P>
bool all_attend(const typename P::Head& head, Range q, Range kv) {
  return P::classify_tile({}, head, q, kv, nullptr, nullptr) == TileClass::full;
}

/// Lists as the tile_lists entry makes them, pair by pair: rows are Q tiles, backward KV tiles.
template <class P>
struct Lists {
  std::vector<int> count, entries, rank;

  explicit Lists(Params& p) {
    if constexpr (P::kTileLists) {
      const int rows = P::kBackward ? kv_tiles<P>(p) : q_tiles<P>(p);
      const int columns = P::kBackward ? q_tiles<P>(p) : kv_tiles<P>(p);
      count.assign(p.heads_q * rows, 0);
      entries.assign(p.heads_q * rows * columns, -1), rank = entries;
      for (int h = 0; h < p.heads_q; ++h)
        for (int column = 0; column < columns; ++column)
          for (int row = rows - 1, before = 0; row >= 0; --row) {
            const int q_tile = P::kBackward ? column : row, kv_tile = P::kBackward ? row : column;
            const Range q = tile_range(q_tile, P::kBr, p.seqlen_q),
                        kv = tile_range(kv_tile, P::kBc, p.seqlen_kv);
            const auto head = P::head(p, 0, h, p.seqlen_q, p.seqlen_kv);
            if (!any_attends<P>(head, q, kv)) continue;
            const int list = h * rows + row;
            entries[list * columns + count[list]++] = column * 2 + all_attend<P>(head, q, kv);
            rank[list * columns + column] = before++;  // the last KV tile adds first
          }
      p.lists.count = count.data(), p.lists.entries = entries.data(), p.lists.rank = rank.data();
    }
  }
};

// --- forward ---------------------------------------------------------------------------------------------

template <class P>
class ForwardWalk : public testing::Test {};
using ForwardProblems =
    testing::Types<TileProblem<NoMask, 64, 64>, TileProblem<Causal, 64, 48>, TileProblem<Causal, 128, 64>,
                   TileProblem<Window<70>, 64, 64>, TileProblem<Scattered, 64, 32>,
                   TileProblem<NoMask, 64, 32, false, true>, TileProblem<Causal, 64, 32, false, true>,
                   TileProblem<Scattered, 64, 32, false, true>>;
TYPED_TEST_SUITE(ForwardWalk, ForwardProblems);

TYPED_TEST(ForwardWalk, VisitsTheTilesThatHaveAttendingPairsOnce) {
  using P = TypeParam;
  for (const int seqlen_q : kLengths)
    for (const int seqlen_kv : kLengths)
      for (const int splits : {1, 2, 5, 32}) {
        if (!P::kSplit && splits > 1) continue;
        Params p = params_of(1, 2, 1, seqlen_q, seqlen_kv, splits);
        const Lists<P> lists(p);
        const Sequence<P> sequence(p, 0);
        for (int h = 0; h < p.heads_q; ++h)
          for (int q_tile = 0; q_tile < q_tiles<P>(p); ++q_tile) {
            const auto head = sequence.head(p, h);
            const Range q = tile_range(q_tile, P::kBr, seqlen_q);
            std::vector<int> visits(kv_tiles<P>(p));
            for (int split = 0; split < splits; ++split) {
              KvTiles<P> tiles(p, head, q_tile, q, sequence.seqused_kv(p));
              if constexpr (P::kSplit) tiles.keep_split(p, split);
              for (int i = 0; i < tiles.count; ++i) {
                ASSERT_GE(tiles.tile(i), 0);
                ASSERT_LT(tiles.tile(i), kv_tiles<P>(p));
                if (i > 0) {
                  ASSERT_LT(tiles.tile(i - 1), tiles.tile(i)) << "tiles ascend";
                }
                ++visits[tiles.tile(i)];
                const Range kv = tile_range(tiles.tile(i), P::kBc, seqlen_kv);
                ASSERT_EQ(tiles.full(p, head, q, tiles.entry(i)), all_attend<P>(head, q, kv));
              }
            }
            for (int kv_tile = 0; kv_tile < kv_tiles<P>(p); ++kv_tile)
              ASSERT_EQ(visits[kv_tile], any_attends<P>(head, q, tile_range(kv_tile, P::kBc, seqlen_kv)))
                  << seqlen_q << " x " << seqlen_kv << ", Q tile " << q_tile << ", KV tile " << kv_tile;
          }
      }
}

TEST(ForwardWalk, EndsAtTheKeysInUse) {
  using P = TileProblem<NoMask, 64, 64>;
  const Params p = params_of(1, 1, 1, 64, 320);
  const auto head = Sequence<P>(p, 0).head(p, 0);
  for (int used = 0; used <= 320; ++used)
    EXPECT_EQ(KvTiles<P>(p, head, 0, {0, 64}, used).count, (used + 63) / 64) << used;
}

// --- backward --------------------------------------------------------------------------------------------

template <class P>
class BackwardWalk : public testing::Test {};
using BackwardProblems =
    testing::Types<TileProblem<NoMask, 64, 64, true>, TileProblem<Causal, 64, 48, true>,
                   TileProblem<Causal, 64, 128, true>, TileProblem<Window<70>, 32, 64, true>,
                   TileProblem<Scattered, 32, 64, true>, TileProblem<NoMask, 32, 64, true, true>,
                   TileProblem<Causal, 32, 64, true, true>, TileProblem<Scattered, 32, 64, true, true>,
                   TileProblem<NoMask, 64, 64, true, false, true>,
                   TileProblem<Scattered, 32, 64, true, false, true>>;
TYPED_TEST_SUITE(BackwardWalk, BackwardProblems);

TYPED_TEST(BackwardWalk, VisitsTheTilesThatHaveAttendingPairsOnce) {
  using P = TypeParam;
  for (const int seqlen_q : kLengths)
    for (const int seqlen_kv : kLengths)
      for (const int splits : {1, 3}) {
        if (!P::kSplit && splits > 1) continue;
        Params p = params_of(1, 4, 2, seqlen_q, seqlen_kv, splits);
        p.lpt_heads = 2;
        const Lists<P> lists(p);
        const Sequence<P> sequence(p, 0);
        // By head, Q tile and KV tile; and of ordered additions the order, in which the work tiles come, too.
        std::map<std::tuple<int, int, int>, int> visits;
        std::map<std::pair<int, int>, int> additions;
        for (unsigned number = 0; number < kv_work_tiles<P>(p); ++number) {
          const KvWorkTile<P> work(p, number);
          const Range kv = tile_range(work.kv_tile, P::kBc, seqlen_kv);
          QWalk<P> walk(p, sequence, work);
          for (StagedTile now = walk.next(p, sequence); now.head >= 0; now = walk.next(p, sequence)) {
            ASSERT_EQ(now.head / p.qhead_per_kvhead(), work.h_kv);
            ++visits[{now.head, now.tile, work.kv_tile}];
            const Range q = tile_range(now.tile, P::kBr, seqlen_q);
            ASSERT_EQ(now.full != 0, all_attend<P>(sequence.head(p, now.head), q, kv));
            // Else a CTA would wait for an addition that comes after its own, or never.
            if constexpr (P::kDeterministic) {
              ASSERT_EQ(now.dq_order, (additions[{now.head, now.tile}]++));
            }
          }
        }
        for (int h = 0; h < p.heads_q; ++h)
          for (int q_tile = 0; q_tile < q_tiles<P>(p); ++q_tile)
            for (int kv_tile = 0; kv_tile < kv_tiles<P>(p); ++kv_tile) {
              const bool met = any_attends<P>(sequence.head(p, h), tile_range(q_tile, P::kBr, seqlen_q),
                                              tile_range(kv_tile, P::kBc, seqlen_kv));
              ASSERT_EQ((visits[{h, q_tile, kv_tile}]), met)
                  << seqlen_q << " x " << seqlen_kv << ", head " << h << ", Q tile " << q_tile << ", KV tile "
                  << kv_tile;
            }
      }
}

/// In a cluster each CTA walks with keys of its own: `full` is of these, and all CTAs visit the same Q tiles.
TEST(BackwardWalk, CtasOfAClusterVisitTheSameQTiles) {
  using P = TileProblem<Causal, 64, 256, true>;
  for (const int seqlen : {130, 256, 300, 700}) {
    const Params p = params_of(1, 1, 1, seqlen, seqlen);
    const Sequence<P> sequence(p, 0);
    for (unsigned number = 0; number < kv_work_tiles<P>(p); ++number) {
      const KvWorkTile<P> work(p, number);
      const int begin = work.kv_tile * P::kBc;
      QWalk<P> first(p, sequence, work, {0, 128}), second(p, sequence, work, {128, 128});
      for (StagedTile a = first.next(p, sequence), b = second.next(p, sequence); a.head >= 0 || b.head >= 0;
           a = first.next(p, sequence), b = second.next(p, sequence)) {
        ASSERT_EQ(a.head, b.head);
        ASSERT_EQ(a.tile, b.tile);
        const Range q = tile_range(a.tile, P::kBr, seqlen);
        const auto full = [&](int from) {
          return all_attend<P>(sequence.head(p, 0), q, {min(from, seqlen), min(from + 128, seqlen)});
        };
        ASSERT_EQ(a.full != 0, full(begin));
        if (begin + 128 < seqlen) {
          ASSERT_EQ(b.full != 0, full(begin + 128));
        }
      }
    }
  }
}

// --- work tiles ------------------------------------------------------------------------------------------

template <class P>
std::vector<KvWorkTile<P>> work_tiles(const Params& p) {
  std::vector<KvWorkTile<P>> all;
  for (unsigned number = 0; number < kv_work_tiles<P>(p); ++number) all.emplace_back(p, number);
  return all;
}

template <class P>
void expect_each_once(const Params& p) {
  std::set<std::tuple<int, int, int, int>> seen;
  for (const KvWorkTile<P>& work : work_tiles<P>(p)) {
    EXPECT_TRUE(work.b < p.batch && work.h_kv < p.heads_kv && work.kv_tile < kv_tiles<P>(p) &&
                work.split < num_splits<P>(p) &&
                seen.emplace(work.b, work.h_kv, work.kv_tile, work.split).second)
        << work.b << " " << work.h_kv << " " << work.kv_tile << " " << work.split;
  }
  EXPECT_EQ(seen.size(), std::size_t(p.batch) * p.heads_kv * kv_tiles<P>(p) * num_splits<P>(p));
}

TEST(KvWorkTiles, ComeOnceEach) {
  for (const int seqlen : kLengths)
    for (const int batch : {1, 3})
      for (const int heads : {1, 2, 5})
        for (const int splits : {1, 2, 7})
          for (int lpt_heads = 1; lpt_heads <= batch * heads; ++lpt_heads) {
            Params p = params_of(batch, heads, heads, seqlen, seqlen, splits);
            p.lpt_heads = lpt_heads;
            expect_each_once<TileProblem<NoMask, 64, 32, true>>(p);
            expect_each_once<TileProblem<NoMask, 64, 32, true, true>>(p);
            expect_each_once<TileProblem<Causal, 64, 32, true>>(p);
            expect_each_once<TileProblem<Causal, 64, 32, true, true>>(p);
            expect_each_once<TileProblem<NoMask, 64, 32, true, false, true>>(p);
          }
}

/// The longest tiles of the last heads come before any shorter one of them; other heads follow each other.
TEST(KvWorkTiles, OfTheLastHeadsComeLongestFirst) {
  using P = TileProblem<Causal, 64, 64, true>;
  Params p = params_of(2, 4, 4, 640, 640);
  p.lpt_heads = 3;
  const std::vector<KvWorkTile<P>> all = work_tiles<P>(p);
  const std::size_t first = std::size_t{5} * 10;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const int head = all[i].b * 4 + all[i].h_kv;
    EXPECT_EQ(head >= 5, i >= first);
    if (i + 1 < all.size() && i >= first) {
      EXPECT_LE(all[i].kv_tile, all[i + 1].kv_tile);
    }
    if (i < first) {
      EXPECT_EQ(head, static_cast<int>(i) / 10);
    }
  }
}

TEST(Splits, CoverWhatATileMeets) {
  using P = TileProblem<NoMask, 64, 64, false, true>;
  for (int splits = 1; splits <= kMaxQuerySplits; ++splits)
    for (const int count : {0, 1, 2, 31, 32, 33, 1000, 1 << 24}) {
      const Params p = params_of(1, 1, 1, 64, 64, splits);
      EXPECT_EQ(split_begin<P>(p, 0, count), 0);
      EXPECT_EQ(split_begin<P>(p, splits, count), count);
      for (int split = 0; split < splits; ++split) {
        const int size = split_begin<P>(p, split + 1, count) - split_begin<P>(p, split, count);
        EXPECT_GE(size, count / splits);
        EXPECT_LE(size, count / splits + 1);
      }
    }
}

}  // namespace
}  // namespace flashjit
