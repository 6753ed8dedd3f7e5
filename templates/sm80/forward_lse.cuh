// The end of a row's softmax in the forward pass: its sum over a quad's lanes, and its LSE.
#pragma once

#include "flashjit/common/sink.cuh"
#include "flashjit/common/split.cuh"
#include "flashjit/sm80/forward_softmax.cuh"
#include "flashjit/sm80/two_terms.cuh"

namespace flashjit::sm80 {

/// A row's sum from the sums of a quad's lanes.
__device__ __forceinline__ float quad_sum(float sum) {
  sum += __shfl_xor_sync(kWholeWarp, sum, 1);
  sum += __shfl_xor_sync(kWholeWarp, sum, 2);
  return sum;
}
/// The same, where warps that share rows have added up their sums before: share_sum().
template <class P>
__device__ __forceinline__ float whole_sum(float sum) {
  return ForwardPolicy<P>::kSharesRows ? sum : quad_sum(sum);
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
  if (P::kSplit && P::kNearMinScores && sum > 0.0f && is_near_min(max)) return near_min_lse(max, sum);
  return has_keys(sum) ? highest + (log2f(sum) - shift_rest<P>(max, scale_log2)) * kLn2 : -infinity();
}

/// The row sum that O is divided by: of P as P V has it.
template <class P>
__device__ __forceinline__ float sum_of_row(float sum, float max, float scale_log2) {
  using Element = typename P::Element;
  const float rest = shift_rest<P>(max, scale_log2);
  return P::kTwoTerms ? sum_of_two_terms<Element>(sum, rest) : sum_of_products<Element>(sum, rest);
}

/// The factor for a row of O, which divides it by rowsum(P).
template <class P>
__device__ __forceinline__ float scale_of_row(const Params& p, const RowEnd& end, float max, float sum,
                                              float scale_log2, float v_scale) {
  const float of_products = ForwardPolicy<P>::kCodeProducts ? sum : sum_of_row<P>(sum, max, scale_log2);
  return has_keys(sum) ? (P::kDropout ? p.keep_scale : 1.0f) / of_products * end.factor * v_scale : 0.0f;
}

}  // namespace flashjit::sm80
