// The epilogue of the forward pass: LSE, and O divided by the row sums, to global memory.
#pragma once

#include "flashjit/common/running_state.cuh"
#include "flashjit/common/sink.cuh"
#include "flashjit/sm80/forward_softmax.cuh"
#include "flashjit/sm80/tile.cuh"

namespace flashjit::sm80 {

/// A row's sum from those of a quad's lanes.
__device__ __forceinline__ float quad_sum(float sum) {
  sum += __shfl_xor_sync(kWholeWarp, sum, 1);
  sum += __shfl_xor_sync(kWholeWarp, sum, 2);
  return sum;
}

/// The rounding error of the shift of a row's exponents.
template <class P>
__device__ __forceinline__ float shift_rest(float max, float scale_log2) {
  const float factor = exponent_factor<P>(max, scale_log2);
  return fmaf(max, factor, -__fmul_rn(max, factor));
}

/// The score that a row's maximum is.
template <class P>
__device__ __forceinline__ float largest_score(const Params& p, float max, float k_scale) {
  return P::kHasScore ? max : __fmul_rn(max, p.softmax_scale * k_scale);
}

/// LSE of a row over the keys, from m and rowsum(P). The sum is relative to the rounded shift of the
/// exponent; what rounding took is given back.
template <class P>
__device__ __forceinline__ float row_lse(const Params& p, float max, float sum, float scale_log2,
                                         float k_scale) {
  const float highest = largest_score<P>(p, max, k_scale);
  if constexpr (P::kSplit && P::kFarScores)
    if (sum > 0.0f && is_far(max)) return far_lse(max, sum);
  return has_keys(sum) ? highest + (log2f(sum) - shift_rest<P>(max, scale_log2)) * kLn2 : -infinity();
}

/// Scales an m16 tile of O and adds the running state's; `scale` becomes 1.
template <class P, int kOt>
__device__ __forceinline__ void join_o(const Params& p, const Sequence<P>& sequence, int h, int first_q,
                                       float (&o)[kOt][4], float (&scale)[2], const float (&of_state)[2],
                                       int first_column = 0, int chunks = kOt) {
#pragma unroll
  for (int n = 0; n < kOt * 4; ++n) o[n / 4][n % 4] *= scale[n / 2 % 2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    scale[half] = 1.0f;
    const float* row = sequence.template q_pointer<float>(p.o_state, h, first_q + half * 8);
    add_state<kOt>(o[0], half, row + first_column, of_state[half], chunks);
  }
}

/// An m16 tile of O from one split of the keys, in fp32.
template <class P, int kOt>
__device__ __forceinline__ void store_o_split(const Params& p, const Sequence<P>& sequence, int h, int split,
                                              int first_q, int seqlen_q, float (&o)[kOt][4],
                                              const float (&scale)[2]) {
#pragma unroll
  for (int n = 0; n < kOt * 4; ++n) o[n / 4][n % 4] *= scale[n / 2 % 2];
  for (int half = 0; half < 2; ++half)
    if (first_q + half * 8 < seqlen_q)
      store_split<P>(p, split, sequence.lse_row(p, h) + first_q + half * 8, half, o[0]);
}

/// An m16 tile of O in fp32.
template <class P, int kOt>
__device__ __forceinline__ void store_o_fp32(const Params& p, const Sequence<P>& sequence, int h, int first_q,
                                             int seqlen_q, float (&o)[kOt][4], const float (&scale)[2]) {
#pragma unroll
  for (int n = 0; n < kOt * 4; ++n) o[n / 4][n % 4] *= scale[n / 2 % 2];
  float* row = sequence.template q_pointer<float>(p.o, h, first_q);
  for (int half = 0; half < 2; ++half)
    if (first_q + half * 8 < seqlen_q) store_row<P::kHeadDimV / 8>(row + half * 8 * p.o.stride_s, half, o[0]);
}

/// An m16 tile of O by way of shared memory, in Q's place; `row`: its first within the Q tile.
template <class P, int kOt>
__device__ __forceinline__ void store_o(const Params& p, const Sequence<P>& sequence, int h, int q_begin,
                                        int row, int seqlen_q, int lane, char* o_tile,
                                        const float (&o)[kOt][4], const float (&scale)[2]) {
  constexpr int kPitch = pitch(P::kHeadDimV);
#pragma unroll
  for (int ot = 0; ot < kOt; ++ot)
    store_fragment<typename P::Element, kPitch>(o_tile, row, ot * 8, o[ot], scale[0], scale[1]);
  __syncwarp();
  store_tile<16, P::kHeadDimV, 32>(sequence.q_pointer(p.o, h, q_begin + row), p.o.stride_s,
                                   o_tile + row * kPitch * 2, seqlen_q - q_begin - row, lane);
}

}  // namespace flashjit::sm80
