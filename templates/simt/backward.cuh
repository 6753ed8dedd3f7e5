// Backward pass of family simt, after the preprocess entry: one kernel for dK and dV, whose CTAs own a tile
// of K and V, and one for dQ, whose CTAs own a tile of Q. Both recompute P, and no two CTAs add to the same
// element, so every run has the same bits.
#pragma once

#include "flashjit/common/out_element.cuh"
#include "flashjit/simt/pair_weights.cuh"

namespace flashjit::simt {

template <class Problem>
__device__ __forceinline__ RowStats row_stats(const Params& p, const Sequence<Problem>& sequence, int h,
                                              int q) {
  return PairWeights<Problem>::row(p, sequence, h, q);
}

/// What one pair contributes: P after dropout to dV, dS (with respect to Q K^T) to dQ and dK.
struct PairGradient {
  float p, ds;
};

/// `dot` is of Q and K, `dp` of dO and V; `dropout` is what dropout multiplies P with. `add` gets what the
/// pair adds to gradients of captured tensors.
template <class Problem, class Add>
__device__ __forceinline__ PairGradient pair_gradient(const Params& p, const typename Problem::Head& head,
                                                      int q, int kv, float dot, float dp, RowStats row,
                                                      float dropout, Add&& add) {
  float score = scaled(p, dot);
  if constexpr (Problem::kHasScore) score = Problem::score(p, head, dot, position(q), position(kv));
  const float prob = PairWeights<Problem>::weigh(score, row);
  float ds = PairWeights<Problem>::grad(prob, dp * dropout, row);
  Problem::add_capture_grads(p, head, ds, dot, position(q), position(kv), add);
  // A slope may be anything where P is zero.
  if constexpr (Problem::kScoreGrad)
    ds = ds == 0.0f ? 0.0f : ds * Problem::score_grad(p, head, dot, position(q), position(kv));
  return {prob * dropout, ds * p.softmax_scale};
}

/// Turns S into P after dropout and dP into dS.
template <class Problem, class T, bool kRowsAreQueries>
__device__ __forceinline__ void gradient_tile(typename T::Scores& s, typename T::Scores& dp, const Params& p,
                                              const Visible& tile, const Pairs& pairs,
                                              const Sequence<Problem>& sequence,
                                              const typename Problem::Head& head) {
  constexpr int kQueries = kRowsAreQueries ? T::kM : T::kN;
  // One of the two kernels adds to the gradients of captures, unless capture_grads does so in order.
  constexpr bool kAdds = kRowsAreQueries && !Problem::kDeterministic;
  [[maybe_unused]] CaptureSums<Problem::kCaptureGrads, kAdds ? T::kN : 1> sums;
  RowStats stats[kQueries];
#pragma unroll
  for (int i = 0; i < kQueries; ++i) {
    stats[i] = row_stats(p, sequence, head.h, tile.q.begin + (kRowsAreQueries ? T::row(i) : T::column(i)));
  }
#pragma unroll
  for (int i = 0; i < T::kM; ++i) {
#pragma unroll
    for (int j = 0; j < T::kN; ++j) {
      const auto add = [&](auto which, float* at, float value) {
        if constexpr (kAdds) sums.of_key(j)(which, at, value);
      };
      PairGradient gradient = {0.0f, 0.0f};
      if (pairs.attends(i * T::kN + j)) {
        const int q = tile.q.begin + (kRowsAreQueries ? T::row(i) : T::column(j));
        const int kv = tile.kv.begin + (kRowsAreQueries ? T::column(j) : T::row(i));
        float dropout = 1.0f;
        if (Problem::kDropout) dropout = pairs.keeps(i * T::kN + j) ? p.keep_scale : 0.0f;
        gradient = pair_gradient<Problem>(p, head, q, kv, s[i][j], dp[i][j], stats[kRowsAreQueries ? i : j],
                                          dropout, add);
      }
      s[i][j] = gradient.p;
      dp[i][j] = gradient.ds;
    }
  }
  if constexpr (kAdds) sums.end();
}

/// CTAs: batch * heads_kv * ceil(seqlen_kv / Bc). Rows of the tile are keys, columns are queries.
template <class Problem>
__device__ void backward_dkdv(const Params& p) {
  using T = Tile<Problem, Problem::kBc, Problem::kBr>;
  const Work work = work_of_cta(tiles_of(p.seqlen_kv, Problem::kBc), p.heads_kv);
  const int group = p.qhead_per_kvhead();
  const int kv_first = work.tile * Problem::kBc;
  const Sequence<Problem> sequence(p, work.b);
  if (Problem::kVarlen && kv_first >= sequence.seqlen_kv(p)) return;
  const Range kv_range = tile_range(work.tile, Problem::kBc, sequence.seqused_kv(p));
  const auto k = kv_matrix(p, sequence, p.k, work.h, kv_range.end);
  const auto v = kv_matrix(p, sequence, p.v, work.h, kv_range.end);
  const Shared shared = shared_memory<T>();

  Result<T, Problem::kHeadDim> dk = {};
  Result<T, Problem::kHeadDimV> dv = {};
  // A tile of padding alone attends to nothing: no head has work, and zeros are stored.
  const int head_end = kv_range.begin < kv_range.end ? (work.h + 1) * group : 0;
  for (int h = work.h * group; h < head_end; ++h) {
    const auto head = sequence.head(p, h);
    const auto q = q_matrix(sequence, p.q, h, sequence.seqlen_q(p));
    const auto dout = q_matrix(sequence, p.dout, h, sequence.seqlen_q(p));
    const Range bounds = Problem::q_bounds(p, head, kv_range);
    for (int first = bounds.begin / Problem::kBr * Problem::kBr; first < bounds.end; first += Problem::kBr) {
      const Range q_range = {first, min(first + Problem::kBr, sequence.seqlen_q(p))};
      const Visible tile = visible<Problem>(p, head, q_range, kv_range);
      if (!tile.any) continue;
      const Pairs pairs = pairs_of_thread<Problem, T, false>(p, tile, head);
      typename T::Scores s, dp;
      multiply_transposed<T, Problem::kHeadDim>(s, shared, k, kv_first, q, first);
      multiply_transposed<T, Problem::kHeadDimV>(dp, shared, v, kv_first, dout, first);
      gradient_tile<Problem, T, false>(s, dp, p, tile, pairs, sequence, head);
      store_tile<T>(shared, s);
      multiply_add(dv, shared, dout, first);
      store_tile<T>(shared, dp);
      multiply_add(dk, shared, q, first);
    }
  }
  using Grad = GradElement<Problem>;
  const int kv_end = sequence.seqlen_kv(p);
  store_result<Problem::kAddGrads>(dk, kv_matrix<Problem, Grad>(p, sequence, p.dk, work.h, kv_end), kv_first);
  store_result<Problem::kAddGrads>(dv, kv_matrix<Problem, Grad>(p, sequence, p.dv, work.h, kv_end), kv_first);
}

/// CTAs: batch * heads_q * ceil(seqlen_q / Br). Rows of the tile are queries, columns are keys.
template <class Problem>
__device__ void backward_dq(const Params& p) {
  using T = Tile<Problem, Problem::kBr, Problem::kBc>;
  const Work work = work_of_cta(tiles_of(p.seqlen_q, Problem::kBr), p.heads_q);
  const int h = work.h, h_kv = h / p.qhead_per_kvhead();
  const Sequence<Problem> sequence(p, work.b);
  const auto head = sequence.head(p, h);
  const Range q_range = tile_range(work.tile, Problem::kBr, sequence.seqlen_q(p));
  if (Problem::kVarlen && q_range.begin == q_range.end) return;
  const int kv_end = sequence.seqused_kv(p);
  const auto q = q_matrix(sequence, p.q, h, q_range.end);
  const auto dout = q_matrix(sequence, p.dout, h, q_range.end);
  const auto k = kv_matrix(p, sequence, p.k, h_kv, kv_end);
  const auto v = kv_matrix(p, sequence, p.v, h_kv, kv_end);
  const Shared shared = shared_memory<T>();

  Result<T, Problem::kHeadDim> dq = {};
  const Range bounds = Problem::kv_bounds(p, head, q_range);
  for (int kv = bounds.begin / Problem::kBc * Problem::kBc; kv < min(bounds.end, kv_end);
       kv += Problem::kBc) {
    const Visible tile = visible<Problem>(p, head, q_range, {kv, min(kv + Problem::kBc, kv_end)});
    if (!tile.any) continue;
    const Pairs pairs = pairs_of_thread<Problem, T, true>(p, tile, head);
    typename T::Scores s, dp;
    multiply_transposed<T, Problem::kHeadDim>(s, shared, q, q_range.begin, k, kv);
    multiply_transposed<T, Problem::kHeadDimV>(dp, shared, dout, q_range.begin, v, kv);
    gradient_tile<Problem, T, true>(s, dp, p, tile, pairs, sequence, head);
    store_tile<T>(shared, dp);
    multiply_add(dq, shared, k, kv);
  }
  store_result<Problem::kAddGrads>(
      dq, q_matrix<Problem, GradElement<Problem>>(sequence, p.dq, h, q_range.end), q_range.begin);
}

}  // namespace flashjit::simt
