// Forward pass of family simt: FlashAttention-2. A block owns a tile of Q and walks over the tiles of K and
// V.
#pragma once

#include "flashjit/simt/tile.cuh"

namespace flashjit::simt {

template <class T>
struct RowState {
  float max[T::kM];  ///< of the scores so far; the same in all lanes of a row
  float sum[T::kM];  ///< of exp(score - max); each lane's own part
};

__device__ __forceinline__ float max_over_lanes(float x) {
#pragma unroll
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(kWholeWarp, x, lanes));
  return x;
}

__device__ __forceinline__ float sum_over_lanes(float x) {
#pragma unroll
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) x += __shfl_xor_sync(kWholeWarp, x, lanes);
  return x;
}

/// From Q K^T to scores; -inf where a pair does not attend.
template <class Problem, class T>
__device__ __forceinline__ void score_tile(typename T::Scores& s, const Params& p, const Visible& tile,
                                           const Pairs& pairs, int b, int h) {
#pragma unroll
  for (int i = 0; i < T::kM; ++i) {
#pragma unroll
    for (int j = 0; j < T::kN; ++j) {
      if (!pairs.attends(i * T::kN + j)) {
        s[i][j] = -infinity();
      } else if constexpr (Problem::kHasScore) {
        const int q = tile.q.begin + T::row(i), kv = tile.kv.begin + T::column(j);
        s[i][j] = Problem::score(p, scaled(p, s[i][j]), b, h, q, kv);
      } else {
        s[i][j] = scaled(p, s[i][j]);
      }
    }
  }
}

/// Online softmax: turns scores into exp(score - max), and brings what was summed before to the new maximum.
template <class T, int kDim>
__device__ __forceinline__ void softmax_tile(typename T::Scores& s, RowState<T>& rows, Result<T, kDim>& out) {
#pragma unroll
  for (int i = 0; i < T::kM; ++i) {
    float tile_max = s[i][0];
#pragma unroll
    for (int j = 1; j < T::kN; ++j) tile_max = fmaxf(tile_max, s[i][j]);
    const float max = fmaxf(rows.max[i], max_over_lanes(tile_max));
    // A row that attends to nothing so far must not compute inf - inf.
    const float origin = max == -infinity() ? 0.0f : max;
    const float rescale = exp2f((rows.max[i] - origin) * kLog2E);
    rows.max[i] = max;
    rows.sum[i] *= rescale;
    scale_row(out, i, rescale);
#pragma unroll
    for (int j = 0; j < T::kN; ++j) {
      s[i][j] = exp2f((s[i][j] - origin) * kLog2E);
      rows.sum[i] += s[i][j];
    }
  }
}

/// P becomes what dropout leaves of it.
template <class T>
__device__ __forceinline__ void drop_tile(typename T::Scores& s, const Pairs& pairs, float keep_scale) {
#pragma unroll
  for (int i = 0; i < T::kM; ++i) {
#pragma unroll
    for (int j = 0; j < T::kN; ++j) s[i][j] = pairs.keeps(i * T::kN + j) ? s[i][j] * keep_scale : 0.0f;
  }
}

/// Divides O by the row sums and writes LSE; rows that attend to nothing get O = 0 and LSE = -inf.
template <class T, int kDim>
__device__ __forceinline__ void finish_rows(RowState<T>& rows, Result<T, kDim>& out, float* lse, int first,
                                            int end) {
#pragma unroll
  for (int i = 0; i < T::kM; ++i) {
    const float sum = sum_over_lanes(rows.sum[i]);
    const bool nothing = rows.max[i] == -infinity();
    scale_row(out, i, nothing ? 0.0f : 1.0f / sum);
    const int row = first + T::row(i);
    if (lse && T::lane() == 0 && row < end) lse[row] = nothing ? -infinity() : rows.max[i] + logf(sum);
  }
}

/// Blocks: batch * heads_q * ceil(seqlen_q / Br).
template <class Problem>
__device__ void forward(const Params& p) {
  using T = Tile<Problem, Problem::kBr, Problem::kBc>;
  using Element = typename Problem::Element;
  const Work work = work_of_block(tiles_of(p.seqlen_q, Problem::kBr), p.heads_q);
  const int b = work.b, h = work.h, kv_head = h / (p.heads_q / p.heads_kv);
  const Range q_range = {work.tile * Problem::kBr, min((work.tile + 1) * Problem::kBr, p.seqlen_q)};
  const int kv_end = kv_length<Problem>(p, b);
  const auto q = matrix<Element>(p.q, b, h, q_range.end);
  const auto k = matrix<Element>(p.k, b, kv_head, kv_end);
  const auto v = matrix<Element>(p.v, b, kv_head, kv_end);
  const Shared shared = shared_memory<T>();

  Result<T, Problem::kHeadDimV> out = {};
  RowState<T> rows;
#pragma unroll
  for (int i = 0; i < T::kM; ++i) {
    rows.max[i] = -infinity();
    rows.sum[i] = 0.0f;
  }

  const Range bounds = Problem::kv_bounds(p, b, h, q_range);
  for (int kv = bounds.begin / Problem::kBc * Problem::kBc; kv < min(bounds.end, kv_end);
       kv += Problem::kBc) {
    const Visible tile = visible<Problem>(p, b, h, q_range, {kv, min(kv + Problem::kBc, kv_end)});
    if (!tile.any) continue;
    const Pairs pairs = pairs_of_thread<Problem, T, true>(p, tile, b, h);
    typename T::Scores s;
    multiply_transposed<T, Problem::kHeadDim>(s, shared, q, q_range.begin, k, kv);
    score_tile<Problem, T>(s, p, tile, pairs, b, h);
    softmax_tile(s, rows, out);
    if constexpr (Problem::kDropout) drop_tile<T>(s, pairs, p.keep_scale);
    store_tile<T>(shared, s);
    multiply_add(out, shared, v, kv);
  }

  const long long lse_row = (static_cast<long long>(b) * p.heads_q + h) * p.seqlen_q;
  finish_rows(rows, out, p.lse ? p.lse + lse_row : nullptr, q_range.begin, q_range.end);
  store_result(out, matrix<Element>(p.o, b, h, q_range.end), q_range.begin);
}

}  // namespace flashjit::simt
