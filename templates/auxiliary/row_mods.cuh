// Before the other kernels of a spec with q_mod or k_mod: Q and K as these make them, which all others read.
#pragma once

#include "flashjit/common/row_mods.cuh"

namespace flashjit::auxiliary {

template <class P, class Rows>
__device__ __forceinline__ void modify_rows(const Params& p, const Rows& rows, const TensorParam& from,
                                            const TensorParam& to, int block, float* memory) {
  using Element = typename P::Element;
  const auto prefetch = [&](const Sequence<P>& sequence, int h, int at) {
    prefetch_row<P::kHeadDim>(rows.template row<const Element>(sequence, from, h, at));
  };
  visit_rows<P>(p, rows, block, prefetch, [&](const Sequence<P>& sequence, const auto& head, int h, int at) {
    const ModifiedRow<P> row(rows.template row<const Element>(sequence, from, h, at), memory);
    Element* const result = rows.template row<Element>(sequence, to, h, at);
#pragma unroll
    for (int pair = 0; pair < kColumnPairs<P>; ++pair) {
      const int column = first_column(pair);
      if (column >= P::kHeadDim) continue;
      float y[2];
#pragma unroll
      for (int c = 0; c < 2; ++c)
        y[c] = Rows::value(p, head, row.shared, row.x[pair][c], row.sum_of_squares, position(at), column + c);
      store_pair(result + column, y[0], y[1]);
    }
    __syncwarp();  // the next row takes the memory
  });
}

/// CTAs of 128 threads for kRowsOfModCta rows each of a head of Q, then of K.
template <class P>
__device__ void row_mods(const Params& p) {
  __shared__ float memory[4][P::kHeadDim];
  const QRows<P> of_q{p};
  const KRows<P> of_k{p};
  const int block = static_cast<int>(blockIdx.x), first_of_k = blocks_of_rows(p, of_q);
  float* const own = memory[threadIdx.x / 32];
  if (block < first_of_k)
    modify_rows<P>(p, of_q, p.given.q, p.q, block, own);
  else
    modify_rows<P>(p, of_k, p.given.k, p.k, block - first_of_k, own);
}

}  // namespace flashjit::auxiliary
