// Backward pass above 256 columns, where one warp's registers do not hold its rows of dK and dV: warps that
// share rows (d_split) each compute S and dP for some of a Q tile's queries, and dK and dV for some of the
// columns. P and dS pass through shared memory.
#pragma once

#include "flashjit/common/kv_source.cuh"
#include "flashjit/sm80/backward_dq.cuh"
#include "flashjit/sm80/backward_epilogue.cuh"
#include "flashjit/sm80/backward_loader.cuh"
#include "flashjit/sm80/backward_softmax.cuh"

namespace flashjit::sm80 {

/// Stores P^T of the warp's queries in 16 bits, without what dropout drops.
template <class P, class WarpRow>
__device__ __forceinline__ void store_p(char* p_tile, const BackwardScores<P>& s, const WarpRow& warp_row,
                                        int first_query, int lane) {
  using Policy = BackwardPolicy<P>;
  constexpr int kPitch = Policy::kDsPitch;
#pragma unroll
  for (int mt = 0; mt < Policy::kMt; ++mt)
#pragma unroll
    for (int nt = 0; nt < Policy::kNt; ++nt)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        unsigned pair = pack<typename P::Element>(s[mt][nt][2 * half], s[mt][nt][2 * half + 1]);
        if constexpr (P::kDropout) pair = without_negatives(pair);
        const int row = warp_row(mt) + lane / 4 + half * 8, column = first_query + nt * 8 + lane % 4 * 2;
        *reinterpret_cast<unsigned*>(p_tile + (row * kPitch + column) * 2) = pair;
      }
}

/// S or dP of the warp's keys and queries: K Q^T, or V dO^T.
template <class P, int kDim, class WarpRow>
__device__ __forceinline__ void multiply_kv_by_q(BackwardScores<P>& c, unsigned kv_tile, unsigned q_tile,
                                                 int first_query, const WarpRow& warp_row) {
  constexpr int kPitch = pitch(kDim);
  multiply_transposed<typename P::Mma, typename P::Element, kDim, 4>(
      c, q_tile + first_query * kPitch * 2 + matrix_offset<false>(kPitch),
      [&](unsigned(&a)[4], int mt, int step) {
        load_matrix_x4(a, kv_tile + matrix_offset<true>(kPitch) + (warp_row(mt) * kPitch + step * 16) * 2);
      });
}

/// C += A B for the warp's rows of A = P^T or dS^T, in shared memory, and its n16 units of B's columns.
template <class P, int kPitch, int kTotal, bool kGuard, int kC, class WarpRow>
__device__ __forceinline__ void multiply_tiles(float (&c)[BackwardPolicy<P>::kMt][kC][4], unsigned a_tile,
                                               unsigned b_tile, const WarpRow& warp_row, int first_unit) {
  using Policy = BackwardPolicy<P>;
  constexpr int kAPitch = Policy::kDsPitch;
  const unsigned a_rows = a_tile + matrix_offset<true>(kAPitch);
  const unsigned b_columns = b_tile + matrix_offset<true>(kPitch);
#pragma unroll
  for (int k = 0; k < P::kBr / 16; ++k) {
    unsigned a[Policy::kMt][4];
#pragma unroll
    for (int mt = 0; mt < Policy::kMt; ++mt)
      load_matrix_x4(a[mt], a_rows + (warp_row(mt) * kAPitch + k * 16) * 2);
    multiply_step<typename P::Mma, typename P::Element, kTotal, kGuard>(c, a, b_columns + k * 16 * kPitch * 2,
                                                                        first_unit);
  }
}

template <class P>
__device__ void backward_wide(const Params& p) {
  using Policy = BackwardPolicy<P>;
  constexpr int kMt = Policy::kMt, kQPitch = Policy::kQPitch, kVPitch = Policy::kVPitch;
  extern __shared__ __align__(128) char shared[];
  BackwardSmem<P> smem(shared);

  const unsigned number = next_work_tile<P>(p, shared);
  const KvWorkTile<P> work(p, number);
  const Sequence<P> sequence(p, work.b);
  const int kv_begin = work.kv_tile * P::kBc, seqused_kv = sequence.seqused_kv(p);
  if (is_past_sequence<P>(p, sequence, work)) return;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row_warp = warp % Policy::kRowWarps, part = column_part<P>();
  const int first_query = part * Policy::kNt * 8;  // of those that the warp computes S and dP for
  const auto warp_row = [&](int mt) { return (row_warp * kMt + mt) * 16; };

  load_kv_tiles<P>(p, sequence, smem, work.h_kv, kv_begin, seqused_kv);
  QWalk<P> walk(p, sequence, work);
  const auto load_next = [&](int stage) {
    StagedTile next = walk.next(p, sequence);
    if (kv_begin + P::kBc > seqused_kv) next.full = 0;
    if (threadIdx.x == 0) smem.staged(stage) = next;
    if (next.head >= 0) QTileLoader<P>::load(p, sequence, next, smem, stage);
    P::Copies::commit();
  };
#pragma unroll
  for (int stage = 0; stage < (P::kStages > 1 ? P::kStages - 1 : 1); ++stage) load_next(stage);

  float dk[kMt][2 * Policy::kOwnDUnits][4] = {}, dv[kMt][2 * Policy::kOwnDvUnits][4] = {};
  for (int stage = 0;; stage = stage + 1 < P::kStages ? stage + 1 : 0) {
    P::Copies::template wait<Policy::kPendingCopies>();  // K, V and this stage's tiles have arrived
    QTileLoader<P>::put(smem, stage);
    __syncthreads();
    const StagedTile tile = smem.staged(stage);
    if (tile.head < 0) break;
    if constexpr (P::kStages > 1) load_next(stage > 0 ? stage - 1 : P::kStages - 1);
    const int h = tile.head, q_begin = tile.tile * P::kBr;
    const unsigned q_tile = smem.q(stage), dout_tile = smem.dout(stage);
    if (part < Policy::kParts) {
      const Position q_position = position(q_begin + first_query + lane % 4 * 2);
      const Position kv_position = position(kv_begin + warp_row(0) + lane / 4);
      const auto at_q = [&](int nt, int e) { return q_position + (nt * 8 + e % 2); };
      const auto at_kv = [&](int mt, int e) { return kv_position + (mt * 16 + e / 2 * 8); };
      [[maybe_unused]] const auto head = sequence.head(p, h);
      // The map's blocks are multiples of 16, so an m16n8 tile lies in one of them.
      const auto in_map = [&](int mt, int nt) {
        if constexpr (!kTestsMap<P>)
          return true;
        else
          return in_block_map<P>(p, sequence.b, h,
                                 min(q_begin + first_query + nt * 8, sequence.seqlen_q(p) - 1),
                                 min(kv_begin + warp_row(mt), seqused_kv - 1));
      };
      BackwardScores<P> s = {}, dp = {};
      [[maybe_unused]] Slopes<P> slope;
      [[maybe_unused]] Dots<P> dots;
      multiply_kv_by_q<P, P::kHeadDim>(s, smem.k(), q_tile, first_query, warp_row);  // S = Q K^T
      PairScore<P>::apply(s, slope, dots, p, head, at_q, at_kv);
      if (tile.full == 0)
        apply_mask<P, true, false>(s, p, head, at_kv, at_q, q_begin + first_query, seqused_kv, in_map);
      exponentials<P>(p, s, smem.lse(stage) + first_query, lane);  // P = exp(S - LSE)
      if (P::kDropout) mark_dropped<P>(s, p, dropout_head<P>(p, sequence.b, h), at_q, at_kv);
      store_p<P>(smem.p_pointer(), s, warp_row, first_query, lane);
      multiply_kv_by_q<P, P::kHeadDimV>(dp, smem.v(), dout_tile, first_query, warp_row);  // dP = dO V^T
      if (PairWeights<P>::kMasksDp && tile.full == 0)
        apply_mask<P, true, false>(dp, p, head, at_kv, at_q, q_begin + first_query, seqused_kv, in_map);
      // dS = P (dP - D)
      softmax_backward<P>(dp, s, slope, dots, smem.d(stage) + first_query,
                          smem.ds_pointer(0) + first_query * 2, p, head, at_q, at_kv, warp_row, lane,
                          [](int, int) {});
    }
    __syncthreads();  // P and dS are complete
    multiply_tiles<P, kVPitch, Policy::kDvUnits, Policy::kGuardDv>(
        dv, smem.p(), dout_tile, warp_row,
        part * Policy::kOwnDvUnits);  // dV += P^T dO
    multiply_tiles<P, kQPitch, Policy::kDUnits, Policy::kGuardDk>(dk, smem.ds(0), q_tile, warp_row,
                                                                  part * Policy::kOwnDUnits);  // dK += dS^T Q
    if constexpr (P::kStages == 1) {
      __syncthreads();  // Q and dO are free
      load_next(0);
    }
    add_dq<P>(p, sequence, tile, smem, 0, warp, lane);  // dQ += dS K
  }
  P::Copies::template wait<0>();
  store_gradients<P>(p, sequence, number, smem, dk, dv, true, true, warp_row, lane);
}

}  // namespace flashjit::sm80
