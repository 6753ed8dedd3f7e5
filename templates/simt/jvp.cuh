// O and its tangent by family simt: as the forward pass, with two more accumulators. A row sums up P dS, and
// P dS V + P dV; at the end dLSE = rowsum(P dS) and dO = P dS V + P dV - dLSE O, all of them over rowsum(P).
#pragma once

#include "flashjit/common/score_tangent.cuh"
#include "flashjit/simt/forward.cuh"

namespace flashjit::simt {

/// From Q K^T and its tangent to scores and theirs: -inf and 0 where a pair does not attend.
template <class Problem, class T>
__device__ __forceinline__ void score_tangent_tile(typename T::Scores& s, typename T::Scores& ds,
                                                   const JvpParams& p, const Visible& tile,
                                                   const Pairs& pairs, const typename Problem::Head& head) {
#pragma unroll
  for (int i = 0; i < T::kM; ++i)
#pragma unroll
    for (int j = 0; j < T::kN; ++j) {
      const int q = tile.q.begin + T::row(i), kv = tile.kv.begin + T::column(j);
      ds[i][j] = pairs.attends(i * T::kN + j)
                     ? score_tangent<Problem>(p, head, s[i][j], ds[i][j], position(q), position(kv))
                     : 0.0f;
    }
  score_tile<Problem, T>(s, p, tile, pairs, head);
}

/// dS = P dS, where P is exp(score - max), and their row sums, which are rescaled as rowsum(P) is.
template <class T>
__device__ __forceinline__ void weigh_tangents(typename T::Scores& ds, const typename T::Scores& p,
                                               float (&sum)[T::kM]) {
#pragma unroll
  for (int i = 0; i < T::kM; ++i)
#pragma unroll
    for (int j = 0; j < T::kN; ++j) {
      ds[i][j] = chained(p[i][j], ds[i][j]);  // a tangent may be anything where P is zero
      sum[i] += ds[i][j];
    }
}

/// A matrix of tangents, whose rows are zeros where it is null.
template <class Matrix>
__device__ __forceinline__ Matrix tangent_rows(const TensorParam& tensor, Matrix matrix) {
  if (tensor.data == nullptr) matrix.end = 0;
  return matrix;
}

/// Divides O and its tangent by the row sums, and writes LSE and its tangent.
template <class Problem, class T, int kDim>
__device__ __forceinline__ void finish_tangents(const JvpParams& p, const Sequence<Problem>& sequence, int h,
                                                const RowState<T>& rows, const float (&sums)[T::kM],
                                                Result<T, kDim>& out, Result<T, kDim>& out_tangent, int first,
                                                int end) {
#pragma unroll
  for (int i = 0; i < T::kM; ++i) {
    const float sum = sum_over_lanes(rows.sum[i]);
    const bool nothing = !has_keys(sum);
    const int row = first + T::row(i);
    const RowEnd row_end = with_sink<Problem>(p, h, nothing ? -infinity() : rows.max[i] + logf(sum));
    const float factor = nothing ? 0.0f : row_end.factor / sum;
    const float tangent = with_sink_tangent<Problem>(p, h, sum_over_lanes(sums[i]) * factor, row_end.factor);
    scale_row(out, i, factor);
    scale_row(out_tangent, i, factor);
#pragma unroll
    for (int chunk = 0; chunk < chunks(kDim); ++chunk)
#pragma unroll
      for (int c = 0; c < kColumnsPerLane; ++c) out_tangent.at[chunk][i][c] -= tangent * out.at[chunk][i][c];
    const bool writes = T::lane() == 0 && row < end;
    const long long at = sequence.lse_row(p, h, row);
    if (p.lse.data && writes) p.lse.data[at] = row_end.lse;
    if (p.lse_tangent && writes) p.lse_tangent[at] = tangent;
  }
}

/// CTAs: batch * heads_q * ceil(seqlen_q / Br).
template <class Problem>
__device__ void jvp(const JvpParams& p) {
  zero_unused_rows_of_tangents<Problem>(p);
  using T = Tile<Problem, Problem::kBr, Problem::kBc>;
  const Work work = work_of_cta(tiles_of(p.seqlen_q, Problem::kBr), p.heads_q);
  const int h = work.h, h_kv = h / p.qhead_per_kvhead();
  const Sequence<Problem> sequence(p, work.b);
  const auto head = sequence.head(p, h);
  const Range q_range = tile_range(work.tile, Problem::kBr, sequence.seqlen_q(p));
  if (Problem::kVarlen && q_range.begin == q_range.end) return;
  const int kv_end = sequence.seqused_kv(p), first = q_range.begin;
  const auto q = q_matrix(sequence, p.q, h, q_range.end);
  const auto k = kv_matrix(p, sequence, p.k, h_kv, kv_end), v = kv_matrix(p, sequence, p.v, h_kv, kv_end);
  const auto dq = tangent_rows(p.q_tangent, q_matrix(sequence, p.q_tangent, h, q_range.end));
  const auto dk = tangent_rows(p.k_tangent, kv_matrix(p, sequence, p.k_tangent, h_kv, kv_end));
  const auto dv = tangent_rows(p.v_tangent, kv_matrix(p, sequence, p.v_tangent, h_kv, kv_end));
  const Shared shared = shared_memory<T>();

  Result<T, Problem::kHeadDimV> out = {}, out_tangent = {};
  RowState<T> rows;
  float sums[T::kM] = {};  // of P dS
#pragma unroll
  for (int i = 0; i < T::kM; ++i) rows.max[i] = -infinity(), rows.sum[i] = 0.0f;

  const Range bounds = Problem::kv_bounds(p, head, q_range);
  for (int kv = bounds.begin / Problem::kBc * Problem::kBc; kv < min(bounds.end, kv_end);
       kv += Problem::kBc) {
    const Visible tile = visible<Problem>(p, head, q_range, {kv, min(kv + Problem::kBc, kv_end)});
    if (!tile.any) continue;
    const Pairs pairs = pairs_of_thread<Problem, T, true>(p, tile, head);
    typename T::Scores s, ds;
    multiply_transposed<T, Problem::kHeadDim>(s, shared, q, first, k, kv);
    multiply_transposed<T, Problem::kHeadDim>(ds, shared, dq, first, k, kv);
    add_transposed<T, Problem::kHeadDim>(ds, shared, q, first, dk, kv);
    score_tangent_tile<Problem, T>(s, ds, p, tile, pairs, head);
    float before[T::kM];
#pragma unroll
    for (int i = 0; i < T::kM; ++i) before[i] = rows.max[i];
    softmax_tile(s, rows, out);
#pragma unroll
    for (int i = 0; i < T::kM; ++i) {
      const float rescale = rows.max[i] == before[i] ? 1.0f : exp2f((before[i] - rows.max[i]) * kLog2E);
      sums[i] *= rescale;
      scale_row(out_tangent, i, rescale);
    }
    weigh_tangents<T>(ds, s, sums);
    if (Problem::kDropout) drop_tile<T>(s, pairs, p.keep_scale), drop_tile<T>(ds, pairs, p.keep_scale);
    store_tile<T>(shared, s);
    multiply_add(out, shared, v, kv);
    if (p.v_tangent.data) multiply_add(out_tangent, shared, dv, kv);
    store_tile<T>(shared, ds);
    multiply_add(out_tangent, shared, v, kv);
  }

  finish_tangents<Problem>(p, sequence, h, rows, sums, out, out_tangent, first, q_range.end);
  using Out = OutElement<Problem>;
  store_result(out, q_matrix<Problem, Out>(sequence, p.o, h, q_range.end), first);
  store_result(out_tangent, q_matrix<Problem, Out>(sequence, p.o_tangent, h, q_range.end), first);
}

}  // namespace flashjit::simt
