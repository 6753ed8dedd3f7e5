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
    int end = b < p.batch ? q_tiles_per_head<P>(p, b) * static_cast<int>(scheduled_heads<P>(p)) : 0;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const int other = __shfl_up_sync(kWholeWarp, end, lanes);
      if (lane >= lanes) end += other;
    }
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

/// Sequence by sequence, a sequence's tiles as TileScheduler orders a head's.
template <class P>
struct RaggedTileScheduler {
  static constexpr bool kWindows = P::kMaskBounds > 1;
  int b = 0, begin = 0, end = 0;  ///< the sequence of the last tile, and its place

  // The interface of TileScheduler.
  template <class Start>
  static __device__ RaggedTileScheduler first(const Params&, const Start&, int) {
    return {};
  }
  __device__ bool next(const Params& p, unsigned, TileCoord& found) {
    const int index = atomicAdd(q_tile_counter(p), 1);
    const int* before = tiles_before(p);
    if (index >= end && !find(before, p.batch, index)) return false;
    const unsigned heads = scheduled_heads<P>(p), at = static_cast<unsigned>(index - begin);
    TileOrder order(static_cast<unsigned>(end - begin) / heads, heads, 1);
    if (kQTileLptOrder<P>) order.use_lpt(grid_slots<P>(), kWindows);
    const OrderedTile tile = order.at(at);
    found.batch_head = static_cast<unsigned>(b) * heads + tile.head;
    found.q_tile = tile.tile;
    found.warpgroups = {0, row_warpgroups(P::kBr)};
    found.split = kScattersRows<P> ? kWhole : 0;
    return true;
  }
  template <class Start>
  __device__ void finish_tile(const Params&, const Start&, const TileCoord&) const {}

 private:
  /// The sequence of a tile behind the last one's; false if there is none.
  __device__ bool find(const int* before, int batch, int index) {
    if (index >= before[batch]) return false;
    int high = batch;
    while (high - b > 1) {
      const int middle = (b + high) / 2;
      (before[middle] <= index ? b : high) = middle;
    }
    begin = before[b], end = before[b + 1];
    return true;
  }
};

}  // namespace flashjit::tma
