// Packed sequences over a cache, each with Q tiles of its own number: RaggedTileScheduler hands out the tiles
// that exist. With a long prefill beside many decodes, most places of a grid for the longest sequence have no
// tile, and finding that out took 0.3 us a place.
#pragma once

#include "flashjit/tma/tile_scheduler.cuh"

namespace flashjit::tma {

/// Each sequence's place among all Q tiles, [batch + 1], behind the counters.
__device__ __forceinline__ int* tiles_before(const Params& p) { return p.semaphores + kTileCounters; }

template <class P>
__device__ __forceinline__ int q_tiles_per_head(const Params& p, int b) {
  const int queries = queries_per_tile<P>(p);
  return (sequence_at<P>(p, b).seqlen_q(p) + queries - 1) / queries;
}

/// Adds up the tiles, and resets the counter by which CTAs take them. By one CTA.
template <class P>
__device__ void count_tiles(const Params& p) {
  constexpr int kMostWarps = 32;
  __shared__ int of_warp[kMostWarps];
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int lane = thread % 32, warp = thread / 32;
  let_next_grid_start<P>();
  if (thread == 0) *q_tile_counter(p) = 0, tiles_before(p)[0] = 0;
  int before = 0;
  for (int first = 0; first < p.batch; first += threads) {
    const int b = first + thread;
    const int own = b < p.batch ? q_tiles_per_head<P>(p, b) * static_cast<int>(scheduled_heads<P>(p)) : 0;
    int end = sum_up_to_lane(own);
    if (lane == 31) of_warp[warp] = end;
    __syncthreads();
    int all = 0;
    for (int other = 0; other < threads / 32; ++other) {
      if (other == warp) end += all;
      all += of_warp[other];
    }
    if (b < p.batch) tiles_before(p)[b + 1] = before + end;
    before += all;
    __syncthreads();
  }
}

/// A sequence, and the places of its tiles among all.
struct TilesOfSequence {
  int b = 0, begin = 0, end = 0;

  /// Goes on to the sequence of a tile that is not behind the last; it is this one's or a later one's.
  __device__ void find(const int* before, int batch, int index) {
    int behind = batch;
    while (behind - b > 1) {
      const int middle = (b + behind) / 2;
      (before[middle] <= index ? b : behind) = middle;
    }
    begin = before[b], end = before[b + 1];
  }
};

/// All Q tiles that exist, in any order.
template <class P>
struct RaggedTiles {
  const int* before;
  int batch;
  unsigned heads;

  __device__ RaggedTiles(const Params& p)
      : before(tiles_before(p)), batch(p.batch), heads(scheduled_heads<P>(p)) {}
  __device__ unsigned count() const { return static_cast<unsigned>(before[batch]); }
  __device__ TileCoord coord(unsigned index) const {
    TilesOfSequence of;
    of.find(before, batch, static_cast<int>(index));
    const unsigned at = index - static_cast<unsigned>(of.begin);
    return {static_cast<unsigned>(of.b) * heads + at % heads,
            at / heads,
            {0, row_warpgroups(P::kBr)},
            kScattersRows<P> ? kWhole : 0,
            {}};
  }
};

/// Sequence by sequence, a sequence's tiles as TileScheduler orders a head's.
template <class P>
struct RaggedTileScheduler {
  static constexpr bool kWindows = P::kMaskBounds > 1;
  int all;                  ///< tiles, read once: each next() waits for the counter as it is
  TilesOfSequence of = {};  ///< of the last tile

  // The interface of TileScheduler.
  template <class Start>
  static __device__ RaggedTileScheduler first(const Params& p, const Start&, int) {
    return {tiles_before(p)[p.batch]};
  }
  __device__ bool next(const Params& p, unsigned, TileCoord& found) {
    const int index = atomicAdd(q_tile_counter(p), 1);
    if (index >= all) return false;
    if (index >= of.end) of.find(tiles_before(p), p.batch, index);
    const unsigned heads = scheduled_heads<P>(p);
    TileOrder order(static_cast<unsigned>(of.end - of.begin) / heads, heads, 1);
    if (kQTileLptOrder<P>) order.use_lpt(grid_slots<P>(), kWindows);
    const OrderedTile tile = order.at(static_cast<unsigned>(index - of.begin));
    found.batch_head = static_cast<unsigned>(of.b) * heads + tile.head;
    found.q_tile = tile.tile;
    found.warpgroups = {0, row_warpgroups(P::kBr)};
    found.split = kScattersRows<P> ? kWhole : 0;
    return true;
  }
  template <class Start>
  __device__ void finish_tile(const Params&, const Start&, const TileCoord&) const {}
};

}  // namespace flashjit::tma
