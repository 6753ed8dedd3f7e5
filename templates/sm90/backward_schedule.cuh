// Which KV tile a block of the backward pass takes next, and which of its keys are the block's.
#pragma once

#include "flashjit/sm90/backward_smem.cuh"

namespace flashjit::sm90 {

/// The number of this block's n-th KV tile. In a cluster the first block finds those that meet any Q tile,
/// and tells the others.
template <class P>
__device__ __forceinline__ unsigned take_work(const Params& p, const BackwardTile<P>& tile, unsigned n) {
  if (tile.rank() == 0) return static_cast<unsigned>(atomicAdd(next_kv_work(p), 1));
  barrier_expect(tile.told_full(n), 4);
  barrier_wait<P>(tile.told_full(n), n / kToldWorks & 1);
  return *reinterpret_cast<const volatile unsigned*>(tile.shared + (tile.told(n) - tile.base));
}
template <class P>
__device__ __forceinline__ void tell_work(const BackwardTile<P>& tile, unsigned n, unsigned number) {
  if constexpr (BackwardTile<P>::kCluster > 1) {
    if (tile.rank() > 0) return;
    for (int other = 1; other < BackwardTile<P>::kCluster; ++other)
      store_remote(in_block(tile.told(n), other), number, in_block(tile.told_full(n), other));
  }
}

/// Whether the sum that a cluster makes is dQ: all keys of a row are in its KV tile.
template <class P>
__device__ __forceinline__ bool writes_dq(const Params& p) {
  return BackwardTile<P>::kSumsDq && p.dq_accum == nullptr;
}
/// The keys of block `rank` of a cluster.
template <class P>
__device__ __forceinline__ BlockKeys block_keys(const Params& p, int rank) {
  return {rank * BackwardTile<P>::kKeys, BackwardTile<P>::kKeys, writes_dq<P>(p)};
}

}  // namespace flashjit::sm90
