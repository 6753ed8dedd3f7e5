// Forward pass of family simt: FlashAttention-2. A CTA owns a tile of Q and walks over the tiles of K and
// V.
#pragma once

#include "flashjit/common/running_state.cuh"
#include "flashjit/common/sink.cuh"
#include "flashjit/common/unused_out_rows.cuh"
#include "flashjit/simt/out_codes.cuh"
#include "flashjit/simt/out_mod.cuh"
#include "flashjit/simt/q_parts.cuh"
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

/// From Q K^T to scores; masked_score() where a pair does not attend.
template <class Problem, class T>
__device__ __forceinline__ void score_tile(typename T::Scores& s, const Params& p, const Visible& tile,
                                           const Pairs& pairs, const typename Problem::Head& head) {
#pragma unroll
  for (int i = 0; i < T::kM; ++i) {
#pragma unroll
    for (int j = 0; j < T::kN; ++j) {
      if (!pairs.attends(i * T::kN + j)) {
        s[i][j] = masked_score<Problem>();
      } else if constexpr (Problem::kHasScore) {
        const int q = tile.q.begin + T::row(i), kv = tile.kv.begin + T::column(j);
        s[i][j] = Problem::score(p, head, s[i][j], position(q), position(kv));
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

/// Applies dropout to P.
template <class T>
__device__ __forceinline__ void drop_tile(typename T::Scores& s, const Pairs& pairs, float keep_scale) {
#pragma unroll
  for (int i = 0; i < T::kM; ++i) {
#pragma unroll
    for (int j = 0; j < T::kN; ++j) s[i][j] = pairs.keeps(i * T::kN + j) ? s[i][j] * keep_scale : 0.0f;
  }
}

/// Adds the running state's O to a row; `from`: its first column.
template <class T, int kDim>
__device__ __forceinline__ void add_state(Result<T, kDim>& out, int i, const float* from, float factor) {
  static_assert(kColumnsPerLane == 4);
#pragma unroll
  for (int chunk = 0; chunk < chunks(kDim); ++chunk) {
    const int column = chunk * kChunk + T::lane() * kColumnsPerLane;
    if (column >= kDim) continue;
    const float4 x = state_columns(from + column, factor);
    float(&to)[kColumnsPerLane] = out.at[chunk][i];
    to[0] += x.x, to[1] += x.y, to[2] += x.z, to[3] += x.w;
  }
}

/// Divides O by the row sums and writes LSE, and the rows' largest scores; rows that attend to nothing get O
/// = 0 and LSE = -inf.
template <class Problem, class T, int kDim>
__device__ __forceinline__ void finish_rows(const Params& p, const Sequence<Problem>& sequence, int h,
                                            RowState<T>& rows, Result<T, kDim>& out, int first, int end) {
#pragma unroll
  for (int i = 0; i < T::kM; ++i) {
    const float sum = sum_over_lanes(rows.sum[i]);
    const bool nothing = !has_keys(sum);
    const int row = first + T::row(i);
    const long long at = sequence.lse_row(p, h, row);
    RowEnd row_end = end_of_row<Problem>(p, h, nothing ? -infinity() : rows.max[i] + logf(sum));
    const float of_state = join_state<Problem>(p, row < end, at, row_end);
    scale_row(out, i, nothing ? 0.0f : row_end.factor / sum);
    if constexpr (Problem::kRunningState)
      add_state(out, i, sequence.template q_pointer<float>(p.o_state, h, row), of_state);
    if (p.lse.data && T::lane() == 0 && row < end) p.lse.data[at] = row_end.lse;
    if (Problem::kRowMax && T::lane() == 0 && row < end) p.row_max[at] = largest_or_nan(rows.max[i], sum);
  }
}

/// What becomes of a tile's scores, and of rows at the end; RowWeights names one of these types.
template <class Problem, class T>
struct SoftmaxRows {
  using Out = Result<T, Problem::kHeadDimV>;
  static __device__ __forceinline__ void weigh(typename T::Scores& s, RowState<T>& rows, Out& out) {
    softmax_tile(s, rows, out);
  }
  static __device__ __forceinline__ void finish(const Params& p, const Sequence<Problem>& sequence, int h,
                                                RowState<T>& rows, Out& out, Range q_range) {
    finish_rows<Problem>(p, sequence, h, rows, out, q_range.begin, q_range.end);
  }
};
/// The program's values are P: rows have no maximum, no sum and no LSE.
template <class Problem, class T>
struct ProgramRows {
  using Out = Result<T, Problem::kHeadDimV>;
  static __device__ __forceinline__ void weigh(typename T::Scores&, RowState<T>&, Out&) {}
  static __device__ __forceinline__ void finish(const Params&, const Sequence<Problem>&, int, RowState<T>&,
                                                Out&, Range) {}
};
template <class Problem, class T>
using RowWeights = Conditional<Problem::kWeightMod, ProgramRows<Problem, T>, SoftmaxRows<Problem, T>>;

/// CTAs: batch * heads_q * ceil(seqlen_q / Br).
template <class Problem>
__device__ void forward(const Params& p) {
  zero_unused_rows_of_output<Problem>(p);
  using T = Tile<Problem, Problem::kBr, Problem::kBc>;
  const Work work = work_of_cta(tiles_of(p.seqlen_q, Problem::kBr), p.heads_q);
  const int h = work.h, h_kv = h / p.qhead_per_kvhead();
  const Sequence<Problem> sequence(p, work.b);
  const auto head = sequence.head(p, h);
  const Range q_range = tile_range(work.tile, Problem::kBr, sequence.seqlen_q(p));
  if (Problem::kVarlen && q_range.begin == q_range.end) return;
  const int kv_end = sequence.seqused_kv(p), kv_begin = first_key_of<Problem>(p, head, q_range);
  const auto q = QRows<Problem>::rows(p, [&](const TensorParam& tensor) {
    return ScaledQMatrix<Problem>{q_matrix<Problem, QElement<Problem>>(sequence, tensor, h, q_range.end),
                                  q_scale<Problem>(p, work.b, h_kv)};
  });
  const auto k = KvMatrices<Problem>::k(p, sequence, h_kv, kv_end, kv_begin);
  const auto v = KvMatrices<Problem>::v(p, sequence, h_kv, kv_end, kv_begin);
  const Shared shared = shared_memory<T>();

  Result<T, Problem::kHeadDimV> out = {};
  RowState<T> rows;
#pragma unroll
  for (int i = 0; i < T::kM; ++i) {
    rows.max[i] = -infinity();
    rows.sum[i] = 0.0f;
  }

  const Range bounds = Problem::kv_bounds(p, head, q_range);
  for (int kv = bounds.begin / Problem::kBc * Problem::kBc; kv < min(bounds.end, kv_end);
       kv += Problem::kBc) {
    const Visible tile = visible<Problem>(p, head, q_range, {kv, min(kv + Problem::kBc, kv_end)});
    if (!tile.any) continue;
    const Pairs pairs = pairs_of_thread<Problem, T, true>(p, tile, head);
    typename T::Scores s;
    multiply_transposed<T, Problem::kHeadDim>(s, shared, q, q_range.begin, k, kv);
    score_tile<Problem, T>(s, p, tile, pairs, head);
    RowWeights<Problem, T>::weigh(s, rows, out);
    if (Problem::kDropout) drop_tile<T>(s, pairs, p.keep_scale);
    store_tile<T>(shared, s);
    multiply_add(out, shared, v, kv);
  }

  RowWeights<Problem, T>::finish(p, sequence, h, rows, out, q_range);
  OutMod<Problem, T>::apply(p, sequence, head, q_range, out);
  CompleteOut<Problem, T>::store(p, sequence, h, q_range, out);
}

}  // namespace flashjit::simt
