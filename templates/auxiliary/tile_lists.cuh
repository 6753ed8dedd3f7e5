// Lists of the tiles with attending pairs, by block map and mask program, one list for each row of tiles, so
// that a kernel visits only those. Rows are Q tiles in the forward pass and KV tiles in the backward pass;
// columns are the other ones.
#pragma once

#include "flashjit/common/ptx.cuh"
#include "flashjit/common/tile_class.cuh"
#include "flashjit/common/tile_walk.cuh"

namespace flashjit::auxiliary {

constexpr int kListThreads = 128;

/// How many threads of the CTA before this one have a true value, and how many in all. Every thread must call
/// it.
struct Prefix {
  int before, total;
};

__device__ __forceinline__ Prefix prefix_among_threads(bool yes) {
  __shared__ int warp_total[kListThreads / 32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const unsigned votes = __ballot_sync(kWholeWarp, yes);
  __syncthreads();
  if (lane == 0) warp_total[warp] = __popc(votes);
  __syncthreads();
  Prefix prefix = {__popc(votes & ((1u << lane) - 1u)), 0};
#pragma unroll
  for (int other = 0; other < kListThreads / 32; ++other) {
    if (other < warp) prefix.before += warp_total[other];
    prefix.total += warp_total[other];
  }
  return prefix;
}

/// One set of lists: a batch entry and a head, or all that share the lists.
template <class P>
struct ListSet {
  long long at;
  Sequence<P> sequence;
  typename P::Head head;

  __device__ ListSet(const Params& p, long long at_)
      : at(at_),
        sequence(p, static_cast<int>(at_ / list_heads<P>(p))),
        head(sequence.head(p, static_cast<int>(at_ % list_heads<P>(p)))) {}

  static __device__ long long count(const Params& p) {
    return static_cast<long long>(list_batch<P>(p)) * list_heads<P>(p);
  }
  __device__ Range q_rows(const Params& p, int tile) const {
    return tile_range(tile, P::kBr, sequence.seqlen_q(p));
  }
  __device__ Range kv_rows(const Params& p, int tile) const {
    return tile_range(tile, P::kBc, sequence.seqused_kv(p));
  }
};

/// The bounds of the mask's row terms over a Q tile, or of its column terms over a KV tile.
template <class P, bool kQueries>
struct Reads {
  static constexpr int kCount = kQueries ? P::kMaskRowTerms : P::kMaskColumnTerms;
  Interval bounds[kCount > 0 ? kCount : 1];

  __device__ Reads(const Params& p, const ListSet<P>& set, int tile) {
    const int* reads = memory(p, set, tile);
#pragma unroll
    for (int i = 0; i < kCount; ++i) bounds[i] = {reads[2 * i], reads[2 * i + 1]};
  }

  /// Finds them by a whole warp, for tile_lists.
  static __device__ void store(const Params& p, const ListSet<P>& set, int tile) {
    const Range range = kQueries ? set.q_rows(p, tile) : set.kv_rows(p, tile);
    int* reads = memory(p, set, tile);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      int low = 0x7fffffff, high = static_cast<int>(0x80000000);
      for (int at = range.begin + static_cast<int>(threadIdx.x) % 32; at < range.end; at += 32) {
        const int value =
            kQueries ? P::mask_row_term(p, set.head, i, at) : P::mask_column_term(p, set.head, i, at);
        low = min(low, value), high = max(high, value);
      }
      reads[2 * i] = __reduce_min_sync(kWholeWarp, low);
      reads[2 * i + 1] = __reduce_max_sync(kWholeWarp, high);
    }
  }

 private:
  static __device__ int* memory(const Params& p, const ListSet<P>& set, int tile) {
    if (kQueries) return p.lists.term_bounds + (set.at * q_tiles<P>(p) + tile) * P::kMaskRowTerms * 2;
    return p.lists.term_bounds + (ListSet<P>::count(p) * q_tiles<P>(p) * P::kMaskRowTerms +
                                  (set.at * kv_tiles<P>(p) + tile) * P::kMaskColumnTerms) *
                                     2;
  }
};

/// One warp for one tile of rows of one set of lists; grid: sets * (q_tiles + kv_tiles) / 4, rounded up. So
/// each row is read once instead of once for each list.
template <class P>
__device__ void term_bounds(const Params& p) {
  let_next_grid_start<P>();
  const int tiles = q_tiles<P>(p) + kv_tiles<P>(p);
  const long long work = blockIdx.x * (kListThreads / 32ll) + threadIdx.x / 32;
  if (work >= ListSet<P>::count(p) * tiles) return;
  const ListSet<P> set(p, work / tiles);
  const int tile = static_cast<int>(work % tiles);
  if (tile < q_tiles<P>(p))
    Reads<P, true>::store(p, set, tile);
  else
    Reads<P, false>::store(p, set, tile - q_tiles<P>(p));
}

/// Evaluates the pairs of a tile by the whole warp, until one attends and one does not.
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

/// The class of the lane's own tile; every lane must call it. Lanes without a tile pass `empty`.
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

/// The row bits of an entry: which rows of the Q tile meet a KV tile.
template <class P>
__device__ __forceinline__ int rows_that_meet(const Params& p, const ListSet<P>& set, Range q, Range kv) {
  int bits = 0;
#pragma unroll
  for (int n = 0; n < P::kBr / P::kListedRows; ++n) {
    const int row = q.begin + n * P::kListedRows;
    if (row < q.end && kv.begin < kv.end && pair_attends<P>(p, set.head, row, kv.begin))
      bits |= 1 << (kListedRowsBit + n);
  }
  return bits;
}

/// Lists the tiles that any rows of the Q tile meet, with their row bits; returns how many. A warpgroup that
/// skips a tile should have another to compute meanwhile, so tiles that the first rows meet, but not all,
/// alternate with those that only later rows meet. Tiles are visited from the last on: the list ends with one
/// for the later rows, whose groups then begin while the others end the Q tile before; before it are those
/// for all rows. Two stages leave no room to alternate.
template <class P>
__device__ __forceinline__ int list_by_rows(const Params& p, const ListSet<P>& set, Range q, int columns,
                                            int* entries) {
  enum Kind { none, first, later, all };
  constexpr int kFirstRows = 1 << kListedRowsBit;
  const int groups = (q.end - q.begin + P::kListedRows - 1) / P::kListedRows;
  int bits = 0;
  const auto look_at = [&](int column) {
    bits = rows_that_meet<P>(p, set, q, set.kv_rows(p, column));
    if (bits == 0) return none;
    return P::kStages <= 2 || __popc(bits) == groups ? all : bits & kFirstRows ? first : later;
  };
  int count[4] = {};
  for (int begin = 0; begin < columns; begin += kListThreads) {
    const Kind kind = look_at(begin + static_cast<int>(threadIdx.x));
    for (const Kind each : {first, later, all}) count[each] += __syncthreads_count(kind == each);
  }
  const int in_all = count[first] + count[later] + count[all];
  const int others = max(count[later] - 1, 0), in_turns = min(count[first], others);
  int listed[4] = {};
  for (int begin = 0; begin < columns; begin += kListThreads) {
    const int column = begin + static_cast<int>(threadIdx.x);
    const Kind kind = look_at(column);
    for (const Kind each : {first, later, all}) {
      const Prefix among = prefix_among_threads(kind == each);
      const int n = listed[each] + among.before;
      const int index = each == all     ? count[first] + others + n
                        : each == first ? n + min(n, in_turns)
                        : n < others    ? n + min(n + 1, in_turns)
                                        : in_all - 1;
      if (kind == each) entries[index] = column * 2 + 1 + bits;
      listed[each] += among.total;
    }
  }
  return in_all;
}

/// Resets the counter of Q tiles before a forward pass with lists, by one CTA, for calls that are given their
/// lists; else tile_lists does it.
template <class P>
__device__ void reset_work(const Params& p) {
  let_next_grid_start<P>();
  if (threadIdx.x == 0) *q_tile_counter(p) = 0;
}

/// One CTA of 128 threads for one list; grid: sets * rows, some without work where lists are shared. With
/// ordered additions it also marks in `rank` which tiles it lists, for list_ranks.
template <class P>
__device__ void tile_lists(const Params& p) {
  let_next_grid_start<P>();
  if constexpr (P::kMaskRowTerms + P::kMaskColumnTerms > 0) wait_for_prior_grid<P>();
  const int rows = P::kBackward ? kv_tiles<P>(p) : q_tiles<P>(p);
  const int columns = P::kBackward ? q_tiles<P>(p) : kv_tiles<P>(p);
  const long long list = blockIdx.x;
  if (list >= ListSet<P>::count(p) * rows) return;
  const int row = static_cast<int>(list % rows);
  const ListSet<P> set(p, list / rows);
  const Range row_range = P::kBackward ? set.kv_rows(p, row) : set.q_rows(p, row);
  const Reads<P, !P::kBackward> row_reads(p, set, row);

  int* entries = p.lists.entries + list * columns;
  int count = 0;
  if constexpr (kEntriesHaveRowBits<P>) {
    count = list_by_rows(p, set, row_range, columns, entries);
  } else {
    for (int first = 0; first < columns; first += kListThreads) {
      const int column = first + static_cast<int>(threadIdx.x);
      const Range column_range = P::kBackward ? set.q_rows(p, column) : set.kv_rows(p, column);
      const Range q = P::kBackward ? column_range : row_range, kv = P::kBackward ? row_range : column_range;
      TileClass kind = TileClass::empty;
      if (q.begin < q.end && kv.begin < kv.end) {
        const Reads<P, P::kBackward> column_reads(p, set, column);
        kind = tile_class<P>(p, set.head, q, kv, P::kBackward ? column_reads.bounds : row_reads.bounds,
                             P::kBackward ? row_reads.bounds : column_reads.bounds);
      }
      if constexpr (P::kEvaluateTiles) kind = evaluate_partial<P>(p, set.head, q, kv, kind);
      const bool listed = kind != TileClass::empty;
      const Prefix prefix = prefix_among_threads(listed);
      if (listed) entries[count + prefix.before] = column * 2 + (kind == TileClass::full ? 1 : 0);
      if constexpr (P::kBackward && P::kDeterministic) {
        if (column < columns) p.lists.rank[list * columns + column] = listed;
      }
      count += prefix.total;
    }
  }
  if (threadIdx.x == 0) p.lists.count[list] = count;
  if constexpr (!P::kBackward) {
    if (list == 0 && p.semaphores != nullptr) reset_work<P>(p);
  }
}

/// Finds the rank of each KV tile among those that list a Q tile, the last first: the order in which they add
/// to its dQ. One CTA for 32 columns of a set of lists, each warp for a part of the rows; grid: sets *
/// columns / 32, rounded up.
template <class P>
__device__ void list_ranks(const Params& p) {
  constexpr int kParts = kListThreads / 32;
  __shared__ int listed_in[kParts][32];
  const int rows = kv_tiles<P>(p), columns = q_tiles<P>(p), column_blocks = (columns + 31) / 32;
  const long long set = blockIdx.x / column_blocks;
  if (set >= ListSet<P>::count(p)) return;
  const int part = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int column = static_cast<int>(blockIdx.x % column_blocks) * 32 + lane;
  const long long first = static_cast<long long>(rows) * part / kParts;
  const long long end = column < columns ? static_cast<long long>(rows) * (part + 1) / kParts : first;
  int* rank = p.lists.rank + set * rows * columns + column;

  int listed = 0;
#pragma unroll 8
  for (long long row = first; row < end; ++row) listed += rank[row * columns];
  listed_in[part][lane] = listed;
  __syncthreads();
  int before = 0;
  for (int later = part + 1; later < kParts; ++later) before += listed_in[later][lane];
  for (long long row = end - 1; row >= first; --row) {
    const int one = rank[row * columns];
    rank[row * columns] = before;
    before += one;
  }
}

}  // namespace flashjit::auxiliary
