// Rows of packed tensors that belong to no sequence: the rows after the last one's end, as trainers pad them.
// unused_out_rows.cuh has O's.
#pragma once

#include "flashjit/common/out_element.cuh"
#include "flashjit/common/params.cuh"
#include "flashjit/common/types.cuh"

namespace flashjit {

/// By all threads of the grid.
template <class Element, int kColumns>
__device__ __forceinline__ void zero_rows(const TensorParam& tensor, int heads, Range rows) {
  constexpr int kVector = 16 / sizeof(Element), kChunks = kColumns / kVector;
#pragma unroll 1
  for (int row = rows.begin + static_cast<int>(blockIdx.x); row < rows.end; row += gridDim.x) {
    Element* at = static_cast<Element*>(tensor.data) + row * tensor.stride_s;
#pragma unroll 1
    for (int i = threadIdx.x; i < heads * kChunks; i += blockDim.x)
      *reinterpret_cast<uint4*>(at + i / kChunks * tensor.stride_h + i % kChunks * kVector) = uint4{};
  }
}

/// dQ, dK and dV of the backward pass.
template <class P>
__device__ __forceinline__ void zero_unused_rows_of_gradients(const Params& p) {
  if constexpr (P::kVarlen && !P::kAddGrads) {
    if (p.zero_unused_rows == 0) return;
    using Element = GradElement<P>;
    const Range queries{max(p.cu_seqlens_q[p.batch], 0), p.rows_q};
    const Range keys{max(p.cu_seqlens_kv[p.batch], 0), p.rows_kv};
    zero_rows<Element, P::kHeadDim>(p.dq, p.heads_q, queries);
    zero_rows<Element, P::kHeadDim>(p.dk, p.heads_kv, keys);
    zero_rows<Element, P::kHeadDimV>(p.dv, p.heads_kv, keys);
  }
}

}  // namespace flashjit
