// Rows of packed tensors that belong to no sequence: those behind the last one's end, as trainers pad them.
#pragma once

#include "flashjit/common/params.cuh"
#include "flashjit/common/types.cuh"

namespace flashjit {

/// By all threads of the grid.
template <class Element, int kColumns>
__device__ __forceinline__ void zero_rows(const TensorParam& tensor, int heads, Range rows) {
  constexpr int kVector = 16 / sizeof(Element), kChunks = kColumns / kVector;
  const long long count = static_cast<long long>(heads) * max(rows.end - rows.begin, 0) * kChunks;
  const long long threads = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += threads) {
    const long long row = i / kChunks;
    Element* at = static_cast<Element*>(tensor.data) + row % heads * tensor.stride_h +
                  (rows.begin + row / heads) * tensor.stride_s + i % kChunks * kVector;
    *reinterpret_cast<uint4*>(at) = uint4{};
  }
}

/// O of the forward pass. No block need wait for it: nothing else touches these rows.
template <class P>
__device__ __forceinline__ void zero_unused_rows_of_output(const Params& p) {
  if constexpr (P::kVarlen) {
    if (p.zero_unused_rows == 0) return;
    using Element = typename P::Element;
    zero_rows<Element, P::kHeadDimV>(p.o, p.heads_q, {max(p.cu_seqlens_q[p.batch], 0), p.rows_q});
  }
}

/// dQ, dK and dV of the backward pass.
template <class P>
__device__ __forceinline__ void zero_unused_rows_of_gradients(const Params& p) {
  if constexpr (P::kVarlen) {
    if (p.zero_unused_rows == 0) return;
    using Element = typename P::Element;
    const Range queries{max(p.cu_seqlens_q[p.batch], 0), p.rows_q};
    const Range keys{max(p.cu_seqlens_kv[p.batch], 0), p.rows_kv};
    zero_rows<Element, P::kHeadDim>(p.dq, p.heads_q, queries);
    zero_rows<Element, P::kHeadDim>(p.dk, p.heads_kv, keys);
    zero_rows<Element, P::kHeadDimV>(p.dv, p.heads_kv, keys);
  }
}

}  // namespace flashjit
