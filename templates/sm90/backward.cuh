// Backward pass for Hopper: FlashAttention-2's algorithm 2 with FlashAttention-3's warp roles. A CTA takes
// one KV tile after the other, and for each it visits its Q tiles:
//
//   S  = Q K^T       P  = exp(S - LSE)
//   dP = dO V^T      dS = P (dP - D)    with D = rowsum(dO O) from the preprocess entry
//   dV += P^T dO     dK += dS^T Q       in registers until the KV tile ends
//   dQ += dS K                          in global memory, in fp32, from products in registers; converted when
//   a
//                                       head is complete
//
// S and dP are computed transposed, so that P^T and dS^T are left operands of dV and dK.
//
// Two of three warpgroups are consumers, which compute. The warps of the first warpgroup are:
//
//   0     the producer, which loads by TMA (backward_producer.cuh)
//   1, 2  one for each consumer, adds its dQ to global memory (backward_dq.cuh), and gradients of captured
//         tensors that are sums of dS (ds_grads.cuh)
//   3     writes zeros for keys without queries (backward_epilogue.cuh), then clears and converts dQ
//         (convert_dq.cuh), which the consumers do, too, when they are done
//
// CTAs and consumers share a KV tile in one of five ways (backward_policy.cuh), or each consumer has a KV
// tile of its own, and a producer, warp 0 or 1 (backward_own_tiles.cuh):
//
// - Narrow: up to 128 columns a CTA has 128 keys, each consumer 64 of them. P^T and dS^T feed dV and dK
//   from registers. Only dQ needs the other consumer's dS.
// - Narrow, in a cluster: CTAs with 128 keys each share a larger KV tile. They send each other
//   partial dQ, and each sums up some of the columns. If the KV tile has all keys of a row the sum is dQ, and
//   nothing is cleared, added to or converted in global memory.
// - Wide: above 128 columns the registers of one consumer do not hold its rows of dK and dV. There, and in KV
//   tiles of 64 keys, both consumers have the same 64 keys. Each computes half of the queries of S and dP,
//   and half of the columns of dK and dV, from P and dS in shared memory.
// - Wide, columns split: above 256 columns the registers of a CTA do not hold its rows of dK and dV either.
//   Two CTAs share a KV tile of 64 keys, and each has half of all columns. Its S and dP are sums over its own
//   columns: of half of the pairs it sends them to the other CTA, of the other half it gets the other's, adds
//   them up, and sends P and dS to the other. dQ is added as without a cluster, by columns.
// - Wide, in a cluster: above 128 columns, adding dQ to global memory for every 64 keys takes longer than all
//   products. So two CTAs share a KV tile of 128 keys: each has 64 of them, sends the other its dS, and
//   computes half of the columns of dQ for all 128. Up to 320 columns of K and 256 of V fit: shared memory
//   then has one tile for P and the other CTA's dS, which is sent when P has been read.
//
// Split-Q: where KV tiles are few and their queries many, several CTAs take one KV tile, each with a split
// of the queries. Each stores its partial dK and dV in fp32, and the combine_dkdv entry adds them up.
//
// Before the first products: CTAs load their first tiles while the preprocess entry ends, or, in clusters
// that have all keys of a row, do without it and find D themselves (backward_schedule.cuh).
#pragma once

#include "flashjit/sm90/backward_dq.cuh"
#include "flashjit/sm90/backward_ds_exchange.cuh"
#include "flashjit/sm90/backward_epilogue.cuh"
#include "flashjit/sm90/backward_own_tiles.cuh"
#include "flashjit/sm90/backward_producer.cuh"
#include "flashjit/sm90/backward_softmax.cuh"

namespace flashjit::sm90 {

/// A consumer warpgroup with 64 keys of its own. It computes dQ of a Q tile only when it has dS of the next,
/// since it needs the other warpgroup's dS, too: so neither waits for the other, and the products of one run
/// under the other's softmax.
template <class P>
__device__ __forceinline__ void consume_narrow(const Params& p, const TensorMaps& maps,
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
    typename Fragments::Dq dq;
    // dQ += dS K, of the Q tile before. Before the first there is none, and the result is not used: a branch
    // would serialise the products.
    start_dq(smem, i - 1, wg, dq);
    start_dv_dk(smem, i, wg, p_operand, ds, dk, dv);  // dV += P^T dO, dK += dS^T Q
    publish_to_async_proxy();  // dS, which has not been read yet: the products need not wait for it
    const bool first = smem.q_tile(i).first;
    wgmma_wait<2>();
    pin(dq);
    DsRing<P>::commit_thread(smem, i);
    if (!first) hand_on_dq(smem, i - 1, wg, dq);
    const bool last = smem.q_tile(i).last;
    sums.end();  // under the products
    wgmma_wait<0>();
    pin(dk);
    pin(dv);
    // Every thread arrives, as it has read LSE, D and what the stage holds.
    DoutRing<P>::release_thread(smem, i);
    QTileRing<P>::release_thread(smem, i);
    if (last) {
      DsRing<P>::wait_full(smem, i);
      start_dq(smem, i, wg, dq);  // dQ += dS K, of this Q tile
      wgmma_wait<0>();
      pin(dq);
      KvTileRing<P>::release_thread(smem);
      hand_on_dq(smem, i, wg, dq);
      store_dk_dv(p, smem, i, wg, dk, dv);
    }
  }
  wgmma_wait<0>();
  pin(s);
  DsGrads<P>::end(smem, i);
  DqRing<P>::acquire(smem, wg, i);
  signal_dq_full(smem, i, wg);
}

/// A consumer warpgroup that has the same 64 keys as the other: half of the queries of S and dP, half of the
/// columns of dK, dV and dQ, for which both write P and dS to shared memory. Where CTAs split columns these
/// are the CTA's columns, and half of P and dS come from the other CTA.
template <class P>
__device__ __forceinline__ void consume_wide(const Params& p, const TensorMaps& maps,
                                             const BackwardSmem<P>& smem, int wg) {
  using Policy = BackwardPolicy<P>;
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
    sums.end();
    publish_to_async_proxy();
    smem.signal_ds(i);
    DsRing<P>::wait_full(smem, i);
    ColumnSplit<P>::publish_received();
    typename Fragments::Dq dq;
    start_dq(smem, i, wg, dq);                        // dQ += dS K
    start_dv_dk(smem, i, wg, p_operand, ds, dk, dv);  // dV += P^T dO, dK += dS^T Q
    const bool last = smem.q_tile(i).last;
    wgmma_wait<1>();
    pin(dq);
    pin(dv);
    StageRelease<P>::after_dv(smem, i);
    DqRing<P>::acquire(smem, wg, i);
    stage_dq<0, Policy::kDqStepsInDout>(smem, i, wg, dq);  // over dO, which has been read
    wgmma_wait<0>();
    pin(dk);
    StageRelease<P>::after_dk(smem, i);
    stage_dq<Policy::kDqStepsInDout, Policy::kDqSteps>(smem, i, wg, dq);
    signal_dq_full(smem, i, wg);  // the thread that adds dQ releases a stage that it lies over
    if (last) {
      KvTileRing<P>::release_thread(smem);
      store_dk_dv(p, smem, i, wg, dk, dv);
    }
  }
  wgmma_wait<0>();
  pin(s);
  DqRing<P>::acquire(smem, wg, i);
  signal_dq_full(smem, i, wg);
}

/// The same in a cluster of two CTAs, each with 64 keys: they exchange dS, and a warpgroup computes a
/// quarter of the columns of dQ, for the keys of both.
template <class P>
__device__ __forceinline__ void consume_wide_cluster(const Params& p, const TensorMaps& maps,
                                                     const BackwardSmem<P>& smem, int wg) {
  using Policy = BackwardPolicy<P>;
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
    sums.end();
    publish_to_async_proxy();
    DsRing<P>::commit_thread(smem, i);
    DsRing<P>::wait_full(smem, i);
    DsExchange<P>::send_early(smem, i, wg);
    start_dv_dk(smem, i, wg, p_operand, ds, dk, dv);  // dV += P^T dO, dK += dS^T Q
    typename Fragments::Dq dq;
    DsExchange<P>::start_own_dq(smem, i, wg, dq);
    wgmma_wait<DsExchange<P>::kAfterDv>();
    pin(dv);
    StageRelease<P>::after_dv(smem, i);
    DsExchange<P>::send_late(smem, i, wg);
    OtherDsRing<P>::wait_full(smem, i);
    start_dq<P, DsExchange<P>::kOwnKeysLast>(smem, i, wg, dq);  // dQ += dS K
    const bool last = smem.q_tile(i).last;
    wgmma_wait<0>();
    pin(dk);
    pin(dq);
    DsExchange<P>::release(smem);
    DqRing<P>::acquire(smem, wg, i);
    stage_dq<0, Policy::kDqSteps>(smem, i, wg, dq);  // over Q, which has been read
    signal_dq_full(smem, i, wg);                     // the thread that adds dQ releases Q
    if (last) {
      KvTileRing<P>::release_thread(smem);
      store_dk_dv(p, smem, i, wg, dk, dv);
    }
  }
  wgmma_wait<0>();
  pin(s);
  DqRing<P>::acquire(smem, wg, i);
  signal_dq_full(smem, i, wg);
}

template <class P>
struct NarrowConsumer {
  static __device__ __forceinline__ void run(const Params& p, const TensorMaps& maps,
                                             const BackwardSmem<P>& smem, int wg) {
    consume_narrow(p, maps, smem, wg);
  }
};
template <class P>
struct SameKeysConsumer {
  static __device__ __forceinline__ void run(const Params& p, const TensorMaps& maps,
                                             const BackwardSmem<P>& smem, int wg) {
    consume_wide(p, maps, smem, wg);
  }
};
template <class P>
struct ClusterConsumer {
  static __device__ __forceinline__ void run(const Params& p, const TensorMaps& maps,
                                             const BackwardSmem<P>& smem, int wg) {
    consume_wide_cluster(p, maps, smem, wg);
  }
};
template <class P>
struct OwnTilesConsumer {
  static __device__ __forceinline__ void run(const Params& p, const TensorMaps& maps,
                                             const BackwardSmem<P>& smem, int wg) {
    consume_own_tiles(p, maps, smem, wg);
  }
};
/// The main loop of a consumer warpgroup.
template <class P>
using BackwardConsumer =
    Conditional<BackwardPolicy<P>::kExchangesDs, ClusterConsumer<P>,
                Conditional<BackwardPolicy<P>::kWide, SameKeysConsumer<P>,
                            Conditional<kOwnTiles<P>, OwnTilesConsumer<P>, NarrowConsumer<P>>>>;

/// The CTAs that wait for each other: begin() when barriers are made. A CTA leaves together with those that
/// may still write to its shared memory, or read from it.
template <class P>
struct OneCta {
  static __device__ __forceinline__ void begin() { __syncthreads(); }
  static __device__ __forceinline__ void leave() {}
};
template <class P>
struct CtaCluster {
  static __device__ __forceinline__ void begin() { cluster_sync(); }
  static __device__ __forceinline__ void leave() { cluster_sync(); }
};
template <class P>
using CtaGroup = Conditional<(BackwardPolicy<P>::kClusterSize > 1), CtaCluster<P>, OneCta<P>>;

template <class P>
__device__ void backward(const Params& p, const TensorMaps& maps) {
  using Policy = BackwardPolicy<P>;
  extern __shared__ __align__(kAlignment) char shared[];
  // Through a shuffle, as ptxas else asks for it again in each step, before the first product.
  const BackwardSmem<P> smem(shared, __shfl_sync(kWholeWarp, shared_address(shared), 0));

  if (threadIdx.x == 0)
    for (int slot = 0; slot < Policy::kSlots; ++slot) smem.at_slot(slot).init();
  // While the grid before ends. Tensors without rows have no map. In a cluster registers do not suffice.
  if (Policy::kClusterSize == 1 && threadIdx.x == 32 && p.seqlen_q > 0 && p.seqlen_kv > 0) {
    prefetch_map(maps.q);
    prefetch_map(maps.k);
    prefetch_map(maps.v);
    prefetch_map(maps.o);
  }
  CtaGroup<P>::begin();
  // With kClaimsTiles the producer waits later.
  if (!P::kClaimsTiles || threadIdx.x >= 32) wait_for_prior_grid<P>();
  if constexpr (P::kFindsRowStats)
    if (threadIdx.x >= 32 && finds_row_stats<P>(p)) find_row_stats<P>(p, smem);

  const auto leave = [] { CtaGroup<P>::leave(); };
  const int wg = __shfl_sync(kWholeWarp, static_cast<int>(threadIdx.x) / 128, 0);
  if (wg == Policy::kProducer.first) {
    set_register_limit<Policy::kProducer>();
    const int warp = __shfl_sync(kWholeWarp, static_cast<int>(threadIdx.x) / 32, 0);
    if (warp < 3) {
      if (!(DqWarp<P>::kWhole && warp > 0) && !elected()) return;
      if (Policy::kSlots > 1 ? warp < Policy::kSlots : warp == 0)
        produce(p, maps, smem.at_slot(warp));
      else
        DqWarp<P>::run(p, smem, warp - 1);
      leave();
      return;
    }
    write_keys_without_queries<P>(p);
  } else {
    set_register_limit<Policy::kConsumers>();
    const int consumer = wg - Policy::kConsumers.first;
    BackwardConsumer<P>::run(p, maps, smem.at_slot(consumer), consumer);
    set_register_limit<Policy::kProducer>();
  }
  // The consumers come for the last heads', or for rows of their own. (As a value of its own
  // converts_own_rows() spills.)
  if (writes_dq<P>(p)) {
  } else if (!converts_own_rows<P>(p)) {
    convert_dq<P>(p);
  } else if (wg > 0) {
    convert_own_rows<P>(p);
  }
  leave();
}

}  // namespace flashjit::sm90
