// Masks that no bounds describe, walked without lists: tiles are classed by intervals as they are visited,
// and what the class says is empty at either end of a Q tile's keys is left out.
#pragma once

#include "flashjit/common/tile_lists.cuh"
#include "flashjit/common/visible.cuh"

namespace flashjit {

/// What the mask reads by the query alone, over some queries: of few the bounds, of more anything. By whole
/// warps, whose lanes read a query's each: a work tile's first scores wait for it.
template <class P>
struct RowTerms {
  static constexpr int kMostQueries = 16;
  Interval bounds[P::kMaskRowTerms + 1];

  __device__ __forceinline__ RowTerms() {
    for (Interval& term : bounds) term = any_int();
  }
  __device__ __forceinline__ RowTerms(const Params& p, const typename P::Head& head, Range q) : RowTerms() {
    if (q.begin >= q.end || q.end - q.begin > kMostQueries) return;
    const int row = min(q.begin + static_cast<int>(threadIdx.x) % kMostQueries, q.end - 1);
#pragma unroll
    for (int i = 0; i < P::kMaskRowTerms; ++i) {
      int low = P::mask_row_term(p, head, i, row), high = low;
#pragma unroll
      for (int lanes = kMostQueries / 2; lanes > 0; lanes /= 2) {
        low = min(low, __shfl_xor_sync(kWholeWarp, low, lanes));
        high = max(high, __shfl_xor_sync(kWholeWarp, high, lanes));
      }
      bounds[i] = {low, high};
    }
  }
};

/// The class of a tile by the mask program. What the mask reads by the key alone may be anything.
template <class P>
__device__ __forceinline__ TileClass mask_class(const Params& p, const typename P::Head& head, Range q,
                                                Range kv, const RowTerms<P>& rows = {}) {
  Interval columns[P::kMaskColumnTerms + 1];
  for (Interval& term : columns) term = any_int();
  return P::classify_tile(p, head, q, kv, rows.bounds, columns);
}

/// Whether neither bounds nor lists say which tiles a mask leaves.
template <class P>
constexpr bool kClassesTiles = P::kListed && !kLists<P> && !P::kIndices;

/// Takes the empty tiles off both ends of the KV tiles of a Q tile.
template <class P, bool kTakesOff = kClassesTiles<P>>
struct EmptyEnds {
  static __device__ __forceinline__ void take_off(const Params&, const typename P::Head&, Range, int&, int&) {
  }
};

/// The keys that all of some queries attend to, as far as the mask says it without its pairs.
template <class P, bool kClasses = kClassesTiles<P>>
struct FullKeys {
  static __device__ __forceinline__ Range of(const Params& p, const typename P::Head& head, Range q) {
    return P::kv_bounds_of_all(p, head, q);
  }
};

/// The most of `count` tiles that are of a class together, counted from one end. By bisection: a part of what
/// intervals call empty, or full, they call so, too.
template <class IsAlike>
__device__ __forceinline__ int longest_run(int count, const IsAlike& is_alike) {
  if (count <= 0 || !is_alike(1)) return 0;
  int known = 1;
  while (known < count) {
    const int more = known + (count - known + 1) / 2;
    if (is_alike(more))
      known = more;
    else
      count = more - 1;
  }
  return known;
}

/// The same by a warp, whose lanes try a length each. ../sm90/NOTES.md#positions-of-ranks says what it gains.
template <class IsAlike>
__device__ __forceinline__ int longest_run_of_warp(int count, const IsAlike& is_alike) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int known = 0;
  while (known < count) {
    const int step = (count - known + 31) / 32, length = known + (lane + 1) * step;
    const unsigned alike = __ballot_sync(kWholeWarp, length <= count && is_alike(length));
    known += __popc(alike) * step;
    if (step == 1) break;
    count = min(count, known + step - 1);
  }
  return known;
}

/// The classes of a Q tile's KV tiles.
template <class P>
struct ClassedTiles {
  const Params& p;
  const typename P::Head& head;
  Range q;
  RowTerms<P> rows = {};

  __device__ __forceinline__ bool are(TileClass kind, int first, int count) const {
    const Range keys{first * P::kBc, min((first + count) * P::kBc, head.seqlen_kv)};
    return mask_class<P>(p, head, q, keys, rows) == kind;
  }
};

/// Producers find them, too, with few registers: what the mask reads by the query may be anything.
template <class P>
struct EmptyEnds<P, true> {
  static __device__ __forceinline__ void take_off(const Params& p, const typename P::Head& head, Range q,
                                                  int& first, int& count) {
    const ClassedTiles<P> classed{p, head, q};
    const int before =
        longest_run(count, [&](int several) { return classed.are(TileClass::empty, first, several); });
    first += before, count -= before;
    count -= longest_run(
        count, [&](int several) { return classed.are(TileClass::empty, first + count - several, several); });
  }
};

/// The full tiles from the first or the second tile on that is not empty, such as a cache's keys before the
/// queries' own.
template <class P>
struct FullKeys<P, true> {
  static __device__ __forceinline__ Range of(const Params& p, const typename P::Head& head, Range q) {
    if (q.begin >= q.end) return {0, 0};
    const Range bounds = P::kv_bounds(p, head, q);
    int first = bounds.begin / P::kBc, count = (bounds.end + P::kBc - 1) / P::kBc - first;
    EmptyEnds<P>::take_off(p, head, q, first, count);
    const ClassedTiles<P> classed{p, head, q, {p, head, q}};
    for (int skipped = 0; skipped < min(2, count); ++skipped) {
      const int begin = first + skipped;
      const int full = longest_run_of_warp(
          count - skipped, [&](int several) { return classed.are(TileClass::full, begin, several); });
      if (full > 0) return {begin * P::kBc, (begin + full) * P::kBc};
    }
    return {0, 0};
  }
};

}  // namespace flashjit
