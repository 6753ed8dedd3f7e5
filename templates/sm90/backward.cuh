// Backward pass for Hopper: thread blocks that take one KV tile after the other. Of one warp group a thread
// loads, through the TMA unit, and two add dQ to global memory; the two other groups compute with wgmma. S
// and dP are computed transposed. Where gradients of captures are sums of dS, the two threads' warps add
// them, from shared memory.
//
// Up to 128 columns a KV tile has 128 keys, each group 64 of them, and P^T and dS^T feed dV and dK from
// registers. dS goes through shared memory for dQ, for which each group needs the other's too, but only a Q
// tile later, so that neither waits and one group's products run under the other's softmax.
//
// Above, one group's registers do not hold its rows of dK and dV. There ("wide"), and in KV tiles of 64 keys,
// both groups have the same 64 keys: of S and dP each computes half of the queries, of dK and dV half of the
// columns, from P and dS in shared memory.
//
// A KV tile of more keys is of a cluster of blocks with 128 keys each. They visit the same Q tiles and give
// each other their parts of dQ, of which each block sums up some columns. Where all keys of a row are in one
// KV tile the sum is dQ, for which nothing is cleared, added to or converted in global memory.
//
// Above 128 columns, adding dQ to global memory for every 64 keys takes longer than all products. So there a
// cluster of two blocks shares a KV tile of 128 keys: each block has 64 of them, gives the other its dS, and
// computes half of dQ's columns for all 128.
//
// Where KV tiles are few and their queries many, blocks share those of one: each stores what its part gives
// to dK and dV in fp32, and the join_gradients entry adds that up.
#pragma once

#include "flashjit/sm90/backward_dq.cuh"
#include "flashjit/sm90/backward_epilogue.cuh"
#include "flashjit/sm90/backward_producer.cuh"
#include "flashjit/sm90/backward_softmax.cuh"

namespace flashjit::sm90 {

/// Clears what stands behind the last key: it may be anything, and zero times anything is not zero.
template <class P>
__device__ __forceinline__ void clear_foreign_keys(const Params& p, const BackwardTile<P>& tile, unsigned i,
                                                   int group) {
  using Tile = BackwardTile<P>;
  const int own = tile.rank() * Tile::kKeys, valid = tile.kv_limit(p, i) - tile.kv_begin(i);
  if (valid + own >= P::kBc) return;
  tile.await_dout(i);
  clear_rows<Tile::kKeys, P::kHeadDim>(tile.shared + Tile::kLayout.k(), valid);
  clear_rows<Tile::kKeys, P::kHeadDimV>(tile.shared + Tile::kLayout.v(), valid);
  if constexpr (Tile::kExchangesDs)
    clear_rows<Tile::kKeys, Tile::kDim / 2>(tile.shared + Tile::kLayout.other_k(),
                                            valid - Tile::kKeys + 2 * own);
  publish_to_async_proxy();
  named_barrier_sync(2 + group, 128);
}

template <class P>
__device__ __forceinline__ void consume(const Params& p, const TensorMaps& maps, const BackwardTile<P>& tile,
                                        int group) {
  using Tile = BackwardTile<P>;
  constexpr int kSteps = Tile::kQueries / 16;
  float dk[Tile::kOwnDim / 2] = {}, dv[Tile::kOwnDimV / 2] = {};
  // One counter for stage, phase and buffer: registers are short.
  unsigned i = 0;
  const auto q_rows_of = [&](unsigned j) {
    return tile_descriptor(tile.q(j % P::kStages) + Tile::first_query(group) * kRowBytes, 0);
  };
  unsigned long long q_rows = q_rows_of(0);
  float s[Tile::kQueries / 2];
#pragma unroll 1
  for (;; ++i) {
    const int slot = i % P::kStages;
    barrier_wait<P>(tile.q_full(slot), i / P::kStages & 1);
    // Also when there is no tile: then nobody looks at the scores of what is there.
    if constexpr (!kForeignKeys<P>) start_scores(tile, group, q_rows, s);
    const typename Tile::QTile& now = tile.staged(i);
    if (now.head < 0) break;
    if (kForeignKeys<P> && now.first) clear_foreign_keys(p, tile, i, group);
    unsigned probability[kSteps][4], gradient[kSteps][4];
    PairSums<P> sums;
    differentiate(p, maps, tile, i, now, group, q_rows, s, probability, gradient, sums);
    q_rows = q_rows_of(i + 1);
    float dq[Tile::kDqColumns / 2];
    bool last;
    if constexpr (Tile::kWide) {
      sums.end();
      publish_to_async_proxy();
      barrier_arrive(tile.ds_full(i));
      barrier_wait<P>(tile.ds_full(i), i / 2 & 1);
      if constexpr (Tile::kExchangesDs) {
        give_ds(tile, i, group);
        start_gradients(tile, i, group, probability, gradient, dk, dv);
        multiply_wait<1>();
        pin(dv);
        barrier_arrive(tile.dout_empty(i % Tile::kDoutStages));
        barrier_wait<P>(tile.other_ds_full(i), i / 2 & 1);
        start_dq(tile, i, group, dq);
        last = now.last;
        multiply_wait<0>();
        pin(dk);
        pin(dq);
        await_dq_room(tile, i, group);
      } else {
        start_dq(tile, i, group, dq);
        start_gradients(tile, i, group, probability, gradient, dk, dv);
        last = now.last;
        multiply_wait<1>();
        pin(dq);
        pin(dv);
        await_dq_room(tile, i, group);
        stage_dq<0, Tile::kDqInDout>(tile, group, slot, dq);
        multiply_wait<0>();
        pin(dk);
      }
      stage_dq<Tile::kDqInDout, Tile::kDqSteps>(tile, group, slot, dq);
      give_dq(tile, i, group);
    } else {
      // Before the first tile there is none: then nobody looks at the result, but a branch would serialise.
      start_dq(tile, i - 1, group, dq);
      start_gradients(tile, i, group, probability, gradient, dk, dv);
      publish_to_async_proxy();  // dS, which nobody has read yet: the products need not wait for it
      const bool first = now.first;
      multiply_wait<2>();
      pin(dq);
      barrier_arrive(tile.ds_full(i));
      if (!first) give_whole_dq(tile, i - 1, group, dq);
      last = now.last;
      sums.end();  // under the products
      multiply_wait<0>();
      pin(dk);
      pin(dv);
      // Every thread says for itself that it has read LSE, D and what the stage holds.
      barrier_arrive(tile.dout_empty(slot));
      barrier_arrive(tile.q_empty(slot));
      if (last) {
        barrier_wait<P>(tile.ds_full(i), i / 2 & 1);
        start_dq(tile, i, group, dq);
        multiply_wait<0>();
        pin(dq);
        barrier_arrive(tile.kv_empty());
        give_whole_dq(tile, i, group, dq);
      }
    }
    if (last) {
      if (Tile::kWide) barrier_arrive(tile.kv_empty());
      store_gradient(p, tile, i, group, dk, P::kHeadDim, p.softmax_scale, p.dk, p.dk_parts);
      store_gradient(p, tile, i, group, dv, P::kHeadDimV, P::kDropout ? p.keep_scale : 1.0f, p.dv,
                     p.dv_parts);
    }
  }
  multiply_wait<0>();
  pin(s);
  if constexpr (Tile::kAddsDs && !Tile::kWide) barrier_arrive(tile.ds_full(i));  // that this was all
  await_dq_room(tile, i, group);
  give_dq(tile, i, group);
}

template <class P>
__device__ void backward(const Params& p, const TensorMaps& maps) {
  using Tile = BackwardTile<P>;
  extern __shared__ __align__(kAlignment) char shared[];
  // Through a shuffle, as ptxas else asks for it again in each step, before the first product.
  const Tile tile(shared, __shfl_sync(kWholeWarp, shared_address(shared), 0));

  if (threadIdx.x == 0) {
    for (int buffer = 0; buffer < 2; ++buffer) {
      barrier_init(tile.ds_full(buffer), Tile::kGroups * 128);
      if constexpr (Tile::kAddsDs) barrier_init(tile.ds_added(buffer), 2 * 32);
    }
    for (int slot = 0; slot < P::kStages; ++slot) {
      barrier_init(tile.q_full(slot), 1);
      barrier_init(tile.dout_full(slot), 1);
      barrier_init(tile.q_empty(slot), Tile::kGroups * (Tile::kWide ? 1 : 128));
      barrier_init(tile.dout_empty(slot), Tile::kGroups * (Tile::kWide && !Tile::kExchangesDs ? 1 : 128));
    }
    for (int group = 0; group < Tile::kGroups; ++group) {
      barrier_init(tile.dq_full(group), Tile::kSumsDq ? Tile::kGroups * 128 : 128);
      barrier_init(tile.dq_empty(group), Tile::kSumsDq ? Tile::kGroups * (32 + Tile::kCluster - 1) : 1);
    }
    if constexpr (Tile::kSumsDq)
      for (int n = 0; n < kDqSlots; ++n)
        for (int group = 0; group < Tile::kGroups; ++group) barrier_init(tile.dq_there(group, n), 1);
    barrier_init(tile.kv_empty(), Tile::kGroups * 128);
    if constexpr (P::kDifferenceGrads > 0)
      *reinterpret_cast<uint4*>(shared + Tile::kLayout.zeros()) = uint4{0, 0, 0, 0};
    if constexpr (Tile::kExchangesDs)
      for (int buffer = 0; buffer < 2; ++buffer) barrier_init(tile.other_ds_full(buffer), 1);
    if constexpr (Tile::kCluster > 1)
      for (int n = 0; n < kToldWorks; ++n) barrier_init(tile.told_full(n), 1);
    barrier_init_fence();
  }
  if constexpr (Tile::kCluster > 1)
    cluster_sync();
  else
    __syncthreads();
  await_grid_before<P>();

  // A block stays as long as the other may write to its shared memory, or read from it.
  const auto leave = [] {
    if constexpr (Tile::kCluster > 1) cluster_sync();
  };
  const int group = __shfl_sync(kWholeWarp, static_cast<int>(threadIdx.x) / 128, 0);
  if (group == 0) {
    lower_register_limit<Tile::kHelperRegisters>();
    const int warp = __shfl_sync(kWholeWarp, static_cast<int>(threadIdx.x) / 32, 0);
    if (warp < 3) {
      const bool whole = (Tile::kAddsDs || Tile::kSumsDq) && warp > 0;
      if (!whole && !elected()) return;
      if (warp == 0)
        produce(p, tile, maps);
      else if constexpr (Tile::kSumsDq)
        sum_dq(p, tile, warp - 1);
      else
        add_dq(p, tile, warp - 1);
      leave();
      return;
    }
    write_keys_without_rows<P>(p);
  } else {
    raise_register_limit<Tile::kConsumerRegisters>();
    consume(p, maps, tile, group - 1);
    lower_register_limit<Tile::kHelperRegisters>();
  }
  // Whoever computes comes for the last heads'.
  if (!writes_dq<P>(p)) convert_dq<P>(p);
  leave();
}

}  // namespace flashjit::sm90
