// Backward pass with mma.sync (FlashAttention-2, algorithm 2): one CTA a KV tile, Q tiles streamed through
// shared memory by cp.async. S and dP are computed transposed, so that P^T and dS^T feed dV and dK from
// registers; only dS goes through shared memory, for dQ, which is added up in fp32 in global memory. With
// d_split2 two warps have the same rows: backward_pairs.cuh. Where KV tiles are few, CTAs share the Q tiles
// of one (split-Q), and the combine_dkdv entry adds up their dK and dV.
#pragma once

#include "flashjit/common/kv_source.cuh"
#include "flashjit/sm80/backward_dq.cuh"
#include "flashjit/sm80/backward_epilogue.cuh"
#include "flashjit/sm80/backward_loader.cuh"
#include "flashjit/sm80/backward_of_indices.cuh"
#include "flashjit/sm80/backward_pairs.cuh"
#include "flashjit/sm80/backward_softmax.cuh"
#include "flashjit/sm80/backward_wide.cuh"
#include "flashjit/sm80/instructions.cuh"

namespace flashjit::sm80 {

/// Where a warp's dK is: the second warp of a pair has it in the place of dV.
template <class Dv, class Dk>
__device__ __forceinline__ Dv& dk_of(Flag<true> /*pairs*/, Dv& dv, Dk&) {
  return dv;
}
template <class Dv, class Dk>
__device__ __forceinline__ Dk& dk_of(Flag<false> /*pairs*/, Dv&, Dk& own_dk) {
  return own_dk;
}

template <class P>
__device__ void backward(const Params& p) {
  if constexpr (P::kIndices) return backward_of_indices<P>(p);
  if constexpr (is_wide(P::kHeadDim, P::kHeadDimV)) return backward_wide<P>(p);
  using Policy = BackwardPolicy<P>;
  constexpr bool kPairs = Policy::kPairs, kLateDq = Policy::kLateDq;
  constexpr int kMt = Policy::kMt, kDUnits = Policy::kDUnits, kDvUnits = Policy::kDvUnits;
  constexpr int kQPitch = Policy::kQPitch, kVPitch = Policy::kVPitch, kRowWarps = Policy::kRowWarps;
  extern __shared__ __align__(128) char shared[];
  BackwardSmem<P> smem(shared);

  const unsigned number = next_work_tile<P>(p, shared);
  const KvWorkTile<P> work(p, number);
  const Sequence<P> sequence(p, work.b);
  const int kv_begin = work.kv_tile * P::kBc, seqused_kv = sequence.seqused_kv(p);
  if (is_past_sequence<P>(p, sequence, work)) return;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row_warp = warp % kRowWarps;
  const bool has_p = !kPairs || warp < kRowWarps, has_ds = !kPairs || warp >= kRowWarps;
  const auto warp_row = [&](int mt) { return (row_warp * kMt + mt) * 16; };

  load_kv_tiles<P>(p, sequence, smem, work.h_kv, kv_begin, seqused_kv);
  QWalk<P> walk(p, sequence, work);
  const auto load_next = [&](int stage) {
    StagedTile next = walk.next(p, sequence);
    if (kv_begin + P::kBc > seqused_kv) next.full = 0;  // asked here, it saves the loop a register
    if (threadIdx.x == 0) smem.staged(stage) = next;
    if (next.head >= 0) QTileLoader<P>::load(p, sequence, next, smem, stage);
    P::Copies::commit();
  };
#pragma unroll
  for (int stage = 0; stage < (P::kStages > 1 ? P::kStages - 1 : 1); ++stage) load_next(stage);

  const unsigned k_rows = smem.k() + matrix_offset<true>(kQPitch);
  const unsigned v_rows = smem.v() + matrix_offset<true>(kVPitch);
  constexpr int kUnits = kPairs ? larger(kDUnits, kDvUnits) : kDvUnits;
  float dv[kMt][2 * kUnits][4] = {};
  float own_dk[kPairs ? 1 : kMt][kPairs ? 2 : 2 * kDUnits][4] = {};
  auto& dk = dk_of(Flag<kPairs>{}, dv, own_dk);

  StagedTile last{-1, 0, 0, 0};
  int buffer = 0;
  const auto add_last = [&] {
    if (kLateDq && last.head >= 0) add_dq<P>(p, sequence, last, smem, buffer ^ 1, warp, lane);
  };
  for (int stage = 0;; stage = stage + 1 < P::kStages ? stage + 1 : 0) {
    P::Copies::template wait<Policy::kPendingCopies>();  // K, V and this stage's tiles have arrived
    QTileLoader<P>::put(smem, stage);
    __syncthreads();
    const StagedTile tile = smem.staged(stage);
    if (tile.head < 0) break;
    if (P::kStages > 1) load_next(stage > 0 ? stage - 1 : P::kStages - 1);
    const int h = tile.head, q_begin = tile.tile * P::kBr;
    const unsigned q_tile = smem.q(stage), dout_tile = smem.dout(stage);
    const float *lse = smem.lse(stage), *row_d = smem.d(stage);
    const Position q_position = position(q_begin + lane % 4 * 2);
    const Position kv_position = position(kv_begin + warp_row(0) + lane / 4);
    const auto at_q = [&](int nt, int e) { return q_position + (nt * 8 + e % 2); };
    const auto at_kv = [&](int mt, int e) { return kv_position + (mt * 16 + e / 2 * 8); };
    [[maybe_unused]] const auto head = sequence.head(p, h);
    BackwardScores<P> s;               // S, then P
    [[maybe_unused]] Slopes<P> slope;  // of the score
    [[maybe_unused]] Dots<P> dots;     // Q K^T
    if (has_p) {
      clear<P>(s);
      multiply_kv_rows<P, P::kHeadDim>(s, k_rows, q_tile, warp_row);  // S = Q K^T
      PairScore<P>::apply(s, slope, dots, p, head, at_q, at_kv);
      mask_scores<P>(tile.full, s, p, sequence, head, at_q, at_kv, warp_row, q_begin, kv_begin, seqused_kv);
      exponentials<P>(p, s, lse, lane);  // P = exp(S - LSE)
      if (P::kDropout) mark_dropped<P>(s, p, dropout_head<P>(p, sequence.b, h), at_q, at_kv);
      WarpPair<P>::hand_over_p(shared, s, slope, dots, row_warp, lane);
      multiply_by_columns<P, kVPitch, kDvUnits, kUnits != kDvUnits, P::kDropout>(dv, s,
                                                                                 dout_tile);  // dV += P^T dO
      if (kPairs) add_last();
    }
    if (has_ds) {
      if (kPairs) add_last();
      BackwardScores<P> dp = {};  // dP = dO V^T
      multiply_kv_rows<P, P::kHeadDimV>(dp, v_rows, dout_tile, warp_row);
      mask_dp<P>(tile.full, dp, p, sequence, head, at_q, at_kv, warp_row, q_begin, kv_begin, seqused_kv);
      WarpPair<P>::wait_for_p(row_warp);
      softmax_backward<P>(dp, s, slope, dots, row_d, smem.ds_pointer(buffer), p, head, at_q, at_kv, warp_row,
                          lane, [&](int mt, int nt) {  // dS = P (dP - D)
                            WarpPair<P>::take_over_p(shared, s, slope, dots, mt, nt, row_warp, lane);
                          });
      multiply_by_columns<P, kQPitch, kDUnits, kPairs && kUnits != kDUnits, false>(dk, dp,
                                                                                   q_tile);  // dK += dS^T Q
    }
    if (!kPairs) add_last();
    if (!kLateDq) {
      __syncthreads();  // dS is complete, and with one stage Q and dO are free
      if (P::kStages == 1) load_next(0);
      add_dq<P>(p, sequence, tile, smem, 0, warp, lane);  // dQ += dS K
    }
    last = tile;
    buffer ^= kLateDq;
  }
  add_last();
  P::Copies::template wait<0>();
  store_gradients<P>(p, sequence, number, smem, dk, dv, has_ds, has_p, warp_row, lane);
}

}  // namespace flashjit::sm80
