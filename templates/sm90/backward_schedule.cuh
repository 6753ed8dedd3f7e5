// The KV tile scheduler of the backward pass, KvTileScheduler<P>: CTAs take one KV tile after the other from
// a counter.
#pragma once

#include "flashjit/common/row_stats.cuh"
#include "flashjit/common/wait.cuh"
#include "flashjit/sm90/backward_rings.cuh"

namespace flashjit::sm90 {

/// Whether no preprocess entry runs before: each cluster then has one KV tile with all keys of its rows,
/// finds their stats itself, and shares no counters with others.
template <class P>
__device__ __forceinline__ bool finds_row_stats(const Params& p) {
  return P::kFindsRowStats && p.semaphores == nullptr;
}

// With kClaimsTiles a CTA's first KV tile has the CTA's own number. The CTA loads it before the grid before
// has ended, and claims afterwards. If it came so late that another CTA had claimed it, it computes nothing:
// CTAs that find no other KV tiles take those that are not claimed, as they would else wait for CTAs that
// found no room on the device.

/// How many CTAs have a KV tile of their own.
template <class P>
__device__ __forceinline__ unsigned claimable_tiles(const Params& p) {
  if constexpr (!P::kClaimsTiles) return 0;
  return min(min(static_cast<int>(gridDim.x), kClaimableTiles), static_cast<int>(kv_work_tiles<P>(p)));
}
/// Claims a tile. False: it is another CTA's.
template <class P>
__device__ __forceinline__ bool claim_tile(const Params& p, unsigned index) {
  int* claims = tile_claims<P>(p);
  if (atomicExch(claims + 1 + index, 1) != 0) return false;
  atomicAdd(claims, 1);
  return true;
}
/// One of the first tiles whose CTA has not come, if there is any.
template <class P>
__device__ __forceinline__ unsigned claim_left_tile(const Params& p) {
  const unsigned claimable = claimable_tiles<P>(p);
  if (static_cast<unsigned>(load_acquire(tile_claims<P>(p))) < claimable)
#pragma unroll 1
    for (unsigned index = 0; index < claimable; ++index)
      if (claim_tile<P>(p, index)) return index;
  return kv_work_tiles<P>(p);
}

/// The index of the CTA's n-th KV tile. In a cluster the first CTA takes the ones that visit any Q tile, and
/// sends them to the others.
template <class P>
__device__ __forceinline__ unsigned next_tile_index(const Params& p, const BackwardSmem<P>& smem,
                                                    unsigned n) {
  if (finds_row_stats<P>(p))
    return n == 0 ? blockIdx.x / BackwardPolicy<P>::kClusterSize : kv_work_tiles<P>(p);
  if constexpr (P::kClaimsTiles) {
    const unsigned index = claimable_tiles<P>(p) + static_cast<unsigned>(atomicAdd(kv_tile_counter(p), 1));
    return index < kv_work_tiles<P>(p) ? index : claim_left_tile<P>(p);
  }
  if (BackwardPolicy<P>::rank() == 0) return static_cast<unsigned>(atomicAdd(kv_tile_counter(p), 1));
  barrier_expect(smem.tile_index_full(n), 4);
  TileIndexRing<P>::wait_full(smem, n);
  return *reinterpret_cast<const volatile unsigned*>(smem.pointer(smem.tile_index(n)));
}
template <class P>
__device__ __forceinline__ void send_tile_index(const Params& p, const BackwardSmem<P>& smem, unsigned n,
                                                unsigned index) {
  using Policy = BackwardPolicy<P>;
  if constexpr (Policy::kClusterSize > 1) {
    if (Policy::rank() > 0 || finds_row_stats<P>(p)) return;
    for (int other = 1; other < Policy::kClusterSize; ++other)
      store_remote(in_cta(smem.tile_index(n), other), index, in_cta(smem.tile_index_full(n), other));
  }
}

/// Hands out KV tiles, by the interface of tma's TileScheduler. Its functions are static, and the producer
/// keeps whether it `claims` a tile: an object with that changes the machine code.
template <class P>
struct KvTileScheduler {
  /// Whether the first tile has the CTA's own number, and must be claimed.
  static __device__ __forceinline__ bool first(const Params& p) {
    const bool claims = P::kClaimsTiles && blockIdx.x < claimable_tiles<P>(p);
    if (P::kClaimsTiles && !claims) wait_for_prior_grid<P>();
    return claims;
  }
  /// After `taken` KV tiles that visit any Q tile; kv_work_tiles() if there are no more.
  static __device__ __forceinline__ unsigned next(const Params& p, const BackwardSmem<P>& smem,
                                                  unsigned taken, bool claims) {
    return claims ? blockIdx.x : next_tile_index(p, smem, taken);
  }
  /// False: it is another CTA's.
  static __device__ __forceinline__ bool finish_tile(const Params& p, unsigned index, bool claims) {
    if (!claims) return true;
    wait_for_prior_grid<P>();
    return claim_tile<P>(p, index);
  }
};

/// Whether the sum of dQ over a cluster is all of dQ, as its KV tile has all keys of a row: then nothing is
/// added in global memory.
template <class P>
__device__ __forceinline__ bool writes_dq(const Params& p) {
  return BackwardPolicy<P>::kSumsDq && p.dq_accum == nullptr;
}
/// The keys of CTA `rank` of a cluster.
template <class P>
__device__ __forceinline__ CtaKeys cta_keys(const Params& p, int rank) {
  return {BackwardPolicy<P>::first_key_of_cta(rank), BackwardPolicy<P>::kKeys, writes_dq<P>(p)};
}

/// Finds the stats of the rows of the cluster's KV tile, by all warps but the producer's, and says so to all
/// CTAs.
template <class P>
__device__ __forceinline__ void find_row_stats(const Params& p, const BackwardSmem<P>& smem) {
  using Policy = BackwardPolicy<P>;
  const KvWorkTile<P> work(p, blockIdx.x / Policy::kClusterSize);
  const Sequence<P> sequence(p, work.b);
  const int lane = threadIdx.x % 32, warp = static_cast<int>(threadIdx.x) / 32 - 1;
  const int of_head = p.seqlen_q_padded / kRowsOfWarp, count = p.qhead_per_kvhead() * of_head;
#pragma unroll 1
  for (int i = warp * Policy::kClusterSize + Policy::rank(); i < count;
       i += kRowStatsWarps * Policy::kClusterSize) {
    const int h = work.h_kv * p.qhead_per_kvhead() + i / of_head;
    flashjit::find_row_stats<P>(p, sequence, h, work.b * p.heads_q + h, i % of_head * kRowsOfWarp, [] {});
  }
  __threadfence();
  __syncwarp();
  if (lane < Policy::kClusterSize) barrier_arrive_remote(in_cta(smem.row_stats_full(), lane));
}
/// Waits for the stats of all rows, which TMA may then read.
template <class P>
__device__ __forceinline__ void wait_row_stats(const BackwardSmem<P>& smem) {
  barrier_wait<P>(smem.row_stats_full(), 0);
  __threadfence();
  publish_to_adders();
}

}  // namespace flashjit::sm90
