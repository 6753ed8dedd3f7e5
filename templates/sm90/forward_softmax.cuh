// The online softmax (FlashAttention-2, algorithm 1) of a warpgroup's rows, in registers: S becomes P in its
// place, while each row's maximum m and sum l are carried on from KV tile to KV tile. A thread has two rows,
// whose other columns three other lanes have.
#pragma once

#include "flashjit/common/sink.cuh"
#include "flashjit/common/split.cuh"
#include "flashjit/sm90/forward_row_max.cuh"

namespace flashjit::sm90 {

/// What P of S's value n adds to the row sum: where P has V's scales, P without them.
template <class P>
__device__ __forceinline__ float add_to_sum(float sum, const KeyFactors<false>&, float p, int) {
  return sum + p;
}
template <class P>
__device__ __forceinline__ float add_to_sum(float sum, const KeyFactors<true>& keys, float p, int n) {
  const float2 inverse = factors_of_keys<P, kInverseOfV>(keys, n);
  return fmaf(p, n % 2 ? inverse.y : inverse.x, sum);
}

/// P = kLargestP exp2(S * scale - m), in place of S, with the row maximum m and the row sum l carried on.
/// `rescale` is what O and l so far must be multiplied by, exp2(m before - m). `Mask` masks S of a KV tile
/// that is not `full`. `first`: of a work tile's first KV tile.
template <class Mask, class P, int kCount>
__device__ __forceinline__ void online_softmax(const Params& p, const WorkTile<P>& work, RowState<P>& rows,
                                               int kv_begin, bool full, bool first, float (&s)[kCount],
                                               float (&rescale)[2]) {
  const int lane = threadIdx.x % 32, row = rows.first_query(), column = kv_begin + lane % 4 * 2;
  const float first_scale = exponent_scale(p, rows, 0),
              second_scale = kConvertsQ<P> ? exponent_scale(p, rows, 1) : first_scale;
  const auto scale = [&](int half) { return half == 0 ? first_scale : second_scale; };
  const ScoreUnit<P> unit(p, rows, row, column);
  float top[2] = {rows.max[0], rows.max[1]};  // no less than m so far, no more than m
  const bool by_bits = RowMax<P>::kByBits && !first, negative = by_bits && any_negative(top);
  if (!full || negative) {  // one branch for both: with two, ptxas serialises products, if any are under way
    if (!kCodeProducts<P> || !full) Mask::apply(p, work, rows, kv_begin, s);
    if (by_bits)
      for (int half = 0; half < 2; ++half) top[half] = largest(top[half], s, half);
  }
  float offset[2], sum[2] = {0.0f, 0.0f};
  [[maybe_unused]] float near_min_factor[2];  // with kNearMinScores
  const auto find_max = [&](int half) {       // m = max(m, rowmax(S))
    const float before = rows.max[half];
    const float highest = max_of_quad(unit.max_of_row(before, top[half], s, half, by_bits));
    const float of_m = exponent_factor<P>(highest, scale(half));
    const float shift = highest == -infinity() ? 0.0f : __fmul_rn(highest, of_m);
    rescale[half] = before == -infinity() ? 0.0f : exp2_approx(__fmul_rn(before, of_m) - shift);
    rows.max[half] = highest;
    offset[half] = unit.offset(of_m, shift, half);
    if (kCodeProducts<P>) offset[half] += kLargestPLog2;
    if constexpr (P::kNearMinScores) near_min_factor[half] = unit.near_min_factor(of_m, scale(half));
  };
  const auto exponentiate = [&](int n) {  // P = exp2(S - m)
    const int half = n / 2 % 2;
    float factor = unit.factor(scale(half));
    if constexpr (P::kNearMinScores) factor = near_min_factor[half];
    s[n] = exp2_approx(fmaf(s[n], factor, offset[half]));
    sum[half] = add_to_sum<P>(sum[half], rows, s[n], n);
  };
  const auto add_sum = [&](int half) {  // l = exp2(m before - m) l + rowsum(P)
    rows.sum[half] = rows.sum[half] * rescale[half] + sum[half];
  };
  if (kAlternatesRows<P>) {
    find_max(0), find_max(1);
#pragma unroll
    for (int n = 0; n < kCount; ++n) exponentiate(n);
    add_sum(0), add_sum(1);
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      find_max(half);
#pragma unroll
      for (int n = 2 * half; n < kCount; n += 4) exponentiate(n), exponentiate(n + 1);
      add_sum(half);
    }
  }
}

// --- The end of a row -------------------------------------------------------------------------------------

/// Over the four lanes that share a row.
__device__ __forceinline__ float sum_of_quad(float x) {
  x += __shfl_xor_sync(kWholeWarp, x, 1);
  return x + __shfl_xor_sync(kWholeWarp, x, 2);
}
/// The score that a row's maximum is.
template <class P>
__device__ __forceinline__ float largest_score(const Params& p, const RowState<P>& rows, int half) {
  return kSoftmaxOfScores<P> ? rows.max[half]
                             : __fmul_rn(rows.max[half], rows.times_k_scale(p.softmax_scale, half));
}
/// The rounding error of the shift of a row's exponents.
template <class P>
__device__ __forceinline__ float shift_rest(float max, float to_log2) {
  const float factor = exponent_factor<P>(max, to_log2);
  return fmaf(max, factor, -__fmul_rn(max, factor));
}
/// LSE = m + log(l). The sum is relative to the rounded shift of the exponent; what rounding took is given
/// back.
template <class P>
__device__ __forceinline__ float row_lse(float sum, float highest, float rest) {
  return has_keys(sum) ? highest + (log2_approx(sum / kLargestP<P>) - rest) * kLn2 : -infinity();
}
/// What a row of O must be multiplied by, 1 / l; `factor`: for a sink, or other keys.
template <class P>
__device__ __forceinline__ float scale_of_row(const Params& p, const RowState<P>& rows, float sum, float rest,
                                              float factor) {
  const float of_products = kCodeProducts<P> ? sum : sum_of_products<ProductElement<P>>(sum, rest);
  return rows.times_v_scale(
      has_keys(sum) ? __fdividef(P::kDropout ? p.keep_scale : 1.0f, of_products) * factor : 0.0f);
}

/// Multiplies the thread's two rows of O.
template <int kCount>
__device__ __forceinline__ void scale_o(float (&o)[kCount], const float (&scale)[2]) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) o[n] *= scale[n / 2 % 2];
}
/// The same in a step, by what the rows' maxima have grown.
template <class P, int kCount>
__device__ __forceinline__ void rescale_o(float (&o)[kCount], const float (&rescale)[2]) {
  if (!kVotesOnRescale<P>) {
    scale_o(o, rescale);
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!__any_sync(kWholeWarp, rescale[half] != 1.0f)) continue;
#pragma unroll
      for (int n = half * 2; n < kCount; n += 4) o[n] *= rescale[half], o[n + 1] *= rescale[half];
    }
  }
}

}  // namespace flashjit::sm90
