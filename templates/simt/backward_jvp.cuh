// Tangents of dQ, dK and dV by family simt: the derivative of the backward pass
// (common/gradient_tangents.cuh). One kernel owns tiles of Q. It goes over the keys twice: for D, LSE' and
// D', which it also stores, and for dQ'. Another, which owns tiles of K and V, reads them and computes dK'
// and dV'. No two CTAs add to the same element but of captures' gradients.
#pragma once

#include "flashjit/common/gradient_tangents.cuh"
#include "flashjit/common/unused_rows.cuh"
#include "flashjit/simt/forward.cuh"

namespace flashjit::simt {

/// Q and dO of a head, or K and V, and their tangents.
template <class Matrix>
struct Operands {
  Matrix x, x_tangent, y, y_tangent;
};

/// A matrix of tangents, which has no rows where it is null: they read as zeros.
template <class Matrix>
__device__ __forceinline__ Matrix rows_or_zeros(const TensorParam& tensor, Matrix matrix) {
  if (tensor.data == nullptr) matrix.end = 0;
  return matrix;
}

template <class Problem>
__device__ __forceinline__ auto query_operands(const BackwardJvpParams& p, const Sequence<Problem>& sequence,
                                               int h, int end) {
  const auto rows = [&](const TensorParam& tensor) {
    return rows_or_zeros(tensor, q_matrix(sequence, tensor, h, end));
  };
  return Operands<decltype(rows(p.q))>{rows(p.q), rows(p.q_tangent), rows(p.dout), rows(p.dout_tangent)};
}
template <class Problem>
__device__ __forceinline__ auto key_operands(const BackwardJvpParams& p, const Sequence<Problem>& sequence,
                                             int h, int end) {
  const auto rows = [&](const TensorParam& tensor) {
    return rows_or_zeros(tensor, kv_matrix(p, sequence, tensor, h, end));
  };
  return Operands<decltype(rows(p.k))>{rows(p.k), rows(p.k_tangent), rows(p.v), rows(p.v_tangent)};
}

/// Q K^T and dO V^T of a tile, or their transposes, and tangents; after pair_tangents() P and dS.
template <class T>
struct PairTiles {
  typename T::Scores x, x_tangent, y, y_tangent;
};

/// product = A B^T, tangent = A' B^T + A B'^T.
template <class T, int kDim, class Rows, class Columns>
__device__ __forceinline__ void multiply_with_tangent(typename T::Scores& product,
                                                      typename T::Scores& tangent, const Shared& shared,
                                                      const Rows& a, const Rows& a_tangent, int first_row,
                                                      const Columns& b, const Columns& b_tangent,
                                                      int first_column) {
  multiply_transposed<T, kDim>(product, shared, a, first_row, b, first_column);
#pragma unroll
  for (int i = 0; i < T::kM; ++i)
#pragma unroll
    for (int j = 0; j < T::kN; ++j) tangent[i][j] = 0.0f;
  if (a_tangent.end > 0) add_transposed<T, kDim>(tangent, shared, a_tangent, first_row, b, first_column);
  if (b_tangent.end > 0) add_transposed<T, kDim>(tangent, shared, a, first_row, b_tangent, first_column);
}

template <class Problem, class T, class Rows, class Columns>
__device__ __forceinline__ void multiply_pairs(PairTiles<T>& pairs, const Shared& shared,
                                               const Operands<Rows>& rows, int first_row,
                                               const Operands<Columns>& columns, int first_column) {
  multiply_with_tangent<T, Problem::kHeadDim>(pairs.x, pairs.x_tangent, shared, rows.x, rows.x_tangent,
                                              first_row, columns.x, columns.x_tangent, first_column);
  multiply_with_tangent<T, Problem::kHeadDimV>(pairs.y, pairs.y_tangent, shared, rows.y, rows.y_tangent,
                                               first_row, columns.y, columns.y_tangent, first_column);
}

/// Calls f(i, j, pair) for each pair of a thread that attends, and none(i, j) for the others.
template <class Problem, class T, bool kRowsAreQueries, class F, class None>
__device__ __forceinline__ void for_each_pair(const PairTiles<T>& tiles, const Params& p, const Visible& tile,
                                              const Pairs& pairs, F&& f, None&& none) {
#pragma unroll
  for (int i = 0; i < T::kM; ++i)
#pragma unroll
    for (int j = 0; j < T::kN; ++j) {
      if (!pairs.attends(i * T::kN + j)) {
        none(i, j);
        continue;
      }
      const int q = tile.q.begin + (kRowsAreQueries ? T::row(i) : T::column(j));
      const int kv = tile.kv.begin + (kRowsAreQueries ? T::column(j) : T::row(i));
      float dropout = 1.0f;
      if (Problem::kDropout) dropout = pairs.keeps(i * T::kN + j) ? p.keep_scale : 0.0f;
      f(i, j,
        PairProducts{q, kv, tiles.x[i][j], tiles.x_tangent[i][j], tiles.y[i][j], tiles.y_tangent[i][j],
                     dropout});
    }
}

/// Turns the products into P and dS, and their tangents. `rows` are of the tile's queries.
template <class Problem, class T, bool kRowsAreQueries>
__device__ __forceinline__ void pair_tangents_of_tile(
    PairTiles<T>& tiles, const BackwardJvpParams& p, const Visible& tile, const Pairs& pairs,
    const typename Problem::Head& head, const RowTangents (&rows)[kRowsAreQueries ? T::kM : T::kN]) {
  [[maybe_unused]] CaptureSums<Problem::kCaptureGrads, kRowsAreQueries ? T::kN : 1> sums;
  const auto put = [&](int i, int j, const PairTangents& found) {
    tiles.x[i][j] = found.p, tiles.x_tangent[i][j] = found.p_tangent;
    tiles.y[i][j] = found.ds, tiles.y_tangent[i][j] = found.ds_tangent;
  };
  for_each_pair<Problem, T, kRowsAreQueries>(
      tiles, p, tile, pairs,
      [&](int i, int j, const PairProducts& pair) {
        // One of the two kernels adds to the gradients of captures.
        const auto add = [&](auto which, float* at, float value) {
          if (kRowsAreQueries) sums.of_key(kRowsAreQueries ? j : 0)(which, at, value);
        };
        put(i, j, pair_tangents<Problem>(p, head, pair, rows[kRowsAreQueries ? i : j], add));
      },
      [&](int i, int j) {
        put(i, j, {0.0f, 0.0f, 0.0f, 0.0f});
      });
  if (kRowsAreQueries) sums.end();
}

/// result += values B + values' B', where either may be zeros.
template <class T, int kDim, class Rows>
__device__ __forceinline__ void add_products(Result<T, kDim>& result, const Shared& shared,
                                             const typename T::Scores& tangents, const Rows& of_tangents,
                                             const typename T::Scores& values, const Rows& of_values,
                                             int first) {
  store_tile<T>(shared, tangents);
  multiply_add(result, shared, of_tangents, first);
  if (of_values.end == 0) return;
  store_tile<T>(shared, values);
  multiply_add(result, shared, of_values, first);
}

/// CTAs: batch * heads_q * ceil(seqlen_q / Br). Rows of the tile are queries, columns are keys.
template <class Problem>
__device__ void backward_jvp_dq(const BackwardJvpParams& p) {
  zero_unused_rows_of_gradients<Problem>(p);
  using T = Tile<Problem, Problem::kBr, Problem::kBc>;
  const Work work = work_of_cta(tiles_of(p.seqlen_q, Problem::kBr), p.heads_q);
  const int h = work.h;
  const Sequence<Problem> sequence(p, work.b);
  const auto head = sequence.head(p, h);
  const Range q_range = tile_range(work.tile, Problem::kBr, sequence.seqlen_q(p));
  if (Problem::kVarlen && q_range.begin == q_range.end) return;
  const int kv_end = sequence.seqused_kv(p), first = q_range.begin;
  const auto queries = query_operands(p, sequence, h, q_range.end);
  const auto keys = key_operands(p, sequence, h / p.qhead_per_kvhead(), kv_end);
  const Shared shared = shared_memory<T>();

  // Calls f with each tile's products, its pairs and the tile.
  const auto for_each_tile = [&](auto&& f) {
    const Range bounds = Problem::kv_bounds(p, head, q_range);
    for (int kv = bounds.begin / Problem::kBc * Problem::kBc; kv < min(bounds.end, kv_end);
         kv += Problem::kBc) {
      const Visible tile = visible<Problem>(p, head, q_range, {kv, min(kv + Problem::kBc, kv_end)});
      if (!tile.any) continue;
      const Pairs pairs = pairs_of_thread<Problem, T, true>(p, tile, head);
      PairTiles<T> tiles;
      multiply_pairs<Problem, T>(tiles, shared, queries, first, keys, kv);
      f(tiles, pairs, tile);
    }
  };

  float lse[T::kM];
  RowTangentSums sums[T::kM];
#pragma unroll
  for (int i = 0; i < T::kM; ++i) lse[i] = lse_or_infinity(p, sequence, h, first + T::row(i));
  for_each_tile([&](PairTiles<T>& tiles, const Pairs& pairs, const Visible& tile) {
    for_each_pair<Problem, T, true>(
        tiles, p, tile, pairs,
        [&](int i, int, const PairProducts& pair) { sums[i].template add<Problem>(p, head, pair, lse[i]); },
        [](int, int) {});
  });
  RowTangents rows[T::kM];
#pragma unroll
  for (int i = 0; i < T::kM; ++i) {
    const RowTangentSums whole{sum_over_lanes(sums[i].p), sum_over_lanes(sums[i].d),
                               sum_over_lanes(sums[i].lse_tangent), sum_over_lanes(sums[i].d_tangent)};
    rows[i] = finish_row(lse[i], whole, p, sequence, h, first + T::row(i), T::lane() == 0);
  }

  Result<T, Problem::kHeadDim> dq = {};
  for_each_tile([&](PairTiles<T>& tiles, const Pairs& pairs, const Visible& tile) {
    pair_tangents_of_tile<Problem, T, true>(tiles, p, tile, pairs, head, rows);
    add_products(dq, shared, tiles.y_tangent, keys.x, tiles.y, keys.x_tangent, tile.kv.begin);
  });
  store_result<Problem::kAddGrads>(
      dq, q_matrix<Problem, GradElement<Problem>>(sequence, p.dq, h, q_range.end), first);
}

/// CTAs: batch * heads_kv * ceil(seqlen_kv / Bc), after backward_jvp_dq. Rows of the tile are keys, columns
/// are queries.
template <class Problem>
__device__ void backward_jvp_dkdv(const BackwardJvpParams& p) {
  using T = Tile<Problem, Problem::kBc, Problem::kBr>;
  const Work work = work_of_cta(tiles_of(p.seqlen_kv, Problem::kBc), p.heads_kv);
  const int group = p.qhead_per_kvhead(), kv_first = work.tile * Problem::kBc;
  const Sequence<Problem> sequence(p, work.b);
  if (Problem::kVarlen && kv_first >= sequence.seqlen_kv(p)) return;
  const Range kv_range = tile_range(work.tile, Problem::kBc, sequence.seqused_kv(p));
  const auto keys = key_operands(p, sequence, work.h, kv_range.end);
  const Shared shared = shared_memory<T>();

  Result<T, Problem::kHeadDim> dk = {};
  Result<T, Problem::kHeadDimV> dv = {};
  const int head_end = kv_range.begin < kv_range.end ? (work.h + 1) * group : 0;
  for (int h = work.h * group; h < head_end; ++h) {
    const auto head = sequence.head(p, h);
    const auto queries = query_operands(p, sequence, h, sequence.seqlen_q(p));
    const Range bounds = Problem::q_bounds(p, head, kv_range);
    for (int first = bounds.begin / Problem::kBr * Problem::kBr; first < bounds.end; first += Problem::kBr) {
      const Range q_range = {first, min(first + Problem::kBr, sequence.seqlen_q(p))};
      const Visible tile = visible<Problem>(p, head, q_range, kv_range);
      if (!tile.any) continue;
      const Pairs pairs = pairs_of_thread<Problem, T, false>(p, tile, head);
      PairTiles<T> tiles;
      multiply_pairs<Problem, T>(tiles, shared, keys, kv_first, queries, first);
      RowTangents rows[T::kN];
#pragma unroll
      for (int j = 0; j < T::kN; ++j) rows[j] = stored_row(p, sequence, h, first + T::column(j));
      pair_tangents_of_tile<Problem, T, false>(tiles, p, tile, pairs, head, rows);
      add_products(dv, shared, tiles.x_tangent, queries.y, tiles.x, queries.y_tangent, first);
      add_products(dk, shared, tiles.y_tangent, queries.x, tiles.y, queries.x_tangent, first);
    }
  }
  using Grad = GradElement<Problem>;
  const int kv_end = sequence.seqlen_kv(p);
  store_result<Problem::kAddGrads>(dk, kv_matrix<Problem, Grad>(p, sequence, p.dk, work.h, kv_end), kv_first);
  store_result<Problem::kAddGrads>(dv, kv_matrix<Problem, Grad>(p, sequence, p.dv, work.h, kv_end), kv_first);
}

}  // namespace flashjit::simt
