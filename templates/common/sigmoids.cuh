// Sigmoids of four pairs by one reciprocal instead of four: what there is least of are the units of
// exponentials and reciprocals, 16 values a clock on a multiprocessor.
#pragma once

#include "flashjit/common/program_math.cuh"

namespace flashjit {

/// x[i] becomes 1 / (1 + exp2(x[i])), no less than 2^-62. A NaN makes all four NaN.
template <class Element>
struct FourSigmoids {
  static __device__ __forceinline__ void find(float (&x)[4]) {
    constexpr float kOne = 2.168404344971009e-19f,
                    kInverse = 1 / kOne;  // 2^-62, so that products are in range
    float a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = __saturatef(__fmaf_rn(Math<Element>::exp2(x[i]), kOne, kOne));
    const float low = a[0] * (a[1] * kInverse), high = a[2] * (a[3] * kInverse);
    const float both = Math<Element>::reciprocal(low * high);
    const float of_low = both * high, of_high = both * low;
    x[0] = a[1] * of_low;
    x[1] = a[0] * of_low;
    x[2] = a[3] * of_high;
    x[3] = a[2] * of_high;
  }
};

}  // namespace flashjit
