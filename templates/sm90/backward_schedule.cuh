// The KV tile scheduler of the backward pass: CTAs take one KV tile after the other from a counter.
#pragma once

#include "flashjit/sm90/backward_smem.cuh"

namespace flashjit::sm90 {

/// The index of the CTA's n-th KV tile. In a cluster the first CTA takes those that meet any Q tile, and
/// sends them to the others.
template <class P>
__device__ __forceinline__ unsigned next_tile_index(const Params& p, const BackwardSmem<P>& smem,
                                                    unsigned n) {
  if (BackwardPolicy<P>::rank() == 0) return static_cast<unsigned>(atomicAdd(kv_tile_counter(p), 1));
  barrier_expect(smem.tile_index_full(n), 4);
  barrier_wait<P>(smem.tile_index_full(n), n / kKeptTileIndices & 1);
  return *reinterpret_cast<const volatile unsigned*>(smem.pointer(smem.tile_index(n)));
}
template <class P>
__device__ __forceinline__ void send_tile_index(const BackwardSmem<P>& smem, unsigned n, unsigned index) {
  using Policy = BackwardPolicy<P>;
  if constexpr (Policy::kClusterSize > 1) {
    if (Policy::rank() > 0) return;
    for (int other = 1; other < Policy::kClusterSize; ++other)
      store_remote(in_cta(smem.tile_index(n), other), index, in_cta(smem.tile_index_full(n), other));
  }
}

/// Whether the sum of dQ over a cluster is all of dQ, as its KV tile has all keys of a row: then nothing is
/// added in global memory.
template <class P>
__device__ __forceinline__ bool writes_dq(const Params& p) {
  return BackwardPolicy<P>::kSumsDq && p.dq_accum == nullptr;
}
/// The keys of CTA `rank` of a cluster.
template <class P>
__device__ __forceinline__ CtaKeys cta_keys(const Params& p, int rank) {
  return {BackwardPolicy<P>::first_key(rank), BackwardPolicy<P>::kKeys, writes_dq<P>(p)};
}

}  // namespace flashjit::sm90
