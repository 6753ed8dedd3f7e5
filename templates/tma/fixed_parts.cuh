// Fixed parts: where a row's bits must not depend on the batch (kInvariant), how its keys are split follows
// from their number alone. CTAs have equal segments of all KV tiles as with stream-K, but of whole parts: one
// belongs to the segment that has its first tile. Work tiles of one part go to O at once, the combine entry
// joins the parts of others. ../sm90/NOTES.md#fixed-parts
#pragma once

#include "flashjit/tma/stream_k.cuh"

namespace flashjit::tma {

/// The parts of a row's work tiles.
struct PartsOfWorkTile {
  int tiles;  ///< of each but the last
  int count;  ///< of the sequence's keys, whether the row visits them or not: what the combine entry reads

  template <class P>
  __device__ static PartsOfWorkTile of_row(const Params& p, int row) {
    const int keys = Sequence<P>(p, row / rows_of_sequence<P>(p)).seqused_kv(p);
    return {tiles_of_part(P::kBc, keys), splits_with_keys<P>(p, keys)};
  }
  /// The split of a work tile's part.
  __device__ int name(int part) const { return count > 1 ? part : kWhole; }
};

/// Hands out the parts of a CTA's segment.
template <class P>
struct FixedPartScheduler {
  int row, heads;  ///< and the group's heads of it
  Range tiles;     ///< of the row's work tiles
  int at, left;  ///< the next KV tile, counted from the row's first, and how many the segment has from there
  PartsOfWorkTile parts;

  __device__ FixedPartScheduler(const Params& p, const SegmentStart& start)
      : row(start.row), heads(heads_of_row<P>(p, row) / p.head_groups), tiles(start.tiles) {
    const int segment = static_cast<int>(blockIdx.x) / p.head_groups;
    const long long begin = start.segments.begin(segment);
    at = static_cast<int>(begin - start.before);
    left = static_cast<int>(start.segments.begin(segment + 1) - begin);
    if (left <= 0) return;
    parts = PartsOfWorkTile::of_row<P>(p, row);
    const int tile = at % count();  // the rest of a part that it may be in is the segment's before
    const int rest = min((tile + parts.tiles - 1) / parts.tiles * parts.tiles, count()) - tile;
    at += rest, left -= rest;
  }
  __device__ int count() const { return tiles.end - tiles.begin; }

  // The interface of TileScheduler.
  static __device__ FixedPartScheduler first(const Params& p, const SegmentStart& start, int) {
    return FixedPartScheduler(p, start);
  }
  __device__ bool next(const Params& p, unsigned, TileCoord& found) {
    if (left <= 0) return false;
    while (count() * heads <= at) {
      at -= count() * heads;
      tiles = kv_tiles_of_row<P>(p, ++row);
      parts = PartsOfWorkTile::of_row<P>(p, row);
    }
    const int of_group = at / count(), tile = at - of_group * count(),
              size = min(parts.tiles, count() - tile);
    const int group = static_cast<int>(blockIdx.x) % p.head_groups;
    coord_in_row<P>(p, row, heads * p.head_groups, of_group * p.head_groups + group, found);
    found.split = parts.name(tile / parts.tiles);
    found.warpgroups = {0, row_warpgroups(P::kBr)};
    found.kv_tiles = {tiles.begin + tile, tiles.begin + tile + size};
    at += size;
    left -= size;
    return true;
  }
  __device__ void finish_tile(const Params&, const SegmentStart&, const TileCoord&) const {}
};

/// LSE of the rows of a part without keys.
template <class P>
__device__ __forceinline__ void write_lse_of_no_keys(const Params& p, const WorkTile<P>& work, int thread,
                                                     int threads) {
  if (work.is_whole()) return write_rows_without_keys(p, work, thread, threads);
  for (int row = thread; row < P::kBr; row += threads)
    if (const RowCoord at = row_coord(p, work, row / kWarpgroupRows, row % kWarpgroupRows); at.q >= 0)
      lse_of<P>(p, work.split)[work.sequence.split_row(p, at.h, at.q)] = -infinity();
}

/// Writes the rows of parts without keys, which the other warps skip.
template <class P>
struct FixedPartsWithoutKeys {
  static __device__ __forceinline__ void write(const Params& p, const SegmentStart& start, int thread,
                                               int threads) {
    if (P::kMaskUsesHead) {
      FixedPartScheduler<P> scheduler(p, start);
      for (TileCoord coord; scheduler.next(p, 0, coord);)
        if (const WorkTile<P> work(p, coord); work.count() == 0)
          write_lse_of_no_keys(p, work, thread, threads);
    }
#pragma unroll 1
    for (int row = static_cast<int>(blockIdx.x); row < work_rows<P>(p); row += static_cast<int>(gridDim.x)) {
      const Range tiles = kv_tiles_of_row<P>(p, row);
      const PartsOfWorkTile parts = PartsOfWorkTile::of_row<P>(p, row);
      const int with_keys = (tiles.end - tiles.begin + parts.tiles - 1) / parts.tiles,
                heads = heads_of_row<P>(p, row);
#pragma unroll 1
      for (int part = with_keys; part < max(parts.count, 1); ++part)
#pragma unroll 1
        for (int head = 0; head < heads; ++head) {
          TileCoord coord{0, 0, {0, row_warpgroups(P::kBr)}, parts.name(part), {}};
          coord_in_row<P>(p, row, heads, head, coord);
          write_lse_of_no_keys(p, WorkTile<P>(p, coord), thread, threads);
        }
    }
  }
};

}  // namespace flashjit::tma
