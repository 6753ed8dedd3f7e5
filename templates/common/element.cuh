// Conversions between the element types and fp32, without the toolkit's headers.
#pragma once

#include "flashjit/common/problem.cuh"

namespace flashjit {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) {
  return __uint_as_float(static_cast<unsigned>(x.bits) << 16);
}
__device__ __forceinline__ float to_float(fp16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}

template <class Element>
__device__ __forceinline__ Element from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ fp16 from_float<fp16>(float x) {
  fp16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) {
  // Round to nearest even by hand: sm_75 has no cvt for bf16. NaN stays NaN.
  const unsigned bits = __float_as_uint(x);
  const unsigned rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return {static_cast<unsigned short>(x != x ? 0x7fffu : rounded)};
}

/// Two elements in one register, `low` in the lower half.
template <class Element>
__device__ __forceinline__ unsigned pack(float low, float high);
template <>
__device__ __forceinline__ unsigned pack<fp16>(float low, float high) {
#if __CUDA_ARCH__ >= 800
  unsigned y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
#else
  return from_float<fp16>(low).bits | static_cast<unsigned>(from_float<fp16>(high).bits) << 16;
#endif
}
template <>
__device__ __forceinline__ unsigned pack<bf16>(float low, float high) {
#if __CUDA_ARCH__ >= 800
  unsigned y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
#else
  return from_float<bf16>(low).bits | static_cast<unsigned>(from_float<bf16>(high).bits) << 16;
#endif
}

/// The inverse of pack().
template <class Element>
__device__ __forceinline__ float low_of(unsigned pair) {
  return to_float(Element{static_cast<unsigned short>(pair)});
}
template <class Element>
__device__ __forceinline__ float high_of(unsigned pair) {
  return to_float(Element{static_cast<unsigned short>(pair >> 16)});
}

/// Replaces the negative ones of two packed 16-bit floats by zero.
__device__ __forceinline__ unsigned without_negatives(unsigned pair) {
  const unsigned negative = (pair >> 15 & 0x00010001u) * 0xffffu;
  return pair & ~negative;
}

}  // namespace flashjit
