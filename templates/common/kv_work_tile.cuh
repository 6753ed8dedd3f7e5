// The work tiles of the backward pass: which KV tile a CTA takes, in which order.
#pragma once

#include "flashjit/common/split.cuh"
#include "flashjit/common/tile_lists.cuh"

namespace flashjit {

/// How many work tiles a head of K and V has: its KV tiles, each as often as it is split.
template <class P>
__device__ __forceinline__ int kv_work_tiles_of_head(const Params& p) {
  return kv_tiles<P>(p) * num_splits<P>(p);
}
template <class P>
__device__ __forceinline__ unsigned kv_work_tiles(const Params& p) {
  return static_cast<unsigned>(kv_work_tiles_of_head<P>(p)) * p.heads_kv * p.batch;
}

/// Whether the most rows visit a head's first KV tiles, and the fewest the last.
template <class P>
constexpr bool kKvTileLptOrder = (P::kMaskBounds == 1 && !kLists<P>);

/// The index, head by head, of the KV tile that comes as the `number`-th. Most heads come one after the
/// other, so that CTAs read a head's Q together. The last heads come in LPT order (longest processing time
/// first), all their first KV tiles before all their second: else some of the longest would begin when most
/// CTAs end.
__device__ __forceinline__ unsigned lpt_order(const Params& p, unsigned number, unsigned tiles) {
  const unsigned mixed = p.lpt_heads, first = (p.heads_kv * p.batch - mixed) * tiles;
  return number < first ? number : first + (number - first) % mixed * tiles + (number - first) / mixed;
}

/// A CTA's work: a KV tile, and which split of its Q tiles. With ordered additions the last KV tile comes
/// first: under a causal mask it has the fewest Q tiles, so that the others need not wait for it.
template <class P>
struct KvWorkTile {
  int b, h_kv, kv_tile, split;

  __device__ KvWorkTile(int b, int h_kv, int kv_tile, int split)
      : b(b), h_kv(h_kv), kv_tile(kv_tile), split(split) {}
  __device__ KvWorkTile(const Params& p, unsigned number) {
    const unsigned splits = static_cast<unsigned>(num_splits<P>(p));
    split = static_cast<int>(number % splits);
    number /= splits;
    if constexpr (kKvTileLptOrder<P>) number = lpt_order(p, number, kv_tiles<P>(p));
    const int tiles = kv_tiles<P>(p), index = static_cast<int>(number % tiles);
    b = static_cast<int>(number / tiles / p.heads_kv);
    h_kv = static_cast<int>(number / tiles % p.heads_kv);
    kv_tile = P::kDeterministic ? tiles - 1 - index : index;
  }
};

}  // namespace flashjit
