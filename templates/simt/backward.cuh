// Backward pass of family simt, after the preprocess entry: one kernel for dK and dV, whose blocks own a tile
// of K and V, and one for dQ, whose blocks own a tile of Q. Both recompute P, no two blocks add to one place,
// and so the bits are the same on every run.
#pragma once

#include "flashjit/simt/tile.cuh"

namespace flashjit::simt {

/// LSE and D of one query. LSE in natural units, as the forward pass left it: scores of 1e4 and more leave no
/// bits for another rounding, and where one key has all the weight S - LSE is exactly zero.
struct RowStats {
  float lse, d;
};

/// Queries that attend to nothing and queries that do not exist get LSE = inf, so that P is zero.
__device__ __forceinline__ RowStats row_stats(const Params& p, int b, int h, int q) {
  if (q >= p.seqlen_q) return {infinity(), 0.0f};
  const long long head = static_cast<long long>(b) * p.heads_q + h;
  const float lse = p.lse[head * p.seqlen_q + q];
  return {lse == -infinity() ? infinity() : lse, p.d[head * p.seqlen_q_padded + q]};
}

/// What one pair contributes: P after dropout to dV, dS (with respect to Q K^T) to dQ and dK.
struct PairGradient {
  float p, ds;
};

/// `dot` is of Q and K, `dp` of dO and V; `dropout` is what dropout multiplies P with.
template <class Problem>
__device__ __forceinline__ PairGradient pair_gradient(const Params& p, int b, int h, int q, int kv, float dot,
                                                      float dp, RowStats row, float dropout) {
  const float before = scaled(p, dot);
  float score = before, slope = p.softmax_scale;
  if constexpr (Problem::kHasScore) {
    score = Problem::score(p, before, b, h, q, kv);
    slope *= Problem::score_grad(p, before, b, h, q, kv);
  }
  const float prob = exp2f((score - row.lse) * kLog2E);
  return {prob * dropout, prob * (dp * dropout - row.d) * slope};
}

/// Turns S into P after dropout and dP into dS.
template <class Problem, class T, bool kRowsAreQueries>
__device__ __forceinline__ void gradient_tile(typename T::Scores& s, typename T::Scores& dp, const Params& p,
                                              const Visible& tile, const Pairs& pairs, int b, int h) {
  constexpr int kQueries = kRowsAreQueries ? T::kM : T::kN;
  RowStats stats[kQueries];
#pragma unroll
  for (int i = 0; i < kQueries; ++i) {
    stats[i] = row_stats(p, b, h, tile.q.begin + (kRowsAreQueries ? T::row(i) : T::column(i)));
  }
#pragma unroll
  for (int i = 0; i < T::kM; ++i) {
#pragma unroll
    for (int j = 0; j < T::kN; ++j) {
      PairGradient gradient = {0.0f, 0.0f};
      if (pairs.attends(i * T::kN + j)) {
        const int q = tile.q.begin + (kRowsAreQueries ? T::row(i) : T::column(j));
        const int kv = tile.kv.begin + (kRowsAreQueries ? T::column(j) : T::row(i));
        float dropout = 1.0f;
        if constexpr (Problem::kDropout) dropout = pairs.keeps(i * T::kN + j) ? p.keep_scale : 0.0f;
        gradient = pair_gradient<Problem>(p, b, h, q, kv, s[i][j], dp[i][j], stats[kRowsAreQueries ? i : j],
                                          dropout);
      }
      s[i][j] = gradient.p;
      dp[i][j] = gradient.ds;
    }
  }
}

/// Blocks: batch * heads_kv * ceil(seqlen_kv / Bc). Rows of the tile are keys, columns are queries.
template <class Problem>
__device__ void backward_dkdv(const Params& p) {
  using T = Tile<Problem, Problem::kBc, Problem::kBr>;
  using Element = typename Problem::Element;
  const Work work = work_of_block(tiles_of(p.seqlen_kv, Problem::kBc), p.heads_kv);
  const int b = work.b, group = p.heads_q / p.heads_kv;
  const int kv_first = work.tile * Problem::kBc;
  const Range kv_range = {kv_first, min(kv_first + Problem::kBc, kv_length<Problem>(p, b))};
  const auto k = matrix<Element>(p.k, b, work.h, kv_range.end);
  const auto v = matrix<Element>(p.v, b, work.h, kv_range.end);
  const Shared shared = shared_memory<T>();

  Result<T, Problem::kHeadDim> dk = {};
  Result<T, Problem::kHeadDimV> dv = {};
  // A tile of padding alone attends to nothing: no head has work, and zeros are stored.
  const int head_end = kv_range.begin < kv_range.end ? (work.h + 1) * group : 0;
  for (int h = work.h * group; h < head_end; ++h) {
    const auto q = matrix<Element>(p.q, b, h, p.seqlen_q);
    const auto dout = matrix<Element>(p.dout, b, h, p.seqlen_q);
    const Range bounds = Problem::q_bounds(p, b, h, kv_range);
    for (int first = bounds.begin / Problem::kBr * Problem::kBr; first < bounds.end; first += Problem::kBr) {
      const Range q_range = {first, min(first + Problem::kBr, p.seqlen_q)};
      const Visible tile = visible<Problem>(p, b, h, q_range, kv_range);
      if (!tile.any) continue;
      const Pairs pairs = pairs_of_thread<Problem, T, false>(p, tile, b, h);
      typename T::Scores s, dp;
      multiply_transposed<T, Problem::kHeadDim>(s, shared, k, kv_first, q, first);
      multiply_transposed<T, Problem::kHeadDimV>(dp, shared, v, kv_first, dout, first);
      gradient_tile<Problem, T, false>(s, dp, p, tile, pairs, b, h);
      store_tile<T>(shared, s);
      multiply_add(dv, shared, dout, first);
      store_tile<T>(shared, dp);
      multiply_add(dk, shared, q, first);
    }
  }
  store_result(dk, matrix<Element>(p.dk, b, work.h, p.seqlen_kv), kv_first);
  store_result(dv, matrix<Element>(p.dv, b, work.h, p.seqlen_kv), kv_first);
}

/// Blocks: batch * heads_q * ceil(seqlen_q / Br). Rows of the tile are queries, columns are keys.
template <class Problem>
__device__ void backward_dq(const Params& p) {
  using T = Tile<Problem, Problem::kBr, Problem::kBc>;
  using Element = typename Problem::Element;
  const Work work = work_of_block(tiles_of(p.seqlen_q, Problem::kBr), p.heads_q);
  const int b = work.b, h = work.h, kv_head = h / (p.heads_q / p.heads_kv);
  const Range q_range = {work.tile * Problem::kBr, min((work.tile + 1) * Problem::kBr, p.seqlen_q)};
  const int kv_end = kv_length<Problem>(p, b);
  const auto q = matrix<Element>(p.q, b, h, q_range.end);
  const auto dout = matrix<Element>(p.dout, b, h, q_range.end);
  const auto k = matrix<Element>(p.k, b, kv_head, kv_end);
  const auto v = matrix<Element>(p.v, b, kv_head, kv_end);
  const Shared shared = shared_memory<T>();

  Result<T, Problem::kHeadDim> dq = {};
  const Range bounds = Problem::kv_bounds(p, b, h, q_range);
  for (int kv = bounds.begin / Problem::kBc * Problem::kBc; kv < min(bounds.end, kv_end);
       kv += Problem::kBc) {
    const Visible tile = visible<Problem>(p, b, h, q_range, {kv, min(kv + Problem::kBc, kv_end)});
    if (!tile.any) continue;
    const Pairs pairs = pairs_of_thread<Problem, T, true>(p, tile, b, h);
    typename T::Scores s, dp;
    multiply_transposed<T, Problem::kHeadDim>(s, shared, q, q_range.begin, k, kv);
    multiply_transposed<T, Problem::kHeadDimV>(dp, shared, dout, q_range.begin, v, kv);
    gradient_tile<Problem, T, true>(s, dp, p, tile, pairs, b, h);
    store_tile<T>(shared, dp);
    multiply_add(dq, shared, k, kv);
  }
  store_result(dq, matrix<Element>(p.dq, b, h, q_range.end), q_range.begin);
}

}  // namespace flashjit::simt
