// From S to P and from dP to dS in the backward pass, all transposed: rows are keys, columns are queries.
#pragma once

#include "flashjit/common/dropout.cuh"
#include "flashjit/sm80/backward_scores.cuh"
#include "flashjit/sm80/backward_weights.cuh"
#include "flashjit/sm80/mask.cuh"
#include "flashjit/sm80/products.cuh"
#include "flashjit/sm80/two_terms.cuh"

namespace flashjit::sm80 {

template <class P>
__device__ __forceinline__ void clear(BackwardScores<P>& s) {
  using Policy = BackwardPolicy<P>;
#pragma unroll
  for (int mt = 0; mt < Policy::kMt; ++mt)
#pragma unroll
    for (int nt = 0; nt < Policy::kNt; ++nt)
#pragma unroll
      for (float& value : s[mt][nt]) value = 0.0f;
}

/// S or dP of the warp's keys: K Q^T, or V dO^T. `kv_rows`: matrix_offset() in K's or V's tile.
template <class P, int kDim, class WarpRow>
__device__ __forceinline__ void multiply_kv_rows(BackwardScores<P>& c, unsigned kv_rows, unsigned q_tile,
                                                 const WarpRow& warp_row) {
  constexpr int kPitch = pitch(kDim);
  multiply_transposed<typename P::Mma, typename P::Element, kDim, 2>(
      c, q_tile + matrix_offset<false>(kPitch), [&](unsigned(&a)[4], int mt, int k) {
        load_matrix_x4(a, kv_rows + (warp_row(mt) * kPitch + k * 16) * 2);
      });
}

/// S = masked_score() where a pair does not attend, of the queries from `q_begin` on and the keys from
/// `kv_begin` on, unless the tile is full.
template <class P, class AtQ, class AtKv, class WarpRow>
__device__ __forceinline__ void mask_scores(int full, BackwardScores<P>& s, const Params& p,
                                            const Sequence<P>& sequence, const typename P::Head& head,
                                            const AtQ& at_q, const AtKv& at_kv, const WarpRow& warp_row,
                                            int q_begin, int kv_begin, int seqused_kv) {
  // The map's blocks are multiples of 16, so an m16n8 tile lies in one of them.
  const auto in_map = [&](int mt, int nt) {
    if constexpr (!kTestsMap<P>)
      return true;
    else
      return in_block_map<P>(p, sequence.b, head.h, min(q_begin + nt * 8, sequence.seqlen_q(p) - 1),
                             min(kv_begin + warp_row(mt), seqused_kv - 1));
  };
  if (full == 0) apply_mask<P, true, false>(s, p, head, at_kv, at_q, q_begin, seqused_kv, in_map);
}
/// The same of dP, where P does not say which pairs attend.
template <class P, class... Tile>
__device__ __forceinline__ void mask_dp(Tile&&... tile) {
  if (PairWeights<P>::kMasksDp) mask_scores<P>(tile...);
}

/// P = exp(S - LSE)
template <class P>
__device__ __forceinline__ void exponentials(const Params& p, BackwardScores<P>& s, const float* lse,
                                             int lane) {
  using Policy = BackwardPolicy<P>;
#pragma unroll
  for (int nt = 0; nt < Policy::kNt; ++nt) {
    const float2 row_lse = *reinterpret_cast<const float2*>(lse + nt * 8 + lane % 4 * 2);
#pragma unroll
    for (int mt = 0; mt < Policy::kMt; ++mt)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        s[mt][nt][e] = PairWeights<P>::weigh(p, s[mt][nt][e], e % 2 ? row_lse.y : row_lse.x);
  }
}

/// P is never negative: its sign says that dropout drops the pair.
template <class P, class AtQ, class AtKv>
__device__ __forceinline__ void mark_dropped(BackwardScores<P>& s, const Params& p, unsigned batch_head,
                                             const AtQ& at_q, const AtKv& at_kv) {
  using Policy = BackwardPolicy<P>;
#pragma unroll
  for (int mt = 0; mt < Policy::kMt; ++mt)
#pragma unroll
    for (int nt = 0; nt < Policy::kNt; nt += 2) {
      const Philox4 drawn = draw_transposed<P>(p, batch_head, at_q(nt, 0).at, at_kv(mt, 0).at);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (Policy::kNt == 1 && i >= 4) break;  // half of what is drawn
        const unsigned word =
            Policy::kNt == 1 && (at_q(0, 0).at & 8) != 0 ? drawn.word[i / 2 + 2] : drawn.word[i / 2];
        float& value = s[mt][nt + i / 4][i % 4];
        if (is_dropped(word, i % 2)) value = -value;
      }
    }
}

/// dS = P (dP - D), from P with dropout's marks; dS also goes to shared memory, at `ds`. `take(mt, nt)` gets
/// an m16n8 tile's P, slope and Q K^T if another warp has them.
template <class P, class AtQ, class AtKv, class WarpRow, class Take>
__device__ __forceinline__ void softmax_backward(BackwardScores<P>& dp, const BackwardScores<P>& s,
                                                 [[maybe_unused]] const Slopes<P>& slope,
                                                 [[maybe_unused]] const Dots<P>& dots, const float* row_d,
                                                 char* ds, const Params& p, const typename P::Head& head,
                                                 const AtQ& at_q, const AtKv& at_kv, const WarpRow& warp_row,
                                                 int lane, const Take& take) {
  using Policy = BackwardPolicy<P>;
  PairSums<P> sums;
#pragma unroll
  for (int nt = 0; nt < Policy::kNt; ++nt) {
    const float2 d = *reinterpret_cast<const float2*>(row_d + nt * 8 + lane % 4 * 2);
#pragma unroll
    for (int mt = 0; mt < Policy::kMt; ++mt) {
      take(mt, nt);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float grad = dp[mt][nt][e];
        if constexpr (P::kDropout) grad = signbit(s[mt][nt][e]) ? 0.0f : grad * p.keep_scale;
        grad = PairWeights<P>::grad(s[mt][nt][e], grad, e % 2 ? d.y : d.x);
        PairGrads<P>::add(p, head, grad, dots, mt, nt, e, at_q(nt, e), at_kv(mt, e), sums);
        dp[mt][nt][e] = ScoreSlope<P>::chain(grad, slope, mt, nt, e);
      }
      store_fragment<typename P::Element, Policy::kDsPitch>(ds, warp_row(mt), nt * 8, dp[mt][nt], 1.0f, 1.0f);
      if (P::kTwoTerms)
        store_rest<typename P::Element, Policy::kDsPitch>(ds + Policy::kDsTermBytes, warp_row(mt), nt * 8,
                                                          dp[mt][nt]);
    }
  }
  sums.end();
}

/// C += A B for P or dS from registers as A, and a tile of kBr rows as B. Where `kDrops`, what dropout has
/// marked is zero.
template <class P, int kPitch, int kTotal, bool kGuard, bool kDrops, int kC>
__device__ __forceinline__ void multiply_by_columns(float (&c)[BackwardPolicy<P>::kMt][kC][4],
                                                    const BackwardScores<P>& s, unsigned b_tile) {
  using Element = typename P::Element;
  using Policy = BackwardPolicy<P>;
  const unsigned b_columns = b_tile + matrix_offset<true>(kPitch);
#pragma unroll
  for (int k = 0; k < Policy::kNt / 2; ++k) {
    unsigned a[Policy::kMt][4];
#pragma unroll
    for (int mt = 0; mt < Policy::kMt; ++mt) {
      as_left_operand<Element, Policy::kNt>(a[mt], s[mt], k);
      if constexpr (kDrops) {
#pragma unroll
        for (unsigned& pair : a[mt]) pair = without_negatives(pair);
      }
    }
    multiply_step<typename P::Mma, Element, kTotal, kGuard>(c, a, b_columns + k * 16 * kPitch * 2, 0);
    if (P::kTwoTerms) {
#pragma unroll
      for (int mt = 0; mt < Policy::kMt; ++mt) rest_as_left_operand<Element, kDrops>(a[mt], s[mt], k);
      multiply_step<typename P::Mma, Element, kTotal, kGuard>(c, a, b_columns + k * 16 * kPitch * 2, 0);
    }
  }
}

}  // namespace flashjit::sm80
