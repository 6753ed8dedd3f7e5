// What generated hooks use besides the arithmetic of integers, intervals and functions.
#pragma once

#include "flashjit/common/params.cuh"

namespace flashjit {

__device__ __forceinline__ int scalar_int(const Params& p, int i) { return static_cast<int>(p.scalars[i]); }
__device__ __forceinline__ float scalar_float(const Params& p, int i) {
  return __uint_as_float(p.scalars[i]);
}

/// Truncates and saturates; NaN gives 0.
__device__ __forceinline__ int float_to_int(float x) { return __float2int_rz(x); }
/// NaN gives 0, too, unlike the instruction.
__device__ __forceinline__ long long float_to_int64(float x) { return x == x ? __float2ll_rz(x) : 0; }

}  // namespace flashjit
