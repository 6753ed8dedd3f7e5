// Forward pass of family simt where each query has a list of keys, which the heads that share a head of K and
// V have in common: a CTA owns some of one query's heads, and walks over the tiles of its list.
#pragma once

#include "flashjit/simt/forward.cuh"
#include "flashjit/simt/query_heads.cuh"

namespace flashjit::simt {

/// Scores of the tile of a list; -inf where a pair does not attend.
template <class Problem, class T>
__device__ __forceinline__ void score_entries(typename T::Scores& s, const Params& p,
                                              const QueryHeads<Problem>& rows, const int* keys) {
#pragma unroll 1
  for (int i = 0; i < T::kM; ++i) {
    if (T::row(i) >= rows.count) continue;
    const auto head = rows.sequence.head(p, rows.h + T::row(i));
#pragma unroll
    for (int j = 0; j < T::kN; ++j) {
      const int key = keys[T::column(j)];
      if (!attends_to_entry<Problem>(p, rows, head, key))
        s[i][j] = -infinity();
      else if constexpr (Problem::kHasScore)
        s[i][j] = Problem::score(p, head, s[i][j], position(rows.q), position(key));
      else
        s[i][j] = scaled(p, s[i][j]);
    }
  }
}

/// CTAs: see QueryHeads.
template <class Problem>
__device__ void forward_of_indices(const Params& p) {
  zero_unused_rows_of_output<Problem>(p);
  using T = Tile<Problem, Problem::kBr, Problem::kBc>;
  const QueryHeads<Problem> rows(p);
  if (rows.count == 0) return;
  const auto q = QRows<Problem>::rows(p, [&](const TensorParam& tensor) { return rows.matrix(tensor); });
  const Shared shared = shared_memory<T>();
  __shared__ ListTile<Problem> list;
  const auto k = EntryMatrices<Problem>::k(p, rows, list);
  const auto v = EntryMatrices<Problem>::v(p, rows, list);

  Result<T, Problem::kHeadDimV> out = {};
  RowState<T> state;
#pragma unroll
  for (int i = 0; i < T::kM; ++i) {
    state.max[i] = -infinity();
    state.sum[i] = 0.0f;
  }
  const int entries = length_of_list<Problem>(p, rows.sequence, rows.q);
  for (int first = 0; first < entries; first += Problem::kBc) {
    rows.read_list(p, first, list);
    typename T::Scores s;
    multiply_transposed<T, Problem::kHeadDim>(s, shared, q, 0, k, 0);
    score_entries<Problem, T>(s, p, rows, list.keys);
    softmax_tile(s, state, out);
    store_tile<T>(shared, s);
    multiply_add(out, shared, v, 0);
  }

#pragma unroll
  for (int i = 0; i < T::kM; ++i) {
    const float sum = sum_over_lanes(state.sum[i]);
    const bool nothing = !has_keys(sum), exists = T::row(i) < rows.count;
    const int h = exists ? rows.h + T::row(i) : rows.h;
    const RowEnd end = end_of_row<Problem>(p, h, nothing ? -infinity() : state.max[i] + logf(sum));
    scale_row(out, i, nothing ? 0.0f : end.factor / sum);
    if (!exists || T::lane() != 0) continue;
    const long long row = rows.sequence.lse_row(p, h, rows.q);
    if (p.lse.data) p.lse.data[row] = end.lse;
    if (Problem::kRowMax) p.row_max[row] = largest_or_nan(state.max[i], sum);
  }
  HeadsOut<Problem, T>::store(p, rows, out);
}

}  // namespace flashjit::simt
