// The tile schedulers of the forward pass (templates/tma/tile_scheduler.cuh), by the kernel's own code on the
// host: every row and split is computed once, whatever the grid.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "tests/support/kernel_headers.hpp"
// After what it needs.
#include "flashjit/tma/fixed_parts.cuh"

namespace flashjit_emulator {

uint3 now_block, now_grid;  // a kernel's blockIdx and gridDim
const uint3& block_index() { return now_block; }
const uint3& grid_size() { return now_grid; }
void reach_atomic() {}

}  // namespace flashjit_emulator

namespace flashjit::tma {
namespace {

using test::Causal;
using test::NoMask;
using test::Scattered;
using test::TileProblem;
using test::Window;

template <class Mask, int br, int slots = 1, bool split = false, bool pack_gqa = false>
struct Scheduled : TileProblem<Mask, br, 64, false, split> {
  static constexpr int kQTilesPerCta = slots;
  static constexpr bool kTmaStoresO = false, kPackGqa = pack_gqa, kStreamK = false, kQTilesAsHeads = false,
                        kCascade = false;
  static constexpr bool kSplitTailWave = !Mask::kHasMask && !split && (br > 64), kCountsTiles = false;
  static constexpr int kHeadDim = 64, kHeadDimV = 64;
};

/// Calls visit(coord) for the work tiles that the CTAs of a grid take.
template <class P>
void run_grid(const Params& p, unsigned ctas, unsigned cluster, const auto& visit) {
  flashjit_emulator::now_grid = {ctas, 1, 1};
  std::vector<unsigned> waves(ctas * kQTilesPerCta<P>);
  for (bool more = true; more;) {
    more = false;
    for (unsigned cta = 0; cta < ctas; ++cta)
      for (int slot = 0; slot < kQTilesPerCta<P>; ++slot) {
        flashjit_emulator::now_block = {cta, 0, 0};
        const TileScheduler<P> scheduler(p, slot, cluster);
        unsigned& wave = waves[cta * kQTilesPerCta<P> + slot];
        TileCoord coord;
        if (wave == ~0u) continue;
        ASSERT_LT(wave, 10000u) << "the work has no end";
        if (scheduler.next(p, wave++, coord)) {
          visit(coord);
          more = true;
        } else {
          wave = ~0u;
        }
      }
  }
}

template <class P>
void expect_each_once(Params p, unsigned ctas, unsigned cluster) {
  int counter = 0;
  p.semaphores = &counter;
  std::map<std::tuple<unsigned, unsigned, int, int>, int> visits;
  run_grid<P>(p, ctas, cluster, [&](const TileCoord& coord) {
    ASSERT_LT(coord.warpgroups.begin, coord.warpgroups.end);
    for (int wg = coord.warpgroups.begin; wg < coord.warpgroups.end; ++wg)
      ++visits[{coord.batch_head, coord.q_tile, wg, coord.split}];
  });
  for (const auto& [key, times] : visits) ASSERT_EQ(times, 1);
  ASSERT_EQ(visits.size(), std::size_t(p.batch) * scheduled_heads<P>(p) * q_tiles_per_head<P>(p) *
                               (P::kBr / kWarpgroupRows) * num_splits<P>(p))
      << ctas << " CTAs, clusters of " << cluster << ", " << p.batch << " x " << p.heads_q << " heads of "
      << p.seqlen_q;
}

template <class P>
class ForwardSchedule : public testing::Test {};
using Problems =
    testing::Types<Scheduled<NoMask, 128>, Scheduled<NoMask, 192>, Scheduled<NoMask, 64>,
                   Scheduled<NoMask, 128, 2>, Scheduled<Causal, 128>, Scheduled<Causal, 128, 2>,
                   Scheduled<Window<100>, 192>, Scheduled<Scattered, 128>, Scheduled<NoMask, 64, 1, true>,
                   Scheduled<Causal, 64, 1, true>, Scheduled<NoMask, 64, 1, true, true>>;
TYPED_TEST_SUITE(ForwardSchedule, Problems);

TYPED_TEST(ForwardSchedule, GivesEachRowAndSplitOnce) {
  using P = TypeParam;
  for (const int seqlen : {1, 64, 100, 640, 1000})
    for (const int heads : {1, 3, 8})
      for (const unsigned ctas : {1u, 2u, 6u, 24u, 132u})
        for (const unsigned cluster : {1u, 2u}) {
          if (ctas % cluster != 0 || (cluster == 2 && !P::kHasMask)) continue;
          Params p = {};
          p.batch = 2, p.heads_q = heads, p.heads_kv = 1, p.seqlen_q = p.seqlen_kv = seqlen;
          p.num_splits = 3;
          p.packed = {.heads = min(heads, 4),
                      .sets = (heads + 3) / 4,
                      .queries = 64 / min(heads, 4),
                      .inverse = 0,
                      .shared = heads};
          expect_each_once<P>(p, ctas, cluster);
        }
}

/// A grid with more slots than tiles computes them in one wave, whole.
TEST(ForwardSchedule, DoesNotSplitASingleWave) {
  using P = Scheduled<NoMask, 192>;
  Params p = {};
  p.batch = 1, p.heads_q = p.heads_kv = 4, p.seqlen_q = p.seqlen_kv = 192 * 8;
  run_grid<P>(p, 40, 1, [](const TileCoord& coord) { EXPECT_EQ(coord.warpgroups.end, 3); });
}

/// In the tail wave a Q tile is split by warpgroups, so that no slot gets more than the others' segment.
TEST(ForwardSchedule, SplitsTheTailWaveAmongIdleCtas) {
  using P = Scheduled<NoMask, 192>;
  Params p = {};
  p.batch = 1, p.heads_q = p.heads_kv = 1, p.seqlen_q = p.seqlen_kv = 192 * 11;
  int whole = 0, split = 0;
  run_grid<P>(p, 8, 1, [&](const TileCoord& coord) {
    (coord.warpgroups.end - coord.warpgroups.begin == 3 ? whole : split)++;
  });
  EXPECT_EQ(whole, 8);
  EXPECT_EQ(split, 3 * 2) << "three tiles on eight CTAs are two splits each";
}

/// A work tile says of which warpgroups the first step may be over half a KV tile: no row of those attends to
/// a key behind it.
TEST(ForwardSchedule, PartialFirstStepsMissNoKey) {
  using P = Scheduled<Causal, 128>;
  static_assert(kPartialFirstStep<P>);
  bool some = false;
  for (const int seqlen_q : {64, 100, 128, 300})
    for (int seqlen_kv = 1; seqlen_kv < 400; seqlen_kv += 13) {
      Params p = {};
      p.batch = 1, p.heads_q = p.heads_kv = 1, p.seqlen_q = seqlen_q, p.seqlen_kv = seqlen_kv;
      for (unsigned q_tile = 0; q_tile < q_tiles_per_head<P>(p); ++q_tile) {
        const WorkTile<P> work(p, {0, q_tile, {0, 2}, 0, {}});
        if (work.count() == 0) continue;
        const int end = work.kv_begin(work.count() - 1) + kPartialKvTile<P>;
        const auto head = work.sequence.head(p, 0);
        for (int wg = 0; wg < 2; ++wg) {
          if ((work.partial >> wg & 1) == 0) continue;
          some = true;
          const int begin = work.q_begin + wg * kWarpgroupRows;
          for (int q = begin; q < min(begin + kWarpgroupRows, seqlen_q); ++q)
            for (int kv = end; kv < seqlen_kv; ++kv) ASSERT_FALSE(Causal::attends(head, q, kv));
        }
      }
    }
  EXPECT_TRUE(some);
}

// --- stream-K --------------------------------------------------------------------------------------------

template <class Mask, int br, bool pack_gqa>
struct SharedOut : Scheduled<Mask, br, 1, true, pack_gqa> {
  static constexpr bool kStreamK = true, kCache = true, kVarlen = true;
};

struct QTilesAsHeads : SharedOut<NoMask, 64, false> {
  static constexpr bool kQTilesAsHeads = true, kVarlen = false;
};

/// Sequences of a cache: queries and keys of each.
struct Lengths {
  std::vector<int> queries, keys;
};

std::vector<int> offsets_of(const std::vector<int>& queries) {
  std::vector<int> offsets{0};
  for (const int count : queries) offsets.push_back(offsets.back() + count);
  return offsets;
}
/// Parameters of packed queries, which point to `lengths` and `offsets`.
template <class P>
Params params_of(const Lengths& lengths, const std::vector<int>& offsets, int segments, int heads_q,
                 int heads_kv, int lanes) {
  Params p = {};
  p.batch = static_cast<int>(lengths.keys.size()), p.heads_q = heads_q, p.heads_kv = heads_kv;
  p.seqlen_q = *std::ranges::max_element(lengths.queries);
  p.seqlen_kv = *std::ranges::max_element(lengths.keys);
  p.rows_q = offsets.back(), p.cu_seqlens_q = offsets.data(), p.kv_lengths = lengths.keys.data();
  p.num_splits = segments, p.head_groups = lanes;
  if (P::kPackGqa) {
    const int shared = heads_q / heads_kv;
    p.packed = {.heads = shared,
                .sets = 1,
                .queries = 64 / shared,
                .inverse = static_cast<unsigned>(((1 << 16) + shared - 1) / shared),
                .shared = shared};
  }
  return p;
}

/// What find_segment() finds.
template <class P>
SegmentStart start_of_segment(const Params& p, const Segments& all, int segment) {
  SegmentStart start{all, 0, 0, {0, 0}};
  const long long begin = all.begin(segment);
  for (; start.row < work_rows<P>(p) - 1 && start.before + work_of_row<P>(p, start.row) <= begin; ++start.row)
    start.before += work_of_row<P>(p, start.row);
  start.tiles = kv_tiles_of_row<P>(p, start.row);
  return start;
}

/// Every KV tile of every work tile is in one segment, segments differ by a tile, and parts have numbers of
/// their own, from which combine_parts finds them again.
template <class P>
void expect_equal_segments(const Lengths& lengths, int segments, int heads_q, int heads_kv, int lanes) {
  const std::vector<int> offsets = offsets_of(lengths.queries);
  Params p = params_of<P>(lengths, offsets, segments, heads_q, heads_kv, lanes);
  // As find_segment() finds it, of a lane.
  long long sum = 0;
  bool alike = true;
  for (int row = 0; row < work_rows<P>(p); ++row) {
    sum += work_of_row<P>(p, row);
    alike = alike && work_of_row<P>(p, row) == work_of_row<P>(p, 0);
  }
  const int work_tiles = alike ? work_rows<P>(p) * (heads_of_row<P>(p, 0) / lanes) : 0;
  const Segments all(sum, count_of_segments<P>(p, sum, work_tiles));
  ASSERT_LE(all.count, std::max(segments / lanes, 1));
  const auto start_of = [&](int segment) { return start_of_segment<P>(p, all, segment); };

  std::map<std::tuple<unsigned, unsigned, int>, int> visits;  // batch and head, Q tile, KV tile
  std::map<int, std::pair<unsigned, unsigned>> parts;
  std::vector<PartialTile> partial_tiles(segments);
  p.partial_tiles = partial_tiles.data();
  const long long fewest = all.begin(1);
  for (int segment = 0; segment < segments; ++segment) {
    long long size = 0;
    const SegmentStart start = start_of(segment / lanes);
    flashjit_emulator::now_block = {static_cast<unsigned>(segment), 0, 0};
    auto scheduler = StreamKScheduler<P>::first(p, start, 0);
    for (TileCoord coord; scheduler.next(p, 0, coord); scheduler.finish_tile(p, start, coord)) {
      ASSERT_LT(coord.kv_tiles.begin, coord.kv_tiles.end);
      size += coord.kv_tiles.end - coord.kv_tiles.begin;
      for (int tile = coord.kv_tiles.begin; tile < coord.kv_tiles.end; ++tile)
        ++visits[{coord.batch_head, coord.q_tile, tile}];
      if (coord.split != kWhole) {
        ASSERT_EQ(coord.split / 2, segment);
        ASSERT_TRUE(parts.insert({coord.split, {coord.batch_head, coord.q_tile}}).second);
      }
    }
    if (segment / lanes < all.count) {
      ASSERT_LE(std::abs(size - fewest), 1) << segment;
    } else {
      ASSERT_EQ(size, 0);
    }
  }
  ASSERT_EQ(static_cast<long long>(visits.size()), sum * lanes);
  for (const auto& [key, times] : visits) ASSERT_EQ(times, 1);
  std::size_t joined = 0;
  for (int segment = 0; segment < segments; ++segment) {
    const PartialTile& cut = partial_tiles[segment];
    for (int other = segment / lanes; other < cut.segments_end; ++other, ++joined) {
      ASSERT_TRUE(other == segment / lanes ||
                  partial_tiles[other * lanes + segment % lanes].continues == segment / lanes);
      const auto part = parts.find(part_of_segment(p, other, segment % lanes, other + 1 < cut.segments_end));
      ASSERT_NE(part, parts.end());
      ASSERT_EQ(part->second,
                std::pair(static_cast<unsigned>(cut.batch_head), static_cast<unsigned>(cut.q_tile)));
    }
  }
  ASSERT_EQ(joined, parts.size());
}

template <class Mask, bool pack_gqa>
struct InFixedParts : Scheduled<Mask, 64, 1, true, pack_gqa> {
  static constexpr bool kInvariant = true, kFixedParts = true, kCache = true, kVarlen = true;
};

/// Every KV tile is in one part, parts begin at multiples of so many tiles, and those of one part are whole.
/// A CTA has at most a part more than its segment.
template <class P>
void expect_fixed_parts(const Lengths& lengths, int ctas, int heads_q, int heads_kv, int lanes) {
  constexpr int kMostTiles = tiles_of_split(P::kBc);
  const std::vector<int> offsets = offsets_of(lengths.queries);
  Params p = params_of<P>(lengths, offsets, 1000, heads_q, heads_kv, lanes);
  flashjit_emulator::now_grid = {static_cast<unsigned>(ctas), 1, 1};
  long long sum = 0;
  for (int row = 0; row < work_rows<P>(p); ++row) sum += work_of_row<P>(p, row);
  const Segments all(sum, count_of_segments<P>(p, sum, 0));
  std::map<std::tuple<unsigned, unsigned, int>, int> visits;  // batch and head, Q tile, KV tile
  for (int cta = 0; cta < ctas; ++cta) {
    flashjit_emulator::now_block = {static_cast<unsigned>(cta), 0, 0};
    FixedPartScheduler<P> scheduler(p, start_of_segment<P>(p, all, cta / lanes));
    int size = 0;
    for (TileCoord coord; scheduler.next(p, 0, coord);) {
      const Range tiles = coord.kv_tiles;
      const auto sequence = static_cast<int>(coord.batch_head / scheduled_heads<P>(p));
      const int keys = lengths.keys[sequence], of_part = tiles_of_part(P::kBc, keys);
      ASSERT_EQ(coord.split, keys <= of_part * P::kBc ? kWhole : tiles.begin / of_part);
      ASSERT_EQ(tiles.begin % of_part, 0);
      ASSERT_LE(tiles.end - tiles.begin, of_part);
      size += tiles.end - tiles.begin;
      for (int tile = tiles.begin; tile < tiles.end; ++tile) ++visits[{coord.batch_head, coord.q_tile, tile}];
    }
    ASSERT_LE(size, all.begin(1) + kMostTiles);
  }
  ASSERT_EQ(static_cast<long long>(visits.size()), sum * lanes);
  for (const auto& [key, times] : visits) ASSERT_EQ(times, 1);
}

TEST(FixedParts, AreInOneSegmentEach) {
  const Lengths one_long{{1, 1, 1, 1}, {20000, 70, 2048, 1}};
  const Lengths unlike{{3, 0, 130, 1, 64}, {5000, 900, 2049, 0, 8193}};
  for (const Lengths& lengths : {one_long, unlike, Lengths{{1, 1}, {0, 0}}, Lengths{{5}, {4000}}})
    for (const int ctas : {1, 2, 8, 132, 264})
      for (const int lanes : {1, 2}) {
        if (ctas < lanes) continue;
        expect_fixed_parts<InFixedParts<NoMask, false>>(lengths, ctas, 4, 2, lanes);
        expect_fixed_parts<InFixedParts<Causal, false>>(lengths, ctas, 4, 2, lanes);
        expect_fixed_parts<InFixedParts<Causal, true>>(lengths, ctas, 8, 2, lanes);
      }
}

TEST(StreamK, SegmentsAreEqualAndHaveEachTileOnce) {
  const Lengths one_long{{1, 1, 1, 1}, {20000, 70, 64, 1}};
  const Lengths unlike{{3, 0, 130, 1, 64}, {500, 900, 200, 0, 1300}};
  const Lengths tiny{{1}, {10}};
  for (const Lengths& lengths : {one_long, unlike, tiny})
    for (const int segments : {1, 7, 132}) {
      expect_equal_segments<SharedOut<NoMask, 64, false>>(lengths, segments, 8, 2, 1);
      expect_equal_segments<SharedOut<Causal, 128, false>>(lengths, segments, 4, 4, segments > 1 ? 2 : 1);
      expect_equal_segments<SharedOut<Causal, 64, true>>(lengths, segments, 8, 2, segments > 1 ? 2 : 1);
      expect_equal_segments<SharedOut<Window<300>, 64, true>>(lengths, segments, 4, 1, 1);
    }
  const Lengths folded{{128, 128, 128}, {900, 0, 70}};
  for (const int lanes : {1, 2})
    for (const int segments : {2, 132}) expect_equal_segments<QTilesAsHeads>(folded, segments, 1, 1, lanes);
  expect_equal_segments<QTilesAsHeads>({{130, 130}, {900, 700}}, 132, 2, 1, 3);
}

template <class Mask, int br, bool pack_gqa>
struct Cascade : SharedOut<Mask, br, pack_gqa> {
  static constexpr bool kCascade = true;
};

/// Each row of O finds, by the segments that have parts of its work tile and of the prefix's, a part of every
/// KV tile that it meets, once. Parts have rows of their own within the memory that the host gives them.
template <class P>
void expect_cascade(const Lengths& lengths, int prefix_length, int segments, int heads_q, int heads_kv,
                    int lanes) {
  const int batch = static_cast<int>(lengths.keys.size());
  const std::vector<int> offsets = offsets_of(lengths.queries);
  Params p = params_of<P>(lengths, offsets, segments, heads_q, heads_kv, lanes);
  p.prefix_length = &prefix_length;
  const int heads = static_cast<int>(scheduled_heads<P>(p)), rows = work_rows<P>(p);
  const long long prefix_tiles = (static_cast<long long>(batch) * p.seqlen_q + queries_per_tile<P>(p) - 1) /
                                 queries_per_tile<P>(p) * heads;
  std::vector<SegmentsOfTile> segments_of_tile(
      static_cast<std::size_t>(own_rows<P>(p) * heads + prefix_tiles));
  p.segments_of_tile = segments_of_tile.data();
  long long sum = 0;
  for (int row = 0; row < rows; ++row) sum += work_of_row<P>(p, row);
  const Segments all(sum, count_of_segments<P>(p, sum, 0));

  std::map<int, Range> parts;
  for (int segment = 0; segment < segments; ++segment) {
    SegmentStart start{all, 0, 0, {0, 0}};
    const long long begin = all.begin(segment / lanes);
    for (; start.row < rows - 1 && start.before + work_of_row<P>(p, start.row) <= begin; ++start.row)
      start.before += work_of_row<P>(p, start.row);
    start.tiles = kv_tiles_of_row<P>(p, start.row);
    flashjit_emulator::now_block = {static_cast<unsigned>(segment), 0, 0};
    StreamKScheduler<P> scheduler(p, start);
    for (TileCoord coord; scheduler.next(p, 0, coord);) {
      ASSERT_TRUE(parts.insert({coord.split, coord.kv_tiles}).second);
    }
  }
  const long long room = own_rows<P>(p) * heads + prefix_tiles + segments;
  const Sequence<P> prefix = sequence_at<P>(p, batch);
  std::set<std::pair<int, int>> used;  // parts and rows
  for (int b = 0; b < batch; ++b)
    for (int q = 0; q < lengths.queries[b]; ++q)
      for (int h = 0; h < heads_q; ++h) {
        const Sequence<P> sequence(p, b);
        int next = 0;  // KV tile
        for (const PartsOfRow& of :
             {parts_of_row<P>(p, batch, sequence.q_row(q) - prefix.q_row(0), h), parts_of_row<P>(p, b, q, h)})
          for (int segment = of.segments.begin; segment < of.segments.end; ++segment) {
            const int part = part_of_tile(p, of.index, segment);
            ASSERT_TRUE(part < room && of.row < P::kBr);
            ASSERT_TRUE(used.insert({part, of.row}).second);
            const auto found = parts.find(part);
            ASSERT_NE(found, parts.end());
            ASSERT_EQ(found->second.begin, next);
            next = found->second.end;
          }
        const int keys = lengths.keys[b] - (P::kHasMask ? lengths.queries[b] - 1 - q : 0);
        ASSERT_GE(next * P::kBc, keys);
      }
}

TEST(StreamK, RowsOfACascadeFindTheirParts) {
  const Lengths decode{{1, 1, 1, 1, 1}, {700, 900, 640, 641, 2000}};
  const Lengths few{{3, 1, 5, 2}, {705, 1300, 2000, 650}};
  const Lengths many{{70, 1, 130}, {1000, 900, 771}};
  for (const Lengths& lengths : {decode, few, many})
    for (const int prefix : {0, 63, 64, 600, 640})
      for (const int segments : {4, 132}) {
        expect_cascade<Cascade<Causal, 64, true>>(lengths, prefix, segments, 8, 2, 2);
        expect_cascade<Cascade<Causal, 128, true>>(lengths, prefix, segments, 8, 2, 1);
        expect_cascade<Cascade<NoMask, 64, false>>(lengths, prefix, segments, 4, 4, 4);
        expect_cascade<Cascade<NoMask, 128, false>>(lengths, prefix, segments, 4, 2, 1);
      }
}

TEST(StreamK, WorkTilesThatAreAlikeAreCutLittle) {
  Params p = {};
  p.num_splits = 132, p.head_groups = 1;
  const auto count = [&](long long tiles, int work_tiles) {
    return count_of_segments<SharedOut<NoMask, 64, false>>(p, tiles, work_tiles);
  };
  EXPECT_EQ(count(128 * 16, 128), 128);  // one each
  EXPECT_EQ(count(256 * 16, 256), 128);  // two each
  EXPECT_EQ(count(32 * 64, 32), 128);    // four for each
  EXPECT_EQ(count(128 * 16, 0), 132);    // not alike
  EXPECT_EQ(count(100 * 16, 100), 132);  // too many would be idle
  EXPECT_EQ(count(133 * 16, 133), 132);
  EXPECT_EQ(count(1 * 20, 1), 10);
  EXPECT_EQ(count(0, 0), 1);
  p.head_groups = 2;
  EXPECT_EQ(count(64 * 16, 64), 64);
}

}  // namespace
}  // namespace flashjit::tma
