// Stream-K (Lean Attention): the KV tiles of all work tiles in a row, divided into equal segments for the
// CTAs. The lengths of a cache's sequences are on the device, and so is the division: CTAs end together even
// if one sequence is a hundred times as long as the others. A segment's first and last work tile may be parts
// of one, whose O and LSE the combine_parts entry joins.
#pragma once

#include "flashjit/common/out_codes.cuh"
#include "flashjit/common/out_element.cuh"
#include "flashjit/common/sink.cuh"
#include "flashjit/tma/tile_scheduler.cuh"

namespace flashjit::tma {

/// With fewer KV tiles for each CTA, fewer CTAs work.
constexpr int kFewestTilesOfSegment = 2;

/// Work tiles are ordered by sequence, Q tile and scheduled head. A Q tile's heads form a row: they visit the
/// same KV tiles, or are taken to visit all if the mask differs by head. Where Q tiles count as heads, a
/// sequence is one row, since all its Q tiles visit the same KV tiles. Adjacent heads are in groups: CTA c
/// has a segment of the work of each p.head_groups-th head, from c % p.head_groups on, so that neighbouring
/// CTAs read neighbouring memory. All groups have equal work, so the code below handles one.
template <class P>
__device__ __forceinline__ int rows_of_sequence(const Params& p) {
  return P::kQTilesAsHeads ? 1 : static_cast<int>(q_tiles_per_head<P>(p));
}
/// Rows of the sequences; with a cascade the prefix is one row more. Its heads are the heads of all its Q
/// tiles, one head after the other, so that the Q tiles that need a KV tile are in groups: at the time when
/// L2 has it.
template <class P>
__device__ __forceinline__ int own_rows(const Params& p) {
  return p.batch * rows_of_sequence<P>(p);
}
template <class P>
__device__ __forceinline__ int work_rows(const Params& p) {
  return own_rows<P>(p) + P::kCascade;
}
template <class P>
__device__ __forceinline__ bool is_prefix(const Params& p, int row) {
  return P::kCascade && row == own_rows<P>(p);
}
template <class P>
__device__ __forceinline__ int prefix_q_tiles(const Params& p) {
  const int queries = queries_per_tile<P>(p);
  return (sequence_at<P>(p, p.batch).seqlen_q(p) + queries - 1) / queries;
}
template <class P>
__device__ __forceinline__ int heads_of_row(const Params& p, int row) {
  if (is_prefix<P>(p, row)) return static_cast<int>(scheduled_heads<P>(p)) * prefix_q_tiles<P>(p);
  return static_cast<int>(P::kQTilesAsHeads ? scheduled_heads<P>(p) * q_tiles_per_head<P>(p)
                                            : scheduled_heads<P>(p));
}
/// The place of a row's work tile, of `heads` heads.
template <class P>
__device__ __forceinline__ void coord_in_row(const Params& p, int row, int heads, int head,
                                             TileCoord& found) {
  const int scheduled = static_cast<int>(scheduled_heads<P>(p));
  const bool q_tiles_are_heads = P::kQTilesAsHeads || is_prefix<P>(p, row);
  const int at = q_tiles_are_heads ? head : row;
  const int q_tiles = q_tiles_are_heads ? heads / scheduled : static_cast<int>(q_tiles_per_head<P>(p));
  const int rest = at / q_tiles;
  found.q_tile = at - rest * q_tiles;
  if (q_tiles_are_heads)
    found.batch_head = (P::kQTilesAsHeads ? row : p.batch) * scheduled + rest;
  else
    found.batch_head = rest * scheduled + head;
}
template <class P>
__device__ __forceinline__ Range kv_tiles_of_row(const Params& p, int row) {
  int first = 0;
  if constexpr (P::kCascade) {
    first = prefix_tiles<P>(p);
    if (is_prefix<P>(p, row)) return {0, first};
  }
  const int q_tiles = rows_of_sequence<P>(p);
  const Sequence<P> sequence(p, row / q_tiles);
  const Range queries = tile_range(row % q_tiles, queries_per_tile<P>(p), sequence.seqlen_q(p));
  const int keys = sequence.seqused_kv(p);
  if (queries.begin >= queries.end || keys == 0) return {0, 0};
  if constexpr (P::kIndices) return {0, tiles_of_list<P>(p, sequence, row % q_tiles)};
  Range bounds{0, keys};
  if constexpr (!P::kMaskUsesHead) bounds = P::kv_bounds(p, sequence.head(p, 0), queries);
  const int end = min(bounds.end, keys);
  if (bounds.begin >= end) return {0, 0};
  int visited = bounds.begin / P::kBc, count = (end + P::kBc - 1) / P::kBc - visited;
  EmptyEnds<P, (kClassesTiles<P> && !P::kMaskUsesHead)>::take_off(p, sequence.head(p, 0), queries, visited,
                                                                  count);
  first = max(first, visited);
  return {first, max(first, visited + count)};
}
template <class P>
__device__ __forceinline__ long long work_of_row(const Params& p, int row) {
  const Range tiles = kv_tiles_of_row<P>(p, row);
  return static_cast<long long>(tiles.end - tiles.begin) * (heads_of_row<P>(p, row) / p.head_groups);
}

/// The number of segments of a head group's `tiles` KV tiles. If all its `work_tiles` are equal (else that is
/// 0), a count that leaves whole tiles is best: a partial tile costs an fp32 O, written and read. One CTA of
/// 16 may be idle for that. Fixed parts are cut nowhere else.
template <class P>
__device__ __forceinline__ int count_of_segments(const Params& p, long long tiles, int work_tiles) {
  const int ctas = P::kFixedParts ? static_cast<int>(gridDim.x) : p.num_splits;
  const int most = static_cast<int>(
      min(static_cast<long long>(ctas / p.head_groups), max(tiles / kFewestTilesOfSegment, 1ll)));
  if (P::kFixedParts) return most;
  if (work_tiles == 0) return most;
  const int of_segment = (work_tiles + most - 1) / most;
  const int even = work_tiles <= most             ? most / work_tiles * work_tiles
                   : work_tiles % of_segment == 0 ? work_tiles / of_segment
                                                  : 0;
  return even * 16 >= most * 15 ? even : most;
}

/// A group's segments of its KV tiles, which differ by a tile at most.
struct Segments {
  long long each = 0;  ///< tiles of a segment, rounded down
  int rest = 0;        ///< and tiles that are left
  int count = 1;

  Segments() = default;
  __device__ Segments(long long tiles, int count)
      : each(tiles / count), rest(static_cast<int>(tiles - each * count)), count(count) {}
  __device__ long long begin(int segment) const {
    const int at = min(segment, count);
    return each * at + rest * at / count;
  }
  /// The first segment that begins at a tile or behind it.
  __device__ int first_from(long long tile) const {
    const float size = static_cast<float>(each) + static_cast<float>(rest) / static_cast<float>(count);
    int segment = static_cast<int>(static_cast<float>(tile) / size);  // or one next to it
    while (segment > 0 && begin(segment - 1) >= tile) --segment;
    while (begin(segment) < tile) ++segment;
    return segment;
  }
  __device__ int segment_of(long long tile) const { return first_from(tile + 1) - 1; }
};

/// The start of a segment: the row, its KV tiles, and the number of KV tiles before it.
struct SegmentStart {
  Segments segments;
  long long before = 0;
  int row = 0;
  Range tiles{0, 0};
};

/// Shared memory of find_segment().
struct SegmentScratch {
  long long of_warp[32];
  bool alike[32];  ///< the work of a warp's rows
  SegmentStart start;
};

/// By all threads of the CTA: each counts the work of some rows. `scratch` is free again when it
/// returns.
template <class P>
__device__ SegmentStart find_segment(const Params& p, int segment, SegmentScratch& scratch) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int rows = work_rows<P>(p), threads = static_cast<int>(blockDim.x);
  const int each = (rows + threads - 1) / threads, first = static_cast<int>(threadIdx.x) * each;
  const long long of_first = rows > 0 ? work_of_row<P>(p, 0) : 0;
  long long own = 0;
  bool alike = true;
  for (int row = first; row < min(first + each, rows); ++row) {
    const long long work = work_of_row<P>(p, row);
    own += work;
    alike = alike && work == of_first;
  }
  long long end = sum_up_to_lane(own);  // with the work of the threads before
  alike = __all_sync(kWholeWarp, alike);
  if (lane == 31) scratch.of_warp[warp] = end, scratch.alike[warp] = alike;
  if (threadIdx.x == 0) scratch.start = {};
  __syncthreads();
  long long tiles = 0;
  for (int other = 0; other < threads / 32; ++other) {
    if (other == warp) end += tiles;
    tiles += scratch.of_warp[other];
    alike = alike && scratch.alike[other];
  }
  const Segments segments(
      tiles, count_of_segments<P>(p, tiles, alike ? rows * (heads_of_row<P>(p, 0) / p.head_groups) : 0));
  const long long begin = segments.begin(segment);
  long long before = end - own;
  if (before <= begin && begin < end) {
    int row = first;
    for (long long work; (work = work_of_row<P>(p, row)) <= begin - before; ++row) before += work;
    scratch.start = {{}, before, row, kv_tiles_of_row<P>(p, row)};
  }
  __syncthreads();
  SegmentStart start = scratch.start;
  start.segments = segments;
  __syncthreads();
  return start;
}

/// The number of a CTA's part that begins its segment, or of the one that ends it.
__device__ __forceinline__ int part_of_segment(const Params& p, int segment, int group, bool last) {
  return 2 * (segment * p.head_groups + group) + last;
}

/// Cascade: the place of a row's work tile in Params::segments_of_tile.
template <class P>
__device__ __forceinline__ int tile_index(const Params& p, int row, int head) {
  return row * static_cast<int>(scheduled_heads<P>(p)) + head;
}
/// Cascade: the number of a segment's part of a work tile. All work tiles are parts, for a row of O has two.
/// Segments and work tiles of a group ascend together, so no two parts have the same.
__device__ __forceinline__ int part_of_tile(const Params& p, int index, int segment) {
  return index + segment * p.head_groups;
}

/// Cascade: the segments that have the parts of a row of O, of a sequence's own keys or of the prefix.
struct PartsOfRow {
  int index, row;  ///< the work tile, and the row there
  SegmentsOfTile segments;

  __device__ int count() const { return segments.end - segments.begin; }
};
template <class P>
__device__ __forceinline__ PartsOfRow parts_of_row(const Params& p, int sequence, int query, int h) {
  const int tile_queries = queries_per_tile<P>(p), q_tile = query / tile_queries;
  int row_of_tile = query - q_tile * tile_queries, head = h;
  if constexpr (P::kPackGqa) {
    const int h_kv = h / p.packed.shared, of_shared = h - h_kv * p.packed.shared;
    const int set = of_shared / p.packed.heads, group = row_of_tile / p.packed.queries;
    head = h_kv * p.packed.sets + set;
    row_of_tile = group * kWarpgroupRows + (row_of_tile - group * p.packed.queries) * p.packed.heads +
                  of_shared - set * p.packed.heads;
  }
  int row = own_rows<P>(p);
  if (sequence == p.batch)
    head = head * prefix_q_tiles<P>(p) + q_tile;
  else
    row = sequence * rows_of_sequence<P>(p) + q_tile;
  const int index = tile_index<P>(p, row, head);
  return {index, row_of_tile, p.segments_of_tile[index]};
}

/// Where a row of a tile is: its query, -1 for none, and its head.
struct RowCoord {
  int q, h;
};
template <class P>
__device__ __forceinline__ RowCoord row_coord(const Params& p, const WorkTile<P>& work, int wg, int row) {
  const int query = query_of_row<P>(p, row),
            q = work.q_begin + row_group<P>(wg) * queries_per_warpgroup<P>(p) + query;
  int h = work.h;
  bool exists = q < work.sequence.seqlen_q(p);
  if constexpr (P::kPackGqa) {
    const int head = row - query * p.packed.heads;
    exists = exists && query < p.packed.queries && head < work.heads;
    h += head;
  }
  return {exists ? q : -1, h};
}

/// LSE and O of a row of a part, which are in no order that a tensor has.
template <class P>
__device__ __forceinline__ long long row_of_part(int part, int wg, int row) {
  return static_cast<long long>(part) * P::kBr + row_group<P>(wg) * kWarpgroupRows + row;
}
template <class P>
__device__ __forceinline__ float* o_of_part(const Params& p, long long row) {
  return p.o_splits + row * P::kHeadDimV;
}

/// O of a row without keys, by one thread.
template <class P>
struct ZeroElements {
  static __device__ __forceinline__ void store(const Params& p, const Sequence<P>& sequence,
                                               const RowCoord& target) {
    OutElement<P>* o = sequence.template q_pointer<OutElement<P>>(p.o, target.h, target.q);
    for (int chunk = 0; chunk < P::kHeadDimV / kOutVector<P>; ++chunk)
      *reinterpret_cast<uint4*>(o + chunk * kOutVector<P>) = uint4{};
  }
};
template <class P>
struct ZeroCodes {
  static __device__ __forceinline__ void store(const Params& p, const Sequence<P>& sequence,
                                               const RowCoord& target) {
    store_codes_of_thread<P>(coded_row(p, sequence, target.h, target.q, true), [](int) { return 0.0f; });
  }
};
template <class P>
using ZeroRow = Conditional<kOutCodes<P>, ZeroCodes<P>, ZeroElements<P>>;

/// Writes the rows of work tiles, or of parts, that have no keys, which the other warps skip. By `threads`
/// threads of the CTA.
template <class P>
__device__ __forceinline__ void write_rows_without_keys(const Params& p, const WorkTile<P>& work, int thread,
                                                        int threads) {
  if (!work.is_whole()) {
    for (int row = thread; row < P::kBr; row += threads)
      p.lse_splits[row_of_part<P>(work.split, 0, row)] = -infinity();
    return;
  }
  for (int row = thread; row < P::kBr; row += threads) {
    const RowCoord target = row_coord(p, work, row / kWarpgroupRows, row % kWarpgroupRows);
    if (target.q < 0) continue;
    ZeroRow<P>::store(p, work.sequence, target);
    if (p.lse.data != nullptr)
      p.lse.data[work.sequence.lse_row(p, target.h, target.q)] = with_sink<P>(p, target.h, -infinity()).lse;
  }
}
// How the combine entry learns which parts of a work tile there are; TileParts<P> names one of these types.
// A part has `before` and `behind` it KV tiles of its work tile, the row's `head`.

/// Only a segment's first and last work tile may be cut: each CTA tells combine_parts of its own.
template <class P>
struct PartialTiles {
  static __device__ __forceinline__ void begin(const Params& p) {
    if (p.partial_tiles != nullptr) p.partial_tiles[blockIdx.x] = {0, 0, 0, -1};
  }
  /// The part's number, or kWhole.
  static __device__ __forceinline__ int number(const Params& p, int, int, int segment, int group, int before,
                                               int behind) {
    return before == 0 && behind == 0 ? kWhole : part_of_segment(p, segment, group, behind > 0);
  }
  /// Tells of the part handed out last.
  template <class Scheduler>
  static __device__ __forceinline__ void finish(const Params& p, const Scheduler& scheduler,
                                                const Segments& segments, const TileCoord& coord) {
    PartialTile& partial = p.partial_tiles[blockIdx.x];
    if (const int first = scheduler.continues(segments); first >= 0) partial.continues = first;
    if (const int end = scheduler.segments_end(segments); end > 0) {
      partial.batch_head = static_cast<int>(coord.batch_head),
      partial.q_tile = static_cast<int>(coord.q_tile);
      partial.segments_end = end;
    }
  }
  /// A row whose work tiles have no keys, and so are in no segment.
  static __device__ __forceinline__ void write_empty_row(const Params& p, int row, int thread, int threads) {
    for (int head = 0; head < heads_of_row<P>(p, row); ++head) {
      TileCoord coord{0, 0, {0, row_warpgroups(P::kBr)}, kWhole, {}};
      coord_in_row<P>(p, row, heads_of_row<P>(p, row), head, coord);
      const WorkTile<P> work(p, coord);
      write_rows_without_keys(p, work, thread, threads);
    }
  }
};
/// Cascade: all work tiles are parts. The first and the last segment that have one of a work tile say so.
template <class P>
struct CascadeTiles {
  static __device__ __forceinline__ void begin(const Params&) {}
  static __device__ __forceinline__ int number(const Params& p, int row, int head, int segment, int,
                                               int before, int behind) {
    const int index = tile_index<P>(p, row, head);
    if (before == 0) p.segments_of_tile[index].begin = segment;
    if (behind == 0) p.segments_of_tile[index].end = segment + 1;
    return part_of_tile(p, index, segment);
  }
  template <class Scheduler>
  static __device__ __forceinline__ void finish(const Params&, const Scheduler&, const Segments&,
                                                const TileCoord&) {}
  static __device__ __forceinline__ void write_empty_row(const Params& p, int row, int thread, int threads) {
    for (int head = thread; head < heads_of_row<P>(p, row); head += threads)
      p.segments_of_tile[tile_index<P>(p, row, head)] = {0, 0};
  }
};
template <class P>
using TileParts = Conditional<P::kCascade, CascadeTiles<P>, PartialTiles<P>>;

/// Hands out the parts of work tiles that a CTA's segment consists of. What it keeps is small, as producer
/// warps have few registers.
template <class P>
struct StreamKScheduler {
  int segment;
  int row, heads;  ///< and the group's heads of it
  Range tiles;     ///< of the row's work tiles
  int at, left;    ///< the next KV tile of the segment, counted from the row's first, and how many there are
  int before, behind = 0;  ///< the KV tiles of a work tile around the part that was handed out last

  __device__ StreamKScheduler(const Params& p, const SegmentStart& start)
      : segment(static_cast<int>(blockIdx.x) / p.head_groups),
        row(start.row),
        heads(heads_of_row<P>(p, row) / p.head_groups),
        tiles(start.tiles),
        before(0) {
    const long long begin = start.segments.begin(segment);
    at = static_cast<int>(begin - start.before);
    left = static_cast<int>(start.segments.begin(segment + 1) - begin);
  }
  __device__ int count() const { return tiles.end - tiles.begin; }

  // The interface of TileScheduler. A tile is a part of a work tile, or a whole one.
  static __device__ StreamKScheduler first(const Params& p, const SegmentStart& start, int) {
    StreamKScheduler scheduler(p, start);
    TileParts<P>::begin(p);
    return scheduler;
  }
  __device__ bool next(const Params& p, unsigned, TileCoord& found) {
    if (left <= 0) return false;
    while (count() * heads <= at) {
      at -= count() * heads;
      tiles = kv_tiles_of_row<P>(p, ++row);
      if (is_prefix<P>(p, row)) heads *= prefix_q_tiles<P>(p);
    }
    const int of_group = at / count(), tile = at - of_group * count(), size = min(left, count() - tile);
    const int group = static_cast<int>(blockIdx.x) - segment * p.head_groups;
    const int head = of_group * p.head_groups + group;
    before = tile, behind = count() - tile - size;
    found.split = TileParts<P>::number(p, row, head, segment, group, before, behind);
    coord_in_row<P>(p, row, heads * p.head_groups, head, found);
    found.warpgroups = {0, row_warpgroups(P::kBr)};
    found.kv_tiles = {tiles.begin + tile, tiles.begin + tile + size};
    at += size;
    left -= size;
    return true;
  }
  __device__ void finish_tile(const Params& p, const SegmentStart& start, const TileCoord& coord) const {
    TileParts<P>::finish(p, *this, start.segments, coord);
  }

  /// If the part handed out last begins a work tile and does not end it: the end of the segments that have
  /// its other parts; else 0.
  __device__ int segments_end(const Segments& segments) const {
    return before == 0 && behind > 0 ? segments.first_from(segments.begin(segment + 1) + behind) : 0;
  }
  /// If it does not begin one: the segment in which that begins; else -1.
  __device__ int continues(const Segments& segments) const {
    return before == 0 ? -1 : segments.segment_of(segments.begin(segment) - before);
  }
};

/// Writes the rows of parts without keys, which the other warps skip.
template <class P>
struct PartsWithoutKeys {
  static __device__ __forceinline__ void write(const Params& p, const SegmentStart& start, int thread,
                                               int threads) {
    if (P::kMaskUsesHead) {
      StreamKScheduler<P> scheduler(p, start);
      for (TileCoord coord; scheduler.next(p, 0, coord);)
        if (const WorkTile<P> work(p, coord); work.count() == 0)
          write_rows_without_keys(p, work, thread, threads);
    }
    // Work tiles without keys are in no segment.
    for (int row = static_cast<int>(blockIdx.x); row < work_rows<P>(p); row += static_cast<int>(gridDim.x)) {
      if (work_of_row<P>(p, row) > 0) continue;
      TileParts<P>::write_empty_row(p, row, thread, threads);
    }
  }
};

}  // namespace flashjit::tma
