// Each consumer warpgroup has a KV tile of 64 keys of its own, for block maps whose blocks of 64
// keys have lists of their own. It visits two Q tiles of 64 rows at a time, which are no neighbours but the
// next two of the list. The warpgroups share nothing but the multiprocessor, so one's products run under the
// other's softmax. dQ is added to global memory from registers, as shared memory has no room for it.
#pragma once

#include "flashjit/sm90/backward_dq.cuh"
#include "flashjit/sm90/backward_epilogue.cuh"
#include "flashjit/sm90/backward_softmax.cuh"

namespace flashjit::sm90 {

/// dQ = dS K of the first or second Q tile of step i.
template <class P>
__device__ __forceinline__ void start_own_dq(const BackwardSmem<P>& smem, unsigned i, int q_tile,
                                             typename BackwardFragments<P>::Dq& dq) {
  using Smem = BackwardSmem<P>;
  const unsigned long long ds = tile_descriptor(smem.ds(i) + q_tile * Smem::kKvSlice, Smem::kKvSlice),
                           k = tile_descriptor(smem.k(), Smem::kKvSlice);
  pin(dq);
  wgmma_fence();
  P::multiply_dq(dq, ds, k, 0);
  wgmma_commit();
  pin(dq);
}

/// Adds it to global memory.
template <class P>
__device__ __forceinline__ void add_own_dq(const Params& p, const BackwardSmem<P>& smem, unsigned i,
                                           int q_tile, const typename BackwardFragments<P>::Dq& dq) {
  constexpr int kColumns = dq_columns(P::kHeadDim);
  const QTileInfo& now = smem.q_tile(i);
  if (q_tile > 0 && now.dq_order < 0) return;  // there is no second
  const long long row = now.stats_row + (q_tile > 0 ? (now.dq_order - now.tile) * P::kBr : 0);
  float* to = p.dq_accum + row * kColumns + threadIdx.x % 128 * 4;
#pragma unroll
  for (int step = 0; step < kColumns / 8; ++step)
    add_global(to + step * kDqStep,
               float4{dq[step * 4], dq[step * 4 + 1], dq[step * 4 + 2], dq[step * 4 + 3]});
}

/// Counts dQ of the KV tile that ends with step i as added.
template <class P>
__device__ __forceinline__ void count_own_dq(const Params& p, const BackwardSmem<P>& smem, unsigned i,
                                             int wg) {
  const KvTileInfo<P>& kv_tile = smem.kv_tile_of(i);
  __threadfence();
  named_barrier_sync(2 + wg, 128);
  if (threadIdx.x % 128 == 0) count_done(done_semaphore(p, kv_tile.sequence.b, kv_tile.h_kv));
}

/// The main loop of such a warpgroup, whose slot of shared memory `smem` is.
template <class P>
__device__ __forceinline__ void consume_own_tiles(const Params& p, const TensorMaps& maps,
                                                  const BackwardSmem<P>& smem, int wg) {
  using Fragments = BackwardFragments<P>;
  typename Fragments::Dk dk = {};
  typename Fragments::Dv dv = {};
  typename Fragments::S s;
  unsigned i = 0;
  unsigned long long q = q_operand(smem, 0, wg);
#pragma unroll 1
  for (; begin_q_tile(p, smem, i, wg, q, s); ++i) {  // S = Q K^T
    typename Fragments::Operand p_operand, ds;
    PairSums<P> sums;
    // dP = dO V^T, P = exp(S - LSE), dS = P (dP - D)
    compute_p_and_ds(p, maps, smem, i, wg, q, s, p_operand, ds, sums);
    q = q_operand(smem, i + 1, wg);
    start_dv_dk(smem, i, wg, p_operand, ds, dk, dv);  // dV += P^T dO, dK += dS^T Q
    publish_to_async_proxy();
    named_barrier_sync(2 + wg, 128);  // dS is there
    typename Fragments::Dq first, second;
    start_own_dq(smem, i, 0, first);
    const bool last = smem.q_tile(i).last;
    wgmma_wait<1>();
    pin(dk);
    pin(dv);
    DoutRing<P>::release_thread(smem, i);
    QTileRing<P>::release_thread(smem, i);
    start_own_dq(smem, i, 1, second);
    wgmma_wait<1>();
    pin(first);
    add_own_dq(p, smem, i, 0, first);
    wgmma_wait<0>();
    pin(second);
    add_own_dq(p, smem, i, 1, second);
    named_barrier_sync(2 + wg, 128);  // dS has been read
    if (last) {
      KvTileRing<P>::release_thread(smem);
      store_dk_dv(p, smem, i, wg, dk, dv);
      count_own_dq(p, smem, i, wg);
    }
  }
  wgmma_wait<0>();
  pin(s);
}

}  // namespace flashjit::sm90
