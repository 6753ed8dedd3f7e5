// Rows of O, LSE and O's tangent that belong to no sequence, see unused_rows.cuh. The backward pass need not
// compile how codes of O are stored.
#pragma once

#include "flashjit/common/jvp_params.cuh"
#include "flashjit/common/out_codes.cuh"
#include "flashjit/common/unused_rows.cuh"

namespace flashjit {

/// LSE, or another tensor with its strides; `to` may be null.
__device__ __forceinline__ void fill_lse_rows(const Params& p, float* to, Range rows, float value) {
  if (to == nullptr) return;
#pragma unroll 1
  for (int row = rows.begin + static_cast<int>(blockIdx.x); row < rows.end; row += gridDim.x)
#pragma unroll 1
    for (int h = threadIdx.x; h < p.heads_q; h += blockDim.x)
      to[h * p.lse.stride_h + row * p.lse.stride_s] = value;
}

/// Codes of zero, whose scales are 1.
template <class P>
struct ZeroCodeRows {
  static __device__ __forceinline__ void write(const Params& p, Range rows) {
    Sequence<P> all;  // of all packed rows
    all.b = 0;
#pragma unroll 1
    for (int row = rows.begin + static_cast<int>(blockIdx.x); row < rows.end; row += gridDim.x)
#pragma unroll 1
      for (int h = threadIdx.x; h < p.heads_q; h += blockDim.x)
        store_codes_of_thread<P>(coded_row(p, all, h, row, true), [](int) { return 0.0f; });
  }
};
template <class P>
struct ZeroElementRows {
  static __device__ __forceinline__ void write(const Params& p, Range rows) {
    zero_rows<OutElement<P>, P::kHeadDimV>(p.o, p.heads_q, rows);
  }
};

/// O and LSE of the forward pass. No CTA need wait for it: nothing else touches these rows.
template <class P>
__device__ __forceinline__ void zero_unused_rows_of_output(const Params& p) {
  if constexpr (P::kVarlen) {
    if (p.zero_unused_rows == 0) return;
    const Range rows{max(p.cu_seqlens_q[p.batch], 0), p.rows_q};
    Conditional<kOutCodes<P>, ZeroCodeRows<P>, ZeroElementRows<P>>::write(p, rows);
    fill_lse_rows(p, p.lse.data, rows, -infinity());
    if (P::kRowMax) fill_lse_rows(p, p.row_max, rows, -infinity());
  }
}

/// O and its tangent.
template <class P>
__device__ __forceinline__ void zero_unused_rows_of_tangents(const JvpParams& p) {
  zero_unused_rows_of_output<P>(p);
  if (!P::kVarlen || p.zero_unused_rows == 0) return;
  const Range rows{max(p.cu_seqlens_q[p.batch], 0), p.rows_q};
  zero_rows<OutElement<P>, P::kHeadDimV>(p.o_tangent, p.heads_q, rows);
  fill_lse_rows(p, p.lse_tangent, rows, 0.0f);
}

}  // namespace flashjit
