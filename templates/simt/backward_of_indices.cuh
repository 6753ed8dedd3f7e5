// Backward pass of family simt where each query has a list of keys, after the preprocess entry. A CTA owns
// some of one query's heads, as in the forward pass: dQ stays with it, dK and dV of the keys that the list
// names are added to fp32 accumulators, in any order, which another kernel converts.
#pragma once

#include "flashjit/simt/backward.cuh"
#include "flashjit/simt/query_heads.cuh"

namespace flashjit::simt {

/// Turns S into P and dP into dS.
template <class Problem, class T>
__device__ __forceinline__ void entry_gradients(typename T::Scores& s, typename T::Scores& dp,
                                                const Params& p, const QueryHeads<Problem>& rows,
                                                const int* keys) {
  const auto add = [](auto, float* at, float value) { atomicAdd(at, value); };
#pragma unroll 1
  for (int i = 0; i < T::kM; ++i) {
    const bool exists = T::row(i) < rows.count;
    const int h = rows.h + (exists ? T::row(i) : 0);
    const auto head = rows.sequence.head(p, h);
    const RowStats row = row_stats<Problem>(p, rows.sequence, h, rows.q);
#pragma unroll
    for (int j = 0; j < T::kN; ++j) {
      const int key = keys[T::column(j)];
      PairGradient gradient = {0.0f, 0.0f};
      if (exists && attends_to_entry<Problem>(p, rows, head, key))
        gradient = pair_gradient<Problem>(p, head, rows.q, key, s[i][j], dp[i][j], row, 1.0f, add);
      s[i][j] = gradient.p;
      dp[i][j] = gradient.ds;
    }
  }
}

/// Adds tile^T B to the accumulators of the tile's keys; B has the tile's rows.
template <class Problem, class T, int kDim, class Rows>
__device__ __forceinline__ void add_kv_gradient(const Params& p, const typename T::Scores& tile,
                                                const Rows& b, const QueryHeads<Problem>& rows,
                                                const int* keys, float* to) {
  using Turned = Tile<Problem, T::kColumns, T::kRows>;
  const Shared shared = shared_memory<Turned>();
  __syncthreads();
#pragma unroll
  for (int i = 0; i < T::kM; ++i)
#pragma unroll
    for (int j = 0; j < T::kN; ++j)
      shared.tile[T::column(j) * tile_stride(Turned::kColumns) + T::row(i)] = tile[i][j];
  Result<Turned, kDim> result = {};
  multiply_add(result, shared, b, 0);
#pragma unroll
  for (int i = 0; i < Turned::kM; ++i) {
    const int key = keys[Turned::row(i)];
    if (key < 0) continue;
    float* row = to + kv_row_of_split(p, 0, rows.sequence.b, rows.h_kv, key) * kDim;
#pragma unroll
    for (int chunk = 0; chunk < chunks(kDim); ++chunk) {
      const int column = chunk * kChunk + Turned::lane() * kColumnsPerLane;
      const float(&x)[kColumnsPerLane] = result.at[chunk][i];
      if (column < kDim) add_four(row + column, x[0], x[1], x[2], x[3]);
    }
  }
}

/// CTAs: see QueryHeads.
template <class Problem>
__device__ void backward_of_indices(const Params& p) {
  using T = Tile<Problem, Problem::kBr, Problem::kBc>;
  const QueryHeads<Problem> rows(p);
  if (rows.count == 0) return;
  const auto q = rows.matrix(p.q), dout = rows.matrix(p.dout);
  const Shared shared = shared_memory<T>();
  __shared__ ListTile<Problem> list;
  const auto k = rows.keys_of(p, p.k, p.k_scale, list), v = rows.keys_of(p, p.v, p.v_scale, list);

  Result<T, Problem::kHeadDim> dq = {};
  const int entries = length_of_list<Problem>(p, rows.sequence, rows.q);
  for (int first = 0; first < entries; first += Problem::kBc) {
    rows.read_list(p, first, list);
    typename T::Scores s, dp;
    multiply_transposed<T, Problem::kHeadDim>(s, shared, q, 0, k, 0);
    multiply_transposed<T, Problem::kHeadDimV>(dp, shared, dout, 0, v, 0);
    entry_gradients<Problem, T>(s, dp, p, rows, list.keys);
    add_kv_gradient<Problem, T, Problem::kHeadDimV>(p, s, dout, rows, list.keys, p.dv_splits);
    add_kv_gradient<Problem, T, Problem::kHeadDim>(p, dp, q, rows, list.keys, p.dk_splits);
    __syncthreads();
    store_tile<T>(shared, dp);
    multiply_add(dq, shared, k, 0);
  }
  store_result(dq, rows.template matrix<GradElement<Problem>>(p.dq), 0);
}

}  // namespace flashjit::simt
