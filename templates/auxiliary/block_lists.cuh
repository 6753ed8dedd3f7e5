// Lists of the tiles that a block map and a mask program leave, one list for each row of tiles, so that a
// kernel visits only those tiles that attend. Rows are Q tiles in the forward pass and KV tiles in the
// backward pass; columns are the other ones.
#pragma once

#include "flashjit/common/ptx.cuh"
#include "flashjit/common/tile_class.cuh"
#include "flashjit/common/tile_walk.cuh"

namespace flashjit::auxiliary {

constexpr int kListThreads = 128;

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

/// The bounds of what the mask reads over a range: reads at queries, or at keys.
template <class P, bool kQueries>
struct Reads {
  static constexpr int kCount = kQueries ? P::kQReads : P::kKvReads;
  Interval bounds[kCount > 0 ? kCount : 1];

  /// By the threads `first`, `first` + `stride`, ... of those that share the work.
  __device__ Reads(const Params& p, const typename P::Head& head, Range range, int first, int stride) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      int low = 0x7fffffff, high = static_cast<int>(0x80000000);
      for (int at = range.begin + first; at < range.end; at += stride) {
        const int value = kQueries ? P::q_read(p, head, i, at) : P::kv_read(p, head, i, at);
        low = min(low, value), high = max(high, value);
      }
      bounds[i] = {low, high};
    }
  }
  __device__ void join_warp() {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      bounds[i] = {__reduce_min_sync(kWholeWarp, static_cast<int>(bounds[i].low)),
                   __reduce_max_sync(kWholeWarp, static_cast<int>(bounds[i].high))};
  }
};

/// Evaluates every pair of a tile with the whole warp, until both kinds have been seen.
template <class P>
__device__ __noinline__ TileClass evaluate_tile(const Params& p, const typename P::Head& head, Range q,
                                                Range kv) {
  bool any = false, all = true;
  for (int row = q.begin; row < q.end; ++row) {
    for (int column = kv.begin + static_cast<int>(threadIdx.x) % 32; column < kv.end; column += 32) {
      const bool attends = pair_attends<P>(p, head, row, column);
      any |= attends;
      all &= attends;
    }
    if (__any_sync(kWholeWarp, any) && !__all_sync(kWholeWarp, all)) return TileClass::partial;
  }
  return __all_sync(kWholeWarp, all) ? TileClass::full : TileClass::empty;
}

/// The class of the lane's own tile; every lane must call it. Lanes without a tile say `empty` beforehand.
template <class P>
__device__ __forceinline__ TileClass evaluate_partial(const Params& p, const typename P::Head& head, Range q,
                                                      Range kv, TileClass kind) {
  const int lane = threadIdx.x % 32;
  unsigned open = __ballot_sync(kWholeWarp, kind == TileClass::partial);
  for (; open != 0; open &= open - 1) {
    const int owner = __ffs(open) - 1;
    const Range tile_q{__shfl_sync(kWholeWarp, q.begin, owner), __shfl_sync(kWholeWarp, q.end, owner)};
    const Range tile_kv{__shfl_sync(kWholeWarp, kv.begin, owner), __shfl_sync(kWholeWarp, kv.end, owner)};
    const TileClass found = evaluate_tile<P>(p, head, tile_q, tile_kv);
    if (lane == owner) kind = found;
  }
  return kind;
}

/// One block of 128 threads for one list; grid: batch * heads_q * rows, of which broadcast lists leave some
/// without work. With ordered additions it also says, in `rank`, which tiles it lists, for list_ranks.
template <class P>
__device__ void block_lists(const Params& p) {
  const int rows = P::kBackward ? kv_tiles<P>(p) : q_tiles<P>(p);
  const int columns = P::kBackward ? q_tiles<P>(p) : kv_tiles<P>(p);
  const long long list = blockIdx.x;
  if (list >= static_cast<long long>(list_batch<P>(p)) * list_heads<P>(p) * rows) return;
  const int row = static_cast<int>(list % rows);
  const int h = static_cast<int>(list / rows % list_heads<P>(p));
  const Sequence<P> sequence(p, static_cast<int>(list / rows / list_heads<P>(p)));
  const auto head = sequence.head(p, h);
  const int seqlen_q = sequence.seqlen_q(p), kv_limit = sequence.kv_limit(p);

  const Range row_range =
      P::kBackward ? tile_range(row, P::kBc, kv_limit) : tile_range(row, P::kBr, seqlen_q);
  Reads<P, !P::kBackward> row_reads(p, head, row_range, threadIdx.x % 32, 32);
  row_reads.join_warp();

  int* entries = p.lists.entries + list * columns;
  int count = 0;
  for (int first = 0; first < columns; first += kListThreads) {
    const int column = first + static_cast<int>(threadIdx.x);
    const Range column_range =
        P::kBackward ? tile_range(column, P::kBr, seqlen_q) : tile_range(column, P::kBc, kv_limit);
    const Range q = P::kBackward ? column_range : row_range, kv = P::kBackward ? row_range : column_range;
    TileClass kind = TileClass::empty;
    if (q.begin < q.end && kv.begin < kv.end) {
      const Reads<P, P::kBackward> column_reads(p, head, column_range, 0, 1);
      kind = tile_class<P>(p, head, q, kv, P::kBackward ? column_reads.bounds : row_reads.bounds,
                           P::kBackward ? row_reads.bounds : column_reads.bounds);
    }
    if constexpr (P::kEvaluateTiles) kind = evaluate_partial<P>(p, head, q, kv, kind);
    const bool listed = kind != TileClass::empty;
    const Place place = place_among_threads(listed);
    if (listed) entries[count + place.before] = column * 2 + (kind == TileClass::full ? 1 : 0);
    if constexpr (P::kBackward && P::kDeterministic) {
      if (column < columns) p.lists.rank[list * columns + column] = listed;
    }
    count += place.total;
  }
  if (threadIdx.x == 0) p.lists.count[list] = count;
}

/// From "which KV tiles list a Q tile" to the place of each among them, the last first: the order in which
/// they add to its dQ. One thread for each column of all lists; grid: batch * heads_q * columns / 128,
/// rounded up.
template <class P>
__device__ void list_ranks(const Params& p) {
  const int rows = kv_tiles<P>(p), columns = q_tiles<P>(p);
  const long long at = static_cast<long long>(blockIdx.x) * kListThreads + threadIdx.x;
  if (at >= static_cast<long long>(list_batch<P>(p)) * list_heads<P>(p) * columns) return;
  int* rank = p.lists.rank + at / columns * rows * columns + at % columns;
  int before = 0;
  for (int row = rows - 1; row >= 0; --row) {
    const int listed = rank[static_cast<long long>(row) * columns];
    rank[static_cast<long long>(row) * columns] = before;
    before += listed;
  }
}

}  // namespace flashjit::auxiliary
