// Which tiles a tile visits: the KV tiles of a Q tile in the forward pass, the Q tiles of a KV tile in the
// backward pass.
#pragma once

#include "flashjit/common/joined_list.cuh"
#include "flashjit/common/kv_work_tile.cuh"
#include "flashjit/common/mask_walk.cuh"
#include "flashjit/common/semaphores.cuh"
#include "flashjit/common/visible.cuh"

namespace flashjit {

/// Tiles in order: a contiguous range, or entries of a list.
template <class P>
struct TileRange {
  const int* list = nullptr;
  int first = 0, count = 0;

  __device__ void keep_split(const Params& p, int split) {
    const int begin = split_begin<P>(p, split, count), end = split_begin<P>(p, split + 1, count);
    first += begin, count = end - begin;
  }
  /// All Q tiles of the head instead, also where the KV tile does not visit them.
  __device__ void take_every(const typename P::Head& head) {
    first = 0, count = (head.seqlen_q + P::kBr - 1) / P::kBr;
  }
};
template <class P>
struct TileList : TileRange<P> {
  __device__ void keep_split(const Params& p, int split) {
    this->list += split_begin<P>(p, split, this->count);
    TileRange<P>::keep_split(p, split);
  }
};

// The KV tiles that one Q tile visits, in order; KvTiles<P> has one of these types. entry(): as a list has
// it. full(): whether block map and mask let every pair of an entry's tile attend.

/// A range: the tiles with keys that the mask's bounds let attend.
template <class P>
struct BoundedKvTiles : TileRange<P> {
  using TileRange<P>::first, TileRange<P>::count;

  __device__ BoundedKvTiles() {}
  __device__ BoundedKvTiles(const Params& p, const typename P::Head& head, int, Range q, int seqused_kv) {
    const Range bounds = P::kv_bounds(p, head, q);
    const int end = min(bounds.end, seqused_kv);
    first = bounds.begin / P::kBc;
    count = end > bounds.begin ? (end + P::kBc - 1) / P::kBc - first : 0;
    EmptyEnds<P>::take_off(p, head, q, first, count);
  }
  __device__ int entry(int i) const { return (first + i) * 2; }
  __device__ bool full(const Params& p, const typename P::Head& head, Range q, int entry) const {
    if constexpr (!P::kHasMask) return true;
    return mask_class<P>(p, head, q, tile_range(tile_of_entry<P>(entry), P::kBc, head.seqlen_kv)) ==
           TileClass::full;
  }
};
/// Tiles of a query's list of keys.
template <class P>
struct KvTilesOfIndices : BoundedKvTiles<P> {
  __device__ KvTilesOfIndices() {}
  __device__ KvTilesOfIndices(const Params& p, const typename P::Head& head, int q_tile, Range q,
                              int seqused_kv) {
    const bool has_work = q.begin < q.end && seqused_kv > 0;
    this->count = has_work ? tiles_of_list<P>(p, Sequence<P>(p, head.b), q_tile) : 0;
  }
};
template <class P>
struct ListedKvTiles : TileList<P> {
  using TileList<P>::list, TileList<P>::count;

  __device__ ListedKvTiles() {}
  __device__ ListedKvTiles(const Params& p, const typename P::Head& head, int q_tile, Range, int) {
    const long long row = list_at<P>(p, head.b, head.h, q_tiles<P>(p), q_tile);
    list = p.lists.entries + row * kv_tiles<P>(p);
    count = p.lists.count[row];
  }
  __device__ int entry(int i) const { return list[i]; }
  __device__ bool full(const Params&, const typename P::Head&, Range, int entry) const {
    return is_full(entry);
  }
};

template <class P>
using VisitedKvTiles = Conditional<P::kIndices, KvTilesOfIndices<P>,
                                   Conditional<kLists<P>, ListedKvTiles<P>, BoundedKvTiles<P>>>;

template <class P>
struct KvTiles : VisitedKvTiles<P> {
  using Visited = VisitedKvTiles<P>;
  using Visited::Visited;
  __device__ KvTiles() {}

  /// Keeps the tiles of a contiguous range that are in another.
  __device__ void keep(Range tiles) {
    const int end = min(this->first + this->count, tiles.end);
    this->first = max(this->first, tiles.begin);
    this->count = max(end - this->first, 0);
  }
  __device__ int tile(int i) const { return tile_of_entry<P>(this->entry(i)); }
};

/// The Q tile in a stage, as the loader describes it to the warps that compute on it.
struct StagedTile {
  int head;  ///< query head; -1: there are no more tiles
  int tile;
  int full;      ///< block map and mask program let every pair attend
  int dq_order;  ///< how many KV tiles add to this Q tile's dQ before, when additions are ordered
};
static_assert(sizeof(StagedTile) == 16, "the families' layouts count on it");

// The Q tiles of one query head that a KV tile visits, ascending; QTiles<P> names one of these types. at():
// the index-th tile, as the compute loop needs to know it for the keys `kv`.

template <class P>
struct BoundedQTiles : TileRange<P> {
  using TileRange<P>::first, TileRange<P>::count;

  __device__ BoundedQTiles(const Params& p, const typename P::Head& head, int, Range kv) {
    const Range bounds = P::q_bounds(p, head, kv);
    first = bounds.begin / P::kBr;
    count = bounds.end > bounds.begin ? (bounds.end + P::kBr - 1) / P::kBr - first : 0;
  }
  __device__ StagedTile at(const Params& p, const typename P::Head& head, int index, int kv_tile, Range kv,
                           int seqused_kv) const {
    const int tile = first + index;
    StagedTile staged{head.h, tile, 1, 0};
    if constexpr (P::kHasMask)
      staged.full = P::classify_tile(p, head, tile_range(tile, P::kBr, head.seqlen_q), kv, nullptr,
                                     nullptr) == TileClass::full;
    if (P::kDeterministic) staged.dq_order = (seqused_kv - 1) / P::kBc - kv_tile;
    return staged;
  }
};
template <class P>
struct ListedQTiles : TileList<P> {
  using TileList<P>::list, TileList<P>::count;
  const int* rank = nullptr;

  __device__ ListedQTiles(const Params& p, const typename P::Head& head, int kv_tile, Range) {
    const long long row = list_at<P>(p, head.b, head.h, kv_tiles<P>(p), kv_tile);
    list = p.lists.entries + row * q_tiles<P>(p);
    if constexpr (P::kDeterministic) rank = p.lists.rank + row * q_tiles<P>(p);
    count = p.lists.count[row];
  }
  __device__ StagedTile at(const Params&, const typename P::Head& head, int index, int, Range, int) const {
    const int tile = tile_of_entry<P>(list[index]);
    StagedTile staged{head.h, tile, 1, 0};
    staged.full = is_full(list[index]);
    if (P::kDeterministic) staged.dq_order = rank[tile];
    return staged;
  }
};
/// Two at a time, the second as `dq_order`; -1 where there is none.
template <class P>
struct DoubledQTiles : ListedQTiles<P> {
  using ListedQTiles<P>::list;
  int tiles;

  __device__ DoubledQTiles(const Params& p, const typename P::Head& head, int kv_tile, Range kv)
      : ListedQTiles<P>(p, head, kv_tile, kv), tiles(this->count) {
    this->count = (tiles + 1) / 2;
  }
  __device__ StagedTile at(const Params&, const typename P::Head& head, int index, int, Range, int) const {
    const int entry = list[index * 2];
    if (index * 2 + 1 == tiles) return {head.h, tile_of_entry<P>(entry), is_full(entry), -1};
    const int next = list[index * 2 + 1];
    return {head.h, tile_of_entry<P>(entry), is_full(entry) && is_full(next), tile_of_entry<P>(next)};
  }
};
template <class P>
using QTiles =
    Conditional<kOwnTiles<P>, DoubledQTiles<P>, Conditional<kLists<P>, ListedQTiles<P>, BoundedQTiles<P>>>;

/// Which keys of a KV tile are a CTA's, and whether it visits every Q tile, also the ones that visit none of
/// them.
struct CtaKeys {
  int first, count;
  bool every_q_tile = false;
};

/// The Q tiles that a KV tile visits: of all query heads that share it, one head after the other. With
/// split-Q a split of each head's.
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
