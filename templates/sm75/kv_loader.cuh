// How K and V get to shared memory in the forward pass, in the place of cp.async.
#pragma once

#include "flashjit/sm75/held_tile.cuh"
#include "flashjit/sm75/instructions.cuh"
#include "flashjit/sm80/kv_loader.cuh"

namespace flashjit::sm75 {

/// One key after the other. K and V take turns, with one stage, so that one of them is on its way.
template <class P>
struct HeldKvLoader {
  static_assert(P::kStages == 1, "one tile is on its way");
  template <int kColumns>
  using Tile = HeldTile<P::kBc, kColumns, P::kWarps * 32>;

  struct Held {
    uint4 vector[Tile<sm80::larger(P::kHeadDim, P::kHeadDimV)>::kVectors];
  };

  template <int kColumns, class List>
  static __device__ __forceinline__ void load(Held& held, unsigned, const KvSource<P>& from, const List&,
                                              const Params&, int, int first, int valid) {
    Tile<kColumns>::load(held.vector, reinterpret_cast<const unsigned short*>(from.row(first)),
                         kScaledKv<P> ? from.stride() / 2 : from.stride(), valid);
  }
  template <int kColumns>
  static __device__ __forceinline__ void put(const Held& held, unsigned tile) {
    Tile<kColumns>::put(held.vector, tile);
  }
};

}  // namespace flashjit::sm75
