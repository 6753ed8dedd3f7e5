// Which tiles a tile meets: the KV tiles of a Q tile in the forward pass, the Q tiles of a KV tile in the
// backward pass.
#pragma once

#include "flashjit/common/split.cuh"
#include "flashjit/common/visible.cuh"

namespace flashjit {

/// Whether tiles are visited by lists, which the tile_lists entry makes, instead of in a contiguous range.
/// Ordered additions need to know how many tiles come before: without a mask that is plain, else lists say.
/// The planner has the same rule: plan/tensor_core.cpp.
template <class P>
constexpr bool kLists = P::kBlockMap || P::kListed || (P::kBackward && P::kDeterministic && P::kHasMask);

/// An entry of a list is twice the tile, and 1 more if block map and mask let every pair of it attend;
/// tiles ascend. Where some rows of a Q tile may meet a KV tile that others do not, bits from this one on say
/// which do (tiles have no more than 2^27 numbers), and tile_lists.cuh has an order for them.
constexpr int kListedRowsBit = 28;
template <class P>
constexpr bool kTellsRows = (P::kListedRows < P::kBr);
template <class P>
__device__ __forceinline__ int tile_of_entry(int entry) {
  return (kTellsRows<P> ? entry & ((1 << kListedRowsBit) - 1) : entry) >> 1;
}

/// How many different lists of tiles there are: as many as map and mask tell apart.
template <class P>
__device__ __forceinline__ int list_batch(const Params& p) {
  const bool differ = P::kVarlen || P::kKvLengths || P::kMaskUsesBatch || (P::kBlockMap && p.map_batch > 1);
  return differ ? p.batch : 1;
}
template <class P>
__device__ __forceinline__ int list_heads(const Params& p) {
  return P::kMaskUsesHead || (P::kBlockMap && p.map_heads > 1) ? p.heads_q : 1;
}
/// The place of the list of one row of tiles, of `rows`.
template <class P>
__device__ __forceinline__ long long list_at(const Params& p, int b, int h, int rows, int row) {
  const long long lb = list_batch<P>(p) == 1 ? 0 : b, lh = list_heads<P>(p) == 1 ? 0 : h;
  return (lb * list_heads<P>(p) + lh) * rows + row;
}

template <class P>
__device__ __forceinline__ int q_tiles(const Params& p) {
  return (p.seqlen_q + P::kBr - 1) / P::kBr;
}
template <class P>
__device__ __forceinline__ int kv_tiles(const Params& p) {
  return (p.seqlen_kv + P::kBc - 1) / P::kBc;
}
/// Whether lists say how many additions to dQ come before a KV tile's. Whoever waits for one waits for ever
/// if it does not come, so a KV tile visits all that it lists, also past the last key: lists that were built
/// before may be of other lengths, as they do not know how many rows packed tensors have.
template <class P>
constexpr bool kListedDqOrder = (P::kBackward && P::kDeterministic && kLists<P>);

/// The part of [0, length) that a tile of `size` covers; may be empty.
__device__ __forceinline__ Range tile_range(int tile, int size, int length) {
  return {min(tile * size, length), min(tile * size + size, length)};
}

/// Of the tiles that one meets, a list or a range, leaves one of the parts in which blocks share them.
template <class P>
__device__ __forceinline__ void keep_split_of(const Params& p, int part, const int*& list, int& first,
                                              int& count) {
  const int begin = split_begin<P>(p, part, count), end = split_begin<P>(p, part + 1, count);
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
    if constexpr (kLists<P>) {
      const long long row = list_at<P>(p, head.b, head.h, q_tiles<P>(p), q_tile);
      list = p.lists.entries + row * kv_tiles<P>(p);
      count = p.lists.count[row];
    } else {
      const Range bounds = P::kv_bounds(p, head, q);
      const int end = min(bounds.end, seqused_kv);
      first = bounds.begin / P::kBc;
      count = end > bounds.begin ? (end + P::kBc - 1) / P::kBc - first : 0;
    }
  }
  __device__ void keep_split(const Params& p, int part) { keep_split_of<P>(p, part, list, first, count); }
  /// As a list has it.
  __device__ int entry(int i) const {
    if constexpr (kLists<P>) return list[i];
    return (first + i) * 2;
  }
  __device__ int tile(int i) const { return tile_of_entry<P>(entry(i)); }
  /// Whether block map and mask let every pair of the tile attend.
  __device__ bool full(const Params& p, const typename P::Head& head, Range q, int entry) const {
    if constexpr (kLists<P>) return entry & 1;
    if constexpr (!P::kHasMask) return true;
    return P::classify_tile(p, head, q, tile_range(entry >> 1, P::kBc, head.seqlen_kv), nullptr, nullptr) ==
           TileClass::full;
  }
};

/// What the loader says of the Q tile in a stage, for the warps that compute on it.
struct StagedTile {
  int head;  ///< query head; -1: there are no more tiles
  int tile;
  int full;      ///< block map and mask program let every pair attend
  int dq_order;  ///< how many KV tiles add to this Q tile's dQ first, when additions are ordered
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
  /// All of the head instead, also those that the KV tile does not meet.
  __device__ void take_every(const typename P::Head& head) {
    first = 0, count = (head.seqlen_q + P::kBr - 1) / P::kBr;
  }
  __device__ void keep_split(const Params& p, int part) { keep_split_of<P>(p, part, list, first, count); }
  /// The tile at a place, as the compute loop wants to know it of the keys `kv`. With ordered additions the
  /// last KV tile comes first: under a causal mask it has the fewest Q tiles, and then nobody waits.
  __device__ StagedTile at(const Params& p, const typename P::Head& head, int index, int kv_tile, Range kv,
                           int seqused_kv) const {
    const int tile = kLists<P> ? list[index] >> 1 : first + index;
    StagedTile staged{head.h, tile, 1, 0};
    if constexpr (kLists<P>) {
      staged.full = list[index] & 1;
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

/// What the blocks of the forward pass count together, where tiles are listed: which Q tile is next.
__device__ __forceinline__ int* q_tile_counter(const Params& p) { return p.semaphores; }

// What the blocks of the backward pass count together: which KV tile is next, which piece of dQ's accumulator
// is to be cleared, which KV tile to look at for lack of rows, which rows of dQ are next to be converted; for
// each head of K and V how many pieces are clear, and these and how many parts of its KV tiles have added all
// that they add; and the turns. Work belongs to a block that runs: whoever waits for it waits for something.
__device__ __forceinline__ int* kv_tile_counter(const Params& p) { return p.semaphores; }
__device__ __forceinline__ int* clear_counter(const Params& p) { return p.semaphores + 1; }
__device__ __forceinline__ int* empty_tile_counter(const Params& p) { return p.semaphores + 2; }
__device__ __forceinline__ int* convert_counter(const Params& p) { return p.semaphores + 3; }
__device__ __forceinline__ int* cleared_semaphore(const Params& p, int b, int h_kv) {
  return p.semaphores + kTileCounters + b * p.heads_kv + h_kv;
}
__device__ __forceinline__ int* done_semaphore(const Params& p, int b, int h_kv) {
  return cleared_semaphore(p, p.batch, 0) + b * p.heads_kv + h_kv;
}
/// Rows of the accumulator that are cleared at a time, and how often that is for a head of K and V.
constexpr int kClearRows = 128;
__device__ __forceinline__ int pieces_to_clear(const Params& p) {
  return p.qhead_per_kvhead() * (p.seqlen_q_padded / kClearRows);
}
/// Ordered additions: how many KV tiles have added to a Q tile's dQ, or to one of its parts.
template <class P>
__device__ __forceinline__ int* dq_semaphore(const Params& p, int b, int h, int q_tile, int part = 0) {
  return done_semaphore(p, p.batch, 0) +
         ((static_cast<long long>(b) * p.heads_q + h) * q_tiles<P>(p) + q_tile) * kDqSemaphores + part;
}

/// How many KV tiles a head of K and V has for blocks to take, each part of one counted.
template <class P>
__device__ __forceinline__ int kv_work_tiles_of_head(const Params& p) {
  return kv_tiles<P>(p) * num_splits<P>(p);
}
template <class P>
__device__ __forceinline__ unsigned kv_work_tiles(const Params& p) {
  return static_cast<unsigned>(kv_work_tiles_of_head<P>(p)) * p.heads_kv * p.batch;
}
/// Whether a head's first KV tiles are met by the most rows, and the last by the fewest.
template <class P>
constexpr bool kLptOrder = (P::kMaskBounds == 1 && !kLists<P>);
/// Where the KV tile that comes at a place is among all heads' tiles, of which those of a head follow each
/// other. They come so, too, as blocks then read a head's Q together; but of the last heads those of one
/// place come together, the longest first: else some would begin when most blocks end.
__device__ __forceinline__ unsigned lpt_order(const Params& p, unsigned number, unsigned tiles) {
  const unsigned mixed = p.lpt_heads, first = (p.heads_kv * p.batch - mixed) * tiles;
  return number < first ? number : first + (number - first) % mixed * tiles + (number - first) / mixed;
}
/// The KV tile that is a block's work in the backward pass, and which part of its Q tiles.
template <class P>
struct KvWorkTile {
  int b, h_kv, kv_tile, part;

  __device__ KvWorkTile(int b, int h_kv, int kv_tile, int part)
      : b(b), h_kv(h_kv), kv_tile(kv_tile), part(part) {}
  __device__ KvWorkTile(const Params& p, unsigned number) {
    const unsigned parts = static_cast<unsigned>(num_splits<P>(p));
    part = static_cast<int>(number % parts);
    number /= parts;
    if constexpr (kLptOrder<P>) number = lpt_order(p, number, kv_tiles<P>(p));
    const int tiles = kv_tiles<P>(p), place = static_cast<int>(number % tiles);
    b = static_cast<int>(number / tiles / p.heads_kv);
    h_kv = static_cast<int>(number / tiles % p.heads_kv);
    kv_tile = P::kDeterministic ? tiles - 1 - place : place;
  }
};

/// Which keys of a KV tile are a block's; and whether every Q tile is visited, also those that meet none.
struct BlockKeys {
  int first, count;
  bool every_q_tile = false;
};

/// The Q tiles that a KV tile meets, of all query heads that share it, one after the other: or of each head a
/// part of them.
template <class P>
struct QWalk {
  int kv_tile, part, seqused_kv, head, end_head, index = 0;
  bool every;
  Range kv, own;

  __device__ QWalk(const Params& p, const Sequence<P>& sequence, const KvWorkTile<P>& work,
                   BlockKeys keys = {0, P::kBc})
      : kv_tile(work.kv_tile), part(work.part), seqused_kv(sequence.seqused_kv(p)), every(keys.every_q_tile) {
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
      if constexpr (P::kSplit) tiles.keep_split(p, part);
      if (index < tiles.count) return tiles.at(p, program_head, index++, kv_tile, own, seqused_kv);
    }
    return {-1, 0, 0, 0};
  }
};

}  // namespace flashjit
