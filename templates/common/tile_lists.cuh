// The grid of tiles, and lists of the tiles with attending pairs.
#pragma once

#include "flashjit/common/params.cuh"
#include "flashjit/common/types.cuh"

namespace flashjit {

template <class P>
__device__ __forceinline__ int q_tiles(const Params& p) {
  return (p.seqlen_q + P::kBr - 1) / P::kBr;
}
template <class P>
__device__ __forceinline__ int kv_tiles(const Params& p) {
  return (p.seqlen_kv + P::kBc - 1) / P::kBc;
}
/// The rows of [0, length) that a tile of `size` covers; may be empty.
__device__ __forceinline__ Range tile_range(int tile, int size, int length) {
  return {min(tile * size, length), min(tile * size + size, length)};
}

/// Whether tiles are visited by lists, which the tile_lists entry makes, instead of in a contiguous range.
/// Ordered additions need to know how many tiles come before: without a mask that is obvious, else lists have
/// it.
template <class P>
constexpr bool kLists = P::kTileLists;

/// Whether lists have how many additions to dQ come before a KV tile's. A wait for an addition that does not
/// come never ends, so a KV tile visits all that it lists, also past the last key: lists that were built
/// before the call may be of other lengths, as they do not know how many rows packed tensors have.
template <class P>
constexpr bool kListedDqOrder = (P::kBackward && P::kDeterministic && kLists<P>);

/// An entry of a list is twice the tile, plus 1 if block map and mask let every pair of it attend; tiles
/// ascend. Where some rows of a Q tile may meet a KV tile that others do not, the bits from this one on have
/// which do (tile numbers stay below 2^27), and auxiliary/tile_lists.cuh has an order for such tiles.
constexpr int kListedRowsBit = 28;
template <class P>
constexpr bool kEntriesHaveRowBits = (P::kListedRows < P::kBr);
/// Whether each consumer warpgroup of the backward pass has a KV tile of its own, and visits two Q tiles of
/// its list at a time: sm90/backward_own_tiles.cuh.
template <class P>
constexpr bool kOwnTiles = (P::kListedRows > P::kBr);
template <class P>
__device__ __forceinline__ int tile_of_entry(int entry) {
  return (kEntriesHaveRowBits<P> ? entry & ((1 << kListedRowsBit) - 1) : entry) >> 1;
}
__device__ __forceinline__ bool is_full(int entry) { return (entry & 1) != 0; }

/// How many sets of lists there are: one for each batch entry and head that map and mask tell apart.
template <class P>
__device__ __forceinline__ int list_batch(const Params& p) {
  const bool differ = P::kListsByBatch || (P::kBlockMap && p.map_batch > 1);
  return differ ? p.batch : 1;
}
template <class P>
__device__ __forceinline__ int list_heads(const Params& p) {
  return P::kListsByHead || (P::kBlockMap && p.map_heads > 1) ? p.heads_q : 1;
}
/// The index of the list of one row of tiles, of `rows` in a set.
template <class P>
__device__ __forceinline__ long long list_at(const Params& p, int b, int h, int rows, int row) {
  const long long lb = list_batch<P>(p) == 1 ? 0 : b, lh = list_heads<P>(p) == 1 ? 0 : h;
  return (lb * list_heads<P>(p) + lh) * rows + row;
}

}  // namespace flashjit
