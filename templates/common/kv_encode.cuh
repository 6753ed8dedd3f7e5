// Scales and codes of a KV format from floats: the inverse of kv_format.cuh, with the same numbers as
// runtime/expr/kv_codec.cpp.
#pragma once

#include "flashjit/common/kv_format.cuh"

namespace flashjit {

/// Quotients of few codes are exact, as a code more or less is much: these have the scale as factor, and
/// divide.
template <class Format>
constexpr bool kDivides = Format::kBits < 4;
/// The float next to a quotient by a divisor of no extreme size, whose reciprocal is given, without branches.
__device__ __forceinline__ float nearest_quotient(float x, float divisor, float reciprocal) {
  const float near = x * reciprocal, exact = fmaf(fmaf(-near, divisor, x), reciprocal, near);
  return near < 0x1p100f ? exact : near;
}
__device__ __forceinline__ float nearest_reciprocal(float x) {
  float near;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(x));
  return near < 0x1p120f ? fmaf(fmaf(-x, near, 1.0f), near, near) : fminf(near, 3.402823466e38f);
}

/// Finite, so that zeros of a block of the least numbers stay zeros. Of a block of zeros a book without 0 has
/// the scale 0, by which nothing is divided.
template <class Format>
__device__ __forceinline__ float factor_of_scale(float scale) {
  float factor;  // next to the nearest float
  asm("rcp.approx.f32 %0, %1;" : "=f"(factor) : "f"(scale));
  if (kDivides<Format> && (Format::kCode != KvCode::book || scale != 0.0f)) return scale;
  return fabsf(factor) > 3.402823466e38f ? 3.402823466e38f : factor;
}
template <class Format>
constexpr bool kHasFloatCodes =
    Format::kCode == KvCode::e4m3 || Format::kCode == KvCode::e5m2 || Format::kCode == KvCode::e2m1;
template <class Format>
constexpr bool kOffsetCodes = Format::kCode == KvCode::int4_offset || Format::kCode == KvCode::int5_offset;
template <class Format>
constexpr int kHighestCode = kLowestCode<Format> + (1 << Format::kBits) - 1;

/// The bits of the nearest fp16, in a register of 32 bits: ptxas 13.0 stores a byte of a register that
/// cvt.f16 wrote as the number's integer part.
__device__ __forceinline__ unsigned bits_of_fp16(float x) {
  unsigned bits;
  asm("{\n.reg .b16 nearest;\ncvt.rn.f16.f32 nearest, %1;\ncvt.u32.u16 %0, nearest;\n}"
      : "=r"(bits)
      : "f"(x));
  return bits;
}

/// The bits of the nearest number, of e8m0 of the next larger power of two.
template <KvNumber kType>
__device__ __forceinline__ unsigned bits_of_number(float x) {
  const unsigned bits = __float_as_uint(x);
  switch (kType) {
    case KvNumber::fp32:
      return bits;
    case KvNumber::fp16:
      return bits_of_fp16(x);
    case KvNumber::bf16:
      return from_float<bf16>(x).bits;
    case KvNumber::e4m3:
#if __CUDA_ARCH__ >= 890
      return pair_of_e4m3(x, 0.0f) & 0xffu;
#else
      return from_float<e4m3>(x).bits;
#endif
    default: {
      const unsigned up = (bits >> 23 & 0xffu) + ((bits & 0x7fffffu) != 0 && bits != 0x400000u ? 1u : 0u);
      return x != x ? 0xffu : up < 254u ? up : 254u;
    }
  }
}
/// The same of a scale: never zero and never infinite.
template <KvNumber kType>
__device__ __forceinline__ unsigned bits_of_scale(float x) {
  constexpr float kLeast = kType == KvNumber::fp32   ? 1.401298464e-45f
                           : kType == KvNumber::fp16 ? 5.960464478e-8f
                           : kType == KvNumber::bf16 ? 9.183549616e-41f
                           : kType == KvNumber::e4m3 ? 0.001953125f
                                                     : 5.877471754e-39f;
  constexpr float kMost = kType == KvNumber::fp32   ? 3.402823466e38f
                          : kType == KvNumber::fp16 ? 65504.0f
                          : kType == KvNumber::bf16 ? 3.389531390e38f
                          : kType == KvNumber::e4m3 ? 448.0f
                                                    : 1.701411835e38f;
  if (x > 0.0f) x = fminf(fmaxf(x, kLeast), kMost);
  if (x < 0.0f) x = fmaxf(x, -kMost);
  return bits_of_number<kType>(x);
}
template <int kBytes, int kAlignment = 1>
__device__ __forceinline__ void store_bytes(unsigned char* to, unsigned bits) {
  if (kBytes == 4 && kAlignment >= 4) {
    *reinterpret_cast<unsigned*>(to) = bits;
  } else if (kBytes == 2 && kAlignment >= 2) {
    *reinterpret_cast<unsigned short*>(to) = static_cast<unsigned short>(bits);
  } else {
#pragma unroll
    for (int i = 0; i < kBytes; ++i) to[i] = static_cast<unsigned char>(bits >> 8 * i);
  }
}

/// The nearest code, ties to even; larger values become the largest code.
template <class Format>
__device__ __forceinline__ unsigned code_of_value(float x) {
  switch (Format::kCode) {
    case KvCode::e4m3:
      return from_float<e4m3>(x).bits;
    case KvCode::e5m2:
      return from_float<e5m2>(x).bits;
    case KvCode::e2m1: {
      const float y = fabsf(x);
      const unsigned magnitude =
          (y > 0.25f) + (y >= 0.75f) + (y > 1.25f) + (y >= 1.75f) + (y > 2.5f) + (y >= 3.5f) + (y > 5.0f);
      return (__float_as_uint(x) >> 28 & 8u) | magnitude;
    }
    case KvCode::book: {
      unsigned nearest = 0;
      float distance = fabsf(Format::book(0) - x);
#pragma unroll 1
      for (unsigned code = 1; code < 1u << Format::kBits; ++code)
        if (const float other = fabsf(Format::book(code) - x); other < distance)
          nearest = code, distance = other;
      return nearest;
    }
    default: {
      const int rounded = clamped(__float2int_rn(x), kLowestCode<Format>, kHighestCode<Format>);
      return static_cast<unsigned>(kOffsetCodes<Format> ? rounded - kLowestCode<Format> : rounded) &
             ((1u << Format::kBits) - 1);
    }
  }
}

/// A byte of a block's codes, from code_at(column).
template <class Format, class CodeAt>
__device__ __forceinline__ unsigned byte_of_codes(int byte, const CodeAt& code_at) {
  constexpr int kBits = Format::kBits, kBlock = Format::kBlock;
  unsigned bits = 0;
  if (Format::kHalves && kBits == 5) {
    if (byte < kBlock / 8) {
#pragma unroll
      for (int n = 0; n < 8; ++n) bits |= code_at(byte * 8 + n) >> 4 << n;
      return bits;
    }
    byte -= kBlock / 8;
  }
  if (Format::kHalves) {
    constexpr unsigned kLowest = kBits == 5 ? 15u : ~0u;
    return (code_at(byte) & kLowest) | (code_at(byte + kBlock / 2) & kLowest) << 4;
  }
  constexpr bool kWhole = 8 % kBits == 0;
#pragma unroll
  for (int n = 0; n < (kWhole ? 8 / kBits : (6 + kBits) / kBits + 1); ++n) {
    const int column = kWhole ? byte * (8 / kBits) + n : byte * 8 / kBits + n;
    const int shift = kWhole ? n * kBits : column * kBits - byte * 8;
    if (shift >= 8) break;
    bits |= shift < 0 ? code_at(column) >> -shift : code_at(column) << shift;
  }
  return bits;
}

constexpr float kRoundingShift = 12582912.0f;  ///< 1.5 * 2^23: sums with it end with the nearest integer
/// Steps between magnitudes are a half up to 2, 1 up to 4, then 2.
__device__ __forceinline__ unsigned e2m1_by_sums(float x) {
  const float y = fminf(fabsf(x), 6.5f);
  const unsigned halves = __float_as_uint(fmaf(y, 2.0f, kRoundingShift)),
                 ones = __float_as_uint(y + (kRoundingShift + 2.0f)),
                 twos = __float_as_uint(fmaf(y, 0.5f, kRoundingShift + 4.0f));
  return (min(min(halves, ones), twos) & 7u) | (__float_as_uint(x) >> 28 & 8u);
}

/// What lanes find together in a block's columns.
struct BlockExtremes {
  float extreme;  ///< of the largest magnitude, the first of several
  int column;
  float low, high;
  bool finite;
};

/// The scale of a block of zeros: 1 where a code means 0, else 0, with which all codes do.
template <class Format>
__device__ __forceinline__ float scale_of_zeros() {
  bool means_zero = Format::kCode != KvCode::book;
#pragma unroll
  for (int code = 0; code < (Format::kCode == KvCode::book ? 1 << Format::kBits : 0); ++code)
    means_zero = means_zero || Format::book(static_cast<unsigned>(code)) == 0.0f;
  return means_zero ? 1.0f : 0.0f;
}

constexpr bool is_power_of_two(float x) {
  while (x > 1.0f) x *= 0.5f;
  return x == 1.0f;
}

/// The bits of the scale of a block without zero points.
template <class Format>
__device__ __forceinline__ unsigned symmetric_scale(const BlockExtremes& found, float argument) {
  constexpr float kLargest = Format::kLargest, kSize = kLargest < 0.0f ? -kLargest : kLargest;
  float magnitude = fabsf(found.extreme);
  if (Format::kArgument) magnitude = magnitude / argument;
  if (Format::kScaleType == KvNumber::e8m0 && kHasFloatCodes<Format>) {  // as OCP's MX formats
    const int exponent =
        static_cast<int>(__float_as_uint(magnitude) >> 23) - static_cast<int>(__float_as_uint(kSize) >> 23);
    const int bits = magnitude == 0.0f ? 127 : clamped(exponent + 127, 0, 254);
    return found.finite ? static_cast<unsigned>(bits) : 255u;
  }
  constexpr float kInverse = 1.0f / kSize;
  float scale = is_power_of_two(kSize) ? magnitude * kInverse : nearest_quotient(magnitude, kSize, kInverse);
  if (kLargest < 0.0f && found.extreme > 0.0f) scale = -scale;
  if (magnitude == 0.0f) scale = scale_of_zeros<Format>();
  if (!found.finite) scale = __uint_as_float(0x7fffffffu);
  return bits_of_scale<Format::kScaleType>(scale);
}

}  // namespace flashjit
