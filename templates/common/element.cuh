// Conversions between the element types and fp32, without the toolkit's headers.
#pragma once

#include "flashjit/common/problem.cuh"

namespace flashjit {

template <bool kCondition, class Then, class Else>
struct ConditionalType {
  using Type = Then;
};
template <class Then, class Else>
struct ConditionalType<false, Then, Else> {
  using Type = Else;
};
/// One of two types.
template <bool kCondition, class Then, class Else>
using Conditional = typename ConditionalType<kCondition, Then, Else>::Type;

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

template <class Element>
constexpr bool kIsFp16 = false;
template <>
constexpr bool kIsFp16<fp16> = true;

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

/// Selects four bytes of two words by the digits of `bytes`: 0 to 3 of the lower word, 4 to 7 of the upper
/// one; plus 8: eight copies of the byte's highest bit.
__device__ __forceinline__ unsigned select_bytes(unsigned lower, unsigned upper, unsigned bytes) {
  unsigned word;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(word) : "r"(lower), "r"(upper), "r"(bytes));
  return word;
}

/// a * b + c of two elements each, rounded once; of bf16 from sm_80 on.
template <class Element>
__device__ __forceinline__ unsigned fma_pair(unsigned a, unsigned b, unsigned c);
template <>
__device__ __forceinline__ unsigned fma_pair<fp16>(unsigned a, unsigned b, unsigned c) {
  unsigned y;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
}
template <>
__device__ __forceinline__ unsigned fma_pair<bf16>(unsigned a, unsigned b, unsigned c) {
  unsigned y;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
}

/// Two codes of 8 bits, in the lower half of `codes`, as fp16, which has all of them exactly.
template <class Code>
__device__ __forceinline__ unsigned fp16_of_codes(unsigned codes);
template <>
__device__ __forceinline__ unsigned fp16_of_codes<e5m2>(unsigned codes) {
  return select_bytes(codes, 0u, 0x1404);  // their upper bytes
}
template <>
__device__ __forceinline__ unsigned fp16_of_codes<e4m3>(unsigned codes) {
  unsigned y;
#if __CUDA_ARCH__ >= 890
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"(static_cast<unsigned short>(codes)));
#else
  const unsigned high = select_bytes(codes, 0u, 0x1404), magnitude = high >> 1 & 0x3f803f80u;
  // As bits of fp16 they are 2^-8 of what they mean.
  asm("mul.f16x2 %0, %1, %2;" : "=r"(y) : "r"((high & 0x80008000u) | magnitude), "r"(0x5c005c00u));
  const unsigned nan = (magnitude + 0x00800080u) & 0x40004000u;
  y |= nan | (nan - (nan >> 5));
#endif
  return y;
}
template <>
__device__ __forceinline__ unsigned fp16_of_codes<int8>(unsigned codes) {
  unsigned y;  // 1024 + 128 + code, less 1152
  asm("sub.f16x2 %0, %1, %2;"
      : "=r"(y)
      : "r"(select_bytes(codes ^ 0x8080u, 0x64646464u, 0x4140)), "r"(0x64806480u));
  return y;
}

/// The two in the upper half.
template <class Code>
__device__ __forceinline__ unsigned fp16_of_upper_codes(unsigned codes) {
  return fp16_of_codes<Code>(codes >> 16);
}
#if __CUDA_ARCH__ >= 890
template <>
__device__ __forceinline__ unsigned fp16_of_upper_codes<e4m3>(unsigned codes) {
  unsigned y;  // by halves in PTX: ptxas makes no shift of these
  asm("{\n"
      ".reg .b16 lower, upper;\n"
      "mov.b32 {lower, upper}, %1;\n"
      "cvt.rn.f16x2.e4m3x2 %0, upper;\n"
      "}\n"
      : "=r"(y)
      : "r"(codes));
  return y;
}
#endif

/// The first code that is NaN or infinite. All with its upper bits are.
template <class Code>
constexpr unsigned kFirstSpecialCode = 0x80;
template <>
constexpr unsigned kFirstSpecialCode<e4m3> = 0x7f;
template <>
constexpr unsigned kFirstSpecialCode<e5m2> = 0x7c;
/// Makes them zeros.
template <class Code, int kWords>
__device__ __forceinline__ void clear_special_codes(unsigned (&words)[kWords]) {
  constexpr unsigned kFirst = kFirstSpecialCode<Code>, kInEachByte = 0x01010101;
  if constexpr (kFirst == 0x80) return;
  unsigned special[kWords], any = 0;  // a byte's highest bit
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    special[i] = ((words[i] & kFirst * kInEachByte) + (0x80 - kFirst) * kInEachByte) & 0x80 * kInEachByte;
    any |= special[i];
  }
  if (any == 0) return;
#pragma unroll
  for (int i = 0; i < kWords; ++i) words[i] &= ~((special[i] >> 7) * 0xffu);
}

/// A code of one bit of sign, 7 - kMantissa of exponent and kMantissa of mantissa. The highest code is NaN.
template <int kMantissa>
__device__ __forceinline__ unsigned code_of_float(float x, float largest) {
  constexpr int kLostBits = 23 - kMantissa, kLeastExponent = 2 - (1 << (6 - kMantissa));
  const unsigned sign = __float_as_uint(x) >> 24 & 0x80u;
  if (x != x) return sign | 0x7fu;
  const float magnitude = fminf(fabsf(x), largest);
  // Codes of the least exponent and below are equally far apart.
  const unsigned bits = __float_as_uint(magnitude), least = 127 + kLeastExponent;
  if (bits >> 23 < least)
    return sign | static_cast<unsigned>(
                      __float2int_rn(magnitude * __uint_as_float((254 - least + kMantissa) << 23)));
  return sign | (((bits + (1u << (kLostBits - 1)) - 1 + (bits >> kLostBits & 1u)) >> kLostBits) -
                 ((least - 1) << kMantissa));
}

__device__ __forceinline__ float to_float(e4m3 x) { return low_of<fp16>(fp16_of_codes<e4m3>(x.bits)); }
__device__ __forceinline__ float to_float(e5m2 x) { return low_of<fp16>(fp16_of_codes<e5m2>(x.bits)); }
__device__ __forceinline__ float to_float(int8 x) {
  return static_cast<float>(static_cast<signed char>(x.bits));
}

/// Two of fp16 as elements.
template <class Element>
__device__ __forceinline__ unsigned pair_of_fp16(unsigned pair) {
  if constexpr (kIsFp16<Element>)
    return pair;
  else
    return pack<Element>(low_of<fp16>(pair), high_of<fp16>(pair));
}
/// The same times a scale each.
template <class Element>
__device__ __forceinline__ unsigned pair_of_fp16(unsigned pair, float low_scale, float high_scale) {
  return pack<Element>(low_of<fp16>(pair) * low_scale, high_of<fp16>(pair) * high_scale);
}

/// Two codes as elements, times a scale each where there are scales.
template <class Element, class Code, class... Scales>
__device__ __forceinline__ unsigned pair_of_codes(unsigned codes, Scales... scales) {
  return pair_of_fp16<Element>(fp16_of_codes<Code>(codes), scales...);
}

/// The nearest code, ties to even; a value that is too large becomes the largest.
template <>
__device__ __forceinline__ e4m3 from_float<e4m3>(float x) {
  return {static_cast<unsigned char>(code_of_float<3>(x, 448.0f))};
}
template <>
__device__ __forceinline__ e5m2 from_float<e5m2>(float x) {
  return {static_cast<unsigned char>(code_of_float<2>(x, 57344.0f))};
}
template <>
__device__ __forceinline__ int8 from_float<int8>(float x) {
  return {static_cast<unsigned char>(clamped(__float2int_rn(x), -128, 127))};
}

/// The largest number of a type of codes, which scales are made for.
template <class Code>
constexpr float kLargestCode = 127.0f;
template <>
constexpr float kLargestCode<e4m3> = 448.0f;
template <>
constexpr float kLargestCode<e5m2> = 57344.0f;

/// Replaces the negative ones of two packed 16-bit floats by zero.
__device__ __forceinline__ unsigned without_negatives(unsigned pair) {
  const unsigned negative = (pair >> 15 & 0x00010001u) * 0xffffu;
  return pair & ~negative;
}

}  // namespace flashjit
