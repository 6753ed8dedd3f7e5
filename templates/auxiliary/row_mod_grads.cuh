// After the backward pass of a spec with q_mod or k_mod: dQ and dK of Q and K as they are given, from dQ
// and dK of the rows that the programs made, and the gradients of the captured tensors that they read.
#pragma once

#include "flashjit/auxiliary/element_grad_sums.cuh"
#include "flashjit/common/row_mods.cuh"
#include "flashjit/common/unused_rows.cuh"

namespace flashjit::auxiliary {

/// Where the gradient of an element of a row adds: the lane's `own` element, others of the row in shared
/// memory, the sum of squares, captured tensors.
template <class P, class Captures>
struct RowGradAdder {
  float &own_sum, &sum_of_squares;
  float* others;
  Captures& captures;

  __device__ __forceinline__ void own(float value) { own_sum += value; }
  __device__ __forceinline__ void squares(float value) { sum_of_squares += value; }
  /// By whole warps.
  __device__ __forceinline__ void at(int column, float value) {
    float* const to = others + clamped(column, 0, P::kHeadDim - 1);
    if (!P::kDeterministic) add_to_memory(to, value);  // zeros, of arms not taken, would all go to one column
    for (int lane = P::kDeterministic ? 0 : 32; lane < 32; ++lane) {
      if (static_cast<int>(threadIdx.x) % 32 == lane) *to += value;
      __syncwarp();
    }
  }
  template <class Which>
  __device__ __forceinline__ void capture(Which which, float* at, float value) {
    captures.add(which, at, value);
  }
};

template <class P, class Rows>
__device__ __forceinline__ void lead_grads_back(const Params& p, const Rows& rows, const TensorParam& given,
                                                const TensorParam& made, const TensorParam& to, int block,
                                                float* memory, float* others) {
  using Element = typename P::Element;
  using Grad = GradElement<P>;
  using Captures = ElementGradSums<Rows::kGrads>;
  Captures captures[kColumnPairs<P>][2];
  const auto prefetch = [&](const Sequence<P>& sequence, int h, int at) {
    prefetch_row<P::kHeadDim>(rows.template row<const Element>(sequence, given, h, at));
    prefetch_row<P::kHeadDim>(rows.template row<const Grad>(sequence, made, h, at));
  };
  visit_rows<P>(p, rows, block, prefetch, [&](const Sequence<P>& sequence, const auto& head, int h, int at) {
    const Grad* const dout = rows.template row<const Grad>(sequence, made, h, at);
    float dy[kColumnPairs<P>][2] = {};
#pragma unroll
    for (int pair = 0; pair < kColumnPairs<P>; ++pair)
      if (first_column(pair) < P::kHeadDim) load_pair(dout + first_column(pair), dy[pair]);
    const ModifiedRow<P> row(rows.template row<const Element>(sequence, given, h, at), memory);
    for (int column = static_cast<int>(threadIdx.x) % 32; column < P::kHeadDim; column += 32)
      others[column] = 0.0f;
    __syncwarp();
    float own[kColumnPairs<P>][2] = {}, squares = 0.0f;
#pragma unroll
    for (int pair = 0; pair < kColumnPairs<P>; ++pair) {
      const int column = min(first_column(pair), P::kHeadDim - 2);  // lanes without columns add zeros
#pragma unroll
      for (int c = 0; c < 2; ++c)
        Rows::add_grads(p, head, row.shared, row.x[pair][c], row.sum_of_squares, position(at), column + c,
                        dy[pair][c],
                        RowGradAdder<P, Captures>{own[pair][c], squares, others, captures[pair][c]});
    }
    squares = 2.0f * sum_of_warp(squares);
    __syncwarp();
    Grad* const result = rows.template row<Grad>(sequence, to, h, at);
#pragma unroll
    for (int pair = 0; pair < kColumnPairs<P>; ++pair) {
      const int column = first_column(pair);
      if (column >= P::kHeadDim) continue;
      float dx[2];
#pragma unroll
      for (int c = 0; c < 2; ++c)
        dx[c] = own[pair][c] + others[column + c] + chained(squares, row.x[pair][c]);
      store_pair(result + column, dx[0], dx[1]);
    }
    __syncwarp();  // the next row takes the memory
  });
#pragma unroll
  for (Captures(&both)[2] : captures)
#pragma unroll
    for (Captures& sums : both) sums.end_of_cta();
}

/// Rows of packed tensors that belong to no sequence.
template <class P>
__device__ __forceinline__ void zero_unused_rows_of_given(const Params& p) {
  if (!P::kVarlen || p.zero_unused_rows == 0) return;
  using Grad = GradElement<P>;
  if (P::kQMod)
    zero_rows<Grad, P::kHeadDim>(p.given.dq, p.heads_q, {max(p.cu_seqlens_q[p.batch], 0), p.rows_q});
  if (P::kKMod)
    zero_rows<Grad, P::kHeadDim>(p.given.dk, p.heads_kv, {max(p.cu_seqlens_kv[p.batch], 0), p.rows_kv});
}

/// CTAs as in row_mods.
template <class P>
__device__ void row_mod_grads(const Params& p) {
  __shared__ float memory[4][P::kHeadDim];
  __shared__ float others[4][P::kHeadDim];
  zero_unused_rows_of_given<P>(p);
  const QRows<P> of_q{p};
  const KRows<P> of_k{p};
  const int block = static_cast<int>(blockIdx.x), first_of_k = blocks_of_rows(p, of_q);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (block < first_of_k)
    lead_grads_back<P>(p, of_q, p.given.q, p.dq, p.given.dq, block, memory[warp], others[warp]);
  else
    lead_grads_back<P>(p, of_k, p.given.k, p.dk, p.given.dk, block - first_of_k, memory[warp], others[warp]);
}

}  // namespace flashjit::auxiliary
