// How the softmax finds the maximum of a row's scores, and what S is beside a score that is a line.
#pragma once

#include "flashjit/sm90/forward_rows.cuh"

namespace flashjit::sm90 {

/// Over the four lanes that share a row.
__device__ __forceinline__ float max_of_quad(float x) {
  x = fmaxf(x, __shfl_xor_sync(kWholeWarp, x, 1));
  return fmaxf(x, __shfl_xor_sync(kWholeWarp, x, 2));
}
/// The largest of `first` and this thread's columns of one of its rows.
template <int kCount>
__device__ __forceinline__ float largest(float first, const float (&s)[kCount], int half) {
#pragma unroll
  for (int n = 2 * half; n < kCount; n += 4) first = fmaxf(first, fmaxf(s[n], s[n + 1]));
  return first;
}

/// How a row's maximum is found; RowMax<P> names one of two types. `top`, a row's, is no less than m so far
/// and no more than m: the search begins with it.
template <class P>
struct MaxOfFloats {
  static constexpr bool kByBits = false;
  template <int kCount>
  static __device__ __forceinline__ float of_row(float top, const float (&s)[kCount], int half) {
    return largest(top, s, half);
  }
};
/// By integer instructions, if `top` is +0 or more: such floats are ordered as integers are, every other is
/// less than they are, and of integers the largest of three is one instruction. Where m so far is negative,
/// `top` is the largest of floats. NOTES.md#exponentials-and-instructions
template <class P>
struct MaxByBits {
  static constexpr bool kByBits = true;
  template <int kCount>
  static __device__ __forceinline__ float of_row(float top, const float (&s)[kCount], int half) {
    int bits = __float_as_int(top);
#pragma unroll
    for (int n = 2 * half; n < kCount; n += 4)
      bits = __vimax3_s32(__float_as_int(s[n]), __float_as_int(s[n + 1]), bits);
    return fmaxf(top, __int_as_float(bits));
  }
};
template <class P>
using RowMax = Conditional<kMaxByBits<P>, MaxByBits<P>, MaxOfFloats<P>>;
__device__ __forceinline__ bool any_negative(const float (&max)[2]) {
  return __any_sync(kWholeWarp, (__float_as_int(max[0]) | __float_as_int(max[1])) < 0) != 0;
}

/// What S is beside a score that is a line along the keys: in units of dot products, without the line's value
/// at this thread's first key. `unit` and `line` make it a score. With a scale below 1e-30 no slope could be
/// recovered. `row` and `column` are the thread's first. ScoreUnit<P> names one of two types.
template <class P>
struct LineUnit {
  float unit, slope, line[2];

  __device__ __forceinline__ LineUnit(const Params& p, const RowState<P>& rows, int row, int column) {
    unit = fmaxf(p.softmax_scale, 1e-30f);
    slope = __fdividef(P::score_slope(p, rows.head), unit);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      line[half] = P::score_offset(p, rows.head, position(row + half * rows.to_second()), position(column));
  }
  template <int kCount>
  __device__ __forceinline__ float max_of_row(float so_far, float, float (&s)[kCount], int half, bool) const {
#pragma unroll
    for (int n = 2 * half; n < kCount; n += 4)
      for (int e = 0; e < 2; ++e) s[n + e] = fmaf(slope, static_cast<float>(n / 4 * 8 + e), s[n + e]);
    return fmaxf(so_far, fmaf(largest(-infinity(), s, half), unit, line[half]));
  }
  __device__ __forceinline__ float factor(float scale) const { return unit * scale; }
  /// Beside a far line products count for nothing; but one that is -infinity must stay so.
  __device__ __forceinline__ float near_min_factor(float of_m, float scale) const {
    return of_m == scale ? factor(scale) : 1e-30f;
  }
  __device__ __forceinline__ float offset(float of_m, float shift, int half) const {
    return fmaf(line[half], of_m, -shift);
  }
};
template <class P>
struct PlainUnit {
  __device__ __forceinline__ PlainUnit(const Params&, const RowState<P>&, int, int) {}
  template <int kCount>
  __device__ __forceinline__ float max_of_row(float so_far, float top, float (&s)[kCount], int half,
                                              bool by_bits) const {
    return by_bits ? RowMax<P>::of_row(top, s, half) : largest(so_far, s, half);
  }
  __device__ __forceinline__ float factor(float scale) const { return scale; }
  __device__ __forceinline__ float near_min_factor(float of_m, float) const { return of_m; }
  __device__ __forceinline__ float offset(float, float shift, int) const { return -shift; }
};
template <class P>
using ScoreUnit = Conditional<kAddsScoreLine<P>, LineUnit<P>, PlainUnit<P>>;

}  // namespace flashjit::sm90
