// Which tiles a tile meets: the KV tiles of a Q tile in the forward pass, the Q tiles of a KV tile in the
// backward pass.
#pragma once

#include "flashjit/common/index_list.cuh"
#include "flashjit/common/kv_work_tile.cuh"
#include "flashjit/common/mask_walk.cuh"
#include "flashjit/common/semaphores.cuh"
#include "flashjit/common/visible.cuh"

namespace flashjit {

/// Of the tiles that one meets, a list or a range, keeps those of one split.
template <class P>
__device__ __forceinline__ void keep_split_of(const Params& p, int split, const int*& list, int& first,
                                              int& count) {
  const int begin = split_begin<P>(p, split, count), end = split_begin<P>(p, split + 1, count);
  if constexpr (kLists<P>) list += begin;
  first += begin, count = end - begin;
}

/// The KV tiles that one Q tile visits, in order: a contiguous range, or a list.
template <class P>
struct KvTiles {
  const int* list = nullptr;
  int first = 0, count = 0;

  __device__ KvTiles() {}
  __device__ KvTiles(const Params& p, const typename P::Head& head, int q_tile, Range q, int seqused_kv) {
    if constexpr (P::kIndices) {
      const bool has_work = q.begin < q.end && seqused_kv > 0;
      count = has_work ? tiles_of_list<P>(p, Sequence<P>(p, head.b), q_tile) : 0;
    } else if constexpr (kLists<P>) {
      const long long row = list_at<P>(p, head.b, head.h, q_tiles<P>(p), q_tile);
      list = p.lists.entries + row * kv_tiles<P>(p);
      count = p.lists.count[row];
    } else {
      const Range bounds = P::kv_bounds(p, head, q);
      const int end = min(bounds.end, seqused_kv);
      first = bounds.begin / P::kBc;
      count = end > bounds.begin ? (end + P::kBc - 1) / P::kBc - first : 0;
      EmptyEnds<P>::take_off(p, head, q, first, count);
    }
  }
  __device__ void keep_split(const Params& p, int split) { keep_split_of<P>(p, split, list, first, count); }
  /// Keeps those of a contiguous range that are in another.
  __device__ void keep(Range tiles) {
    const int end = min(first + count, tiles.end);
    first = max(first, tiles.begin);
    count = max(end - first, 0);
  }
  /// As a list has it.
  __device__ int entry(int i) const {
    if constexpr (kLists<P>) return list[i];
    return (first + i) * 2;
  }
  __device__ int tile(int i) const { return tile_of_entry<P>(entry(i)); }
  /// Whether block map and mask let every pair of the tile attend.
  __device__ bool full(const Params& p, const typename P::Head& head, Range q, int entry) const {
    if constexpr (kLists<P>) return is_full(entry);
    if constexpr (!P::kHasMask) return true;
    return mask_class<P>(p, head, q, tile_range(tile_of_entry<P>(entry), P::kBc, head.seqlen_kv)) ==
           TileClass::full;
  }
};

/// The Q tile in a stage, as the loader describes it to the warps that compute on it.
struct StagedTile {
  int head;  ///< query head; -1: there are no more tiles
  int tile;
  int full;      ///< block map and mask program let every pair attend
  int dq_order;  ///< how many KV tiles add to this Q tile's dQ before, when additions are ordered
};
static_assert(sizeof(StagedTile) == 16, "the families' layouts count on it");

/// The Q tiles of one query head that a KV tile meets, ascending: a contiguous range, or a list.
template <class P>
struct QTiles {
  int first = 0, count = 0;
  const int* list = nullptr;
  const int* rank = nullptr;

  __device__ QTiles(const Params& p, const typename P::Head& head, int kv_tile, Range kv) {
    if constexpr (kLists<P>) {
      const long long row = list_at<P>(p, head.b, head.h, kv_tiles<P>(p), kv_tile);
      list = p.lists.entries + row * q_tiles<P>(p);
      if constexpr (P::kDeterministic) rank = p.lists.rank + row * q_tiles<P>(p);
      count = p.lists.count[row];
    } else {
      const Range bounds = P::q_bounds(p, head, kv);
      first = bounds.begin / P::kBr;
      count = bounds.end > bounds.begin ? (bounds.end + P::kBr - 1) / P::kBr - first : 0;
    }
  }
  /// All Q tiles of the head instead, also those that the KV tile does not meet.
  __device__ void take_every(const typename P::Head& head) {
    first = 0, count = (head.seqlen_q + P::kBr - 1) / P::kBr;
  }
  __device__ void keep_split(const Params& p, int split) { keep_split_of<P>(p, split, list, first, count); }
  /// The index-th tile, as the compute loop needs to know it for the keys `kv`.
  __device__ StagedTile at(const Params& p, const typename P::Head& head, int index, int kv_tile, Range kv,
                           int seqused_kv) const {
    const int tile = kLists<P> ? tile_of_entry<P>(list[index]) : first + index;
    StagedTile staged{head.h, tile, 1, 0};
    if constexpr (kLists<P>) {
      staged.full = is_full(list[index]);
      if constexpr (P::kDeterministic) staged.dq_order = rank[tile];
    } else {
      if constexpr (P::kHasMask)
        staged.full = P::classify_tile(p, head, tile_range(tile, P::kBr, head.seqlen_q), kv, nullptr,
                                       nullptr) == TileClass::full;
      if constexpr (P::kDeterministic) staged.dq_order = (seqused_kv - 1) / P::kBc - kv_tile;
    }
    return staged;
  }
};

/// Which keys of a KV tile are a CTA's, and whether it visits every Q tile, also those that meet none of
/// them.
struct CtaKeys {
  int first, count;
  bool every_q_tile = false;
};

/// The Q tiles that a KV tile meets: of all query heads that share it, one head after the other. With split-Q
/// a split of each head's.
template <class P>
struct QWalk {
  int kv_tile, split, seqused_kv, head, end_head, index = 0;
  bool every;
  Range kv, own;

  __device__ QWalk(const Params& p, const Sequence<P>& sequence, const KvWorkTile<P>& work,
                   CtaKeys keys = {0, P::kBc})
      : kv_tile(work.kv_tile),
        split(work.split),
        seqused_kv(sequence.seqused_kv(p)),
        every(keys.every_q_tile) {
    const int group_size = p.qhead_per_kvhead(), begin = kv_tile * P::kBc + keys.first;
    head = work.h_kv * group_size;
    end_head = kListedDqOrder<P> || every || kv_tile * P::kBc < seqused_kv ? head + group_size : head;
    kv = tile_range(kv_tile, P::kBc, seqused_kv);
    own = {min(begin, seqused_kv), min(begin + keys.count, seqused_kv)};
  }
  __device__ StagedTile next(const Params& p, const Sequence<P>& sequence) {
    for (; head < end_head; ++head, index = 0) {
      const auto program_head = sequence.head(p, head);
      QTiles<P> tiles(p, program_head, kv_tile, kv);
      if (every) tiles.take_every(program_head);
      if constexpr (P::kSplit) tiles.keep_split(p, split);
      if (index < tiles.count) return tiles.at(p, program_head, index++, kv_tile, own, seqused_kv);
    }
    return {-1, 0, 0, 0};
  }
};

}  // namespace flashjit
