// Turns a block map into lists of tiles, one list for each row of tiles, so that a kernel visits only those
// tiles that attend. Rows are Q tiles in the forward pass and KV tiles in the backward pass; columns are the
// other ones.
#pragma once

#include "flashjit/common/ptx.cuh"
#include "flashjit/common/tile_class.cuh"

namespace flashjit::auxiliary {

constexpr int kListThreads = 128;

/// The part of [0, length) that tile `tile` covers.
__device__ __forceinline__ Range tile_range(int tile, int size, int length) {
  return {tile * size, min(tile * size + size, length)};
}

template <class P>
__device__ __forceinline__ TileClass listed_tile_class(const Params& p, int b, int h, int q_tile,
                                                       int kv_tile) {
  return tile_class<P>(p, b, h, tile_range(q_tile, P::kBr, p.seqlen_q),
                       tile_range(kv_tile, P::kBc, p.seqlen_kv));
}

/// How many threads of the block before this one say yes, and how many say so in all. Every thread must call
/// it.
struct Place {
  int before, total;
};

__device__ __forceinline__ Place place_among_threads(bool yes) {
  __shared__ int warp_total[kListThreads / 32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const unsigned votes = __ballot_sync(kWholeWarp, yes);
  __syncthreads();
  if (lane == 0) warp_total[warp] = __popc(votes);
  __syncthreads();
  Place place = {__popc(votes & ((1u << lane) - 1u)), 0};
#pragma unroll
  for (int other = 0; other < kListThreads / 32; ++other) {
    if (other < warp) place.before += warp_total[other];
    place.total += warp_total[other];
  }
  return place;
}

/// How many KV tiles before `kv_tile` list the same Q tile: the order in which they add to its dQ.
template <class P>
__device__ __forceinline__ int rank_in_q_tile(const Params& p, int b, int h, int q_tile, int kv_tile) {
  int rank = 0;
  for (int other = 0; other < kv_tile; ++other) {
    if (listed_tile_class<P>(p, b, h, q_tile, other) != TileClass::empty) ++rank;
  }
  return rank;
}

/// One block of 128 threads for one row of one map; grid: batch * heads_q * rows, of which a broadcast map
/// leaves some without work. Padding is the kernels' business: a listed tile may lie beyond a batch entry's
/// keys.
template <class P>
__device__ void block_lists(const Params& p) {
  const int q_tiles = (p.seqlen_q + P::kBr - 1) / P::kBr;
  const int kv_tiles = (p.seqlen_kv + P::kBc - 1) / P::kBc;
  const int rows = P::kBackward ? kv_tiles : q_tiles;
  const int columns = P::kBackward ? q_tiles : kv_tiles;
  const long long list = blockIdx.x;
  if (list >= static_cast<long long>(p.map_batch) * p.map_heads * rows) return;
  const int row = static_cast<int>(list % rows);
  const int h = static_cast<int>(list / rows % p.map_heads);
  const int b = static_cast<int>(list / rows / p.map_heads);

  int* entries = p.lists.entries + list * columns;
  int count = 0;
  for (int first = 0; first < columns; first += kListThreads) {
    const int column = first + static_cast<int>(threadIdx.x);
    const int q_tile = P::kBackward ? column : row;
    const int kv_tile = P::kBackward ? row : column;
    TileClass kind = TileClass::empty;
    if (column < columns) kind = listed_tile_class<P>(p, b, h, q_tile, kv_tile);
    const bool listed = kind != TileClass::empty;
    const Place place = place_among_threads(listed);
    if (listed) {
      const int at = count + place.before;
      entries[at] = column * 2 + (kind == TileClass::full ? 1 : 0);
      if constexpr (P::kBackward && P::kDeterministic) {
        p.lists.rank[list * columns + at] = rank_in_q_tile<P>(p, b, h, q_tile, kv_tile);
      }
    }
    count += place.total;
  }
  if (threadIdx.x == 0) p.lists.count[list] = count;
}

}  // namespace flashjit::auxiliary
