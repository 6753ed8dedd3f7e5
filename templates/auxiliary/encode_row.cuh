// A row of floats in shared memory as the bytes of a KV format, by a warp: the inverse of decode16(), with
// the same numbers as encode_row() of runtime/support/kv_codec.cpp.
#pragma once

#include "flashjit/common/kv_format.cuh"
#include "flashjit/common/ptx.cuh"

namespace flashjit::auxiliary {

/// Codes are v * factor + zero, or (v - zero) * factor where zero points are added.
struct KvQuantizer {
  float factor, zero;
};
/// Quotients of few codes are exact, as a code more or less is much: these have the scale as factor, and
/// divide.
template <class Format>
constexpr bool kDivides = Format::kBits == 2;
/// Finite, so that zeros of a block of the least numbers stay zeros.
template <class Format>
__device__ __forceinline__ float factor_of_scale(float scale) {
  const float factor = 1.0f / scale;
  if (kDivides<Format>) return scale;
  return fabsf(factor) > 3.402823466e38f ? 3.402823466e38f : factor;
}
template <class Format>
__device__ __forceinline__ float quotient(float x, float factor) {
  return kDivides<Format> ? x / factor : x * factor;
}

template <class Format>
constexpr bool kHasFloatCodes =
    Format::kCode == KvCode::e4m3 || Format::kCode == KvCode::e5m2 || Format::kCode == KvCode::e2m1;
template <class Format>
constexpr int kLowestCode = Format::kCode == KvCode::int8                                           ? -128
                            : Format::kCode == KvCode::int4 || Format::kCode == KvCode::int4_offset ? -8
                                                                                                    : 0;
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
      return from_float<e4m3>(x).bits;
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
template <int kBytes>
__device__ __forceinline__ void store_bytes(unsigned char* to, unsigned bits) {
#pragma unroll
  for (int i = 0; i < kBytes; ++i) to[i] = static_cast<unsigned char>(bits >> 8 * i);
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
      return static_cast<unsigned>(Format::kCode == KvCode::int4_offset ? rounded + 8 : rounded) &
             ((1u << Format::kBits) - 1);
    }
  }
}

/// What lanes find together in a block's columns.
struct BlockExtremes {
  float extreme;  ///< of the largest magnitude, the first of several
  int column;
  float low, high;
  bool finite;
};

template <int kLanes>
__device__ __forceinline__ BlockExtremes extremes_of_block(const float* block, int columns) {
  BlockExtremes found{0.0f, 0, block[0], block[0], true};
  for (int i = static_cast<int>(threadIdx.x) % kLanes; i < columns; i += kLanes) {
    const float x = block[i];
    if (fabsf(x) > fabsf(found.extreme)) found.extreme = x, found.column = i;
    found.low = fminf(found.low, x), found.high = fmaxf(found.high, x);
    found.finite = found.finite && fabsf(x) <= 3.402823466e38f;
  }
#pragma unroll
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) {
    const float extreme = __shfl_xor_sync(kWholeWarp, found.extreme, lanes);
    const int column = __shfl_xor_sync(kWholeWarp, found.column, lanes);
    if (fabsf(extreme) > fabsf(found.extreme) ||
        (fabsf(extreme) == fabsf(found.extreme) && column < found.column))
      found.extreme = extreme, found.column = column;
    found.low = fminf(found.low, __shfl_xor_sync(kWholeWarp, found.low, lanes));
    found.high = fmaxf(found.high, __shfl_xor_sync(kWholeWarp, found.high, lanes));
    found.finite = __shfl_xor_sync(kWholeWarp, found.finite ? 1 : 0, lanes) != 0 && found.finite;
  }
  return found;
}

/// Formats whose scales need the largest magnitude of a block alone, which is its `extreme`.
template <class Format>
constexpr bool kOfMagnitudes = Format::kZero == KvZero::none&& Format::kLargest > 0.0f;
template <int kLanes>
__device__ __forceinline__ BlockExtremes magnitude_of_block(const float* block, int columns) {
  unsigned largest = 0;  // bits of floats without a sign grow as these do, NaN's are the largest
  for (int i = static_cast<int>(threadIdx.x) % kLanes; i < columns; i += kLanes)
    largest = max(largest, __float_as_uint(block[i]) & 0x7fffffffu);
#pragma unroll
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2)
    largest = max(largest, __shfl_xor_sync(kWholeWarp, largest, lanes));
  return {__uint_as_float(largest), 0, 0.0f, 0.0f, largest < 0x7f800000u};
}

/// The scale of a block without zero points.
template <class Format>
__device__ __forceinline__ unsigned symmetric_scale(const BlockExtremes& found, float argument) {
  constexpr float kLargest = Format::kLargest;
  if (!found.finite) return bits_of_scale<Format::kScaleType>(__uint_as_float(0x7fffffffu));
  const float magnitude = fabsf(found.extreme) / argument;
  if (magnitude == 0.0f) return bits_of_scale<Format::kScaleType>(1.0f);
  if (Format::kScaleType == KvNumber::e8m0 && kHasFloatCodes<Format>) {  // as OCP's MX formats
    const int exponent = static_cast<int>(__float_as_uint(magnitude) >> 23) -
                         static_cast<int>(__float_as_uint(kLargest) >> 23);
    return static_cast<unsigned>(clamped(exponent + 127, 0, 254));
  }
  return bits_of_scale<Format::kScaleType>(kLargest < 0.0f ? found.extreme / argument / kLargest
                                                           : magnitude / kLargest);
}

/// The scale and zero point of a block, or of a column of keys, which `writes` writes.
template <class Format>
__device__ __forceinline__ KvQuantizer quantizer_for(const BlockExtremes& found, float argument, bool writes,
                                                     unsigned char* scale_at, unsigned char* zero_at) {
  constexpr KvNumber kType = Format::kScaleType;
  constexpr int kBytes = size_of(kType);
  if (Format::kZero == KvZero::none) {
    const unsigned bits = symmetric_scale<Format>(found, argument);
    if (writes) store_bytes<kBytes>(scale_at, bits);
    return {factor_of_scale<Format>(number_of_bits<kType>(bits) * argument), 0.0f};
  }
  constexpr float kLevels = static_cast<float>(kHighestCode<Format> - kLowestCode<Format>);
  const float nan = __uint_as_float(0x7fffffffu);
  const bool added = Format::kZero == KvZero::added;
  const float low = !found.finite ? nan : added ? found.low : fminf(found.low, 0.0f);
  const float high = !found.finite ? nan : added ? found.high : fmaxf(found.high, 0.0f);
  unsigned zero_bits = added ? bits_of_number<kType>(low / argument) : 0u;
  const float least = number_of_bits<kType>(zero_bits);
  const float range = added ? high / argument - least : (high - low) / argument;
  const unsigned bits = bits_of_scale<kType>(range == 0.0f ? 1.0f : range / kLevels);
  const float scale = number_of_bits<kType>(bits) * argument;
  if (!added) zero_bits = bits_of_number<kType>(static_cast<float>(kLowestCode<Format>) - rintf(low / scale));
  if (writes) store_bytes<kBytes>(scale_at, bits), store_bytes<kBytes>(zero_at, zero_bits);
  const float zero = number_of_bits<kType>(zero_bits);
  return {factor_of_scale<Format>(scale), added ? zero * argument : zero};
}

/// The code of an element, in its lowest bits.
template <class Format>
__device__ __forceinline__ unsigned code_by(const KvQuantizer& by, float x) {
  return code_of_value<Format>(Format::kZero == KvZero::added ? quotient<Format>(x - by.zero, by.factor)
                                                              : quotient<Format>(x, by.factor) + by.zero);
}

/// Writes the columns of a row that are elements, by a warp.
template <class Format>
__device__ __forceinline__ void store_tail(const float* row, unsigned char* to) {
  constexpr int kSize = size_of(Format::kTailType);
  for (int i = Format::kColumns + static_cast<int>(threadIdx.x) % 32; i < Format::kDim; i += 32)
    store_bytes<kSize>(to + Format::kTail + (i - Format::kColumns) * kSize,
                       bits_of_number<Format::kTailType>(row[i]));
}

/// Encodes a row, which all lanes see. `argument` is the call's scale, `scales` the row where scales go:
/// `to`, or another tensor's. By a warp; `quantizers` is its own.
template <class Format>
struct RowEncoder {
  static constexpr int kBlocks = Format::kColumns > 0 ? Format::kColumns / Format::kBlock : 0;
  static constexpr int kLanes = Format::kBlock >= 128 || Format::kBlock % 16 != 0 ? 32
                                : Format::kBlock == 64                            ? 16
                                : Format::kBlock == 32                            ? 8
                                : Format::kBlock == 16                            ? 4
                                                                                  : 32;
  KvQuantizer quantizers[kBlocks + 1];

  __device__ __forceinline__ void encode(const float* row, float argument, unsigned char* to,
                                         unsigned char* scales) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    constexpr int kAtOnce = 32 / kLanes;
    for (int first = 0; first < kBlocks; first += kAtOnce) {
      const int block = min(first + lane / kLanes, kBlocks - 1);
      const float* columns = row + block * Format::kBlock;
      KvQuantizer by{0.0f, 0.0f};
      if (Format::kBlockScales)
        by = quantizer_for<Format>(kOfMagnitudes<Format> ? magnitude_of_block<kLanes>(columns, Format::kBlock)
                                                         : extremes_of_block<kLanes>(columns, Format::kBlock),
                                   argument, lane % kLanes == 0,
                                   scales + Format::kScales + block * Format::kScaleStep,
                                   scales + Format::kZeros + block * Format::kScaleStep);
      else
        by.factor = factor_of_scale<Format>(argument);
      if (lane % kLanes == 0) quantizers[block] = by;
    }
    __syncwarp();
    constexpr int kBlockBytes = Format::kBlock * Format::kBits / 8;
    for (int i = lane; i < kBlocks * kBlockBytes; i += 32) {
      const int block = i / kBlockBytes, byte = i % kBlockBytes;
      const KvQuantizer by = quantizers[block];
      unsigned bits = 0;
#pragma unroll
      for (int n = 0; n < 8 / Format::kBits; ++n) {
        const int column = Format::kHalves ? byte + n * (Format::kBlock / 2) : byte * (8 / Format::kBits) + n;
        bits |= code_by<Format>(by, row[block * Format::kBlock + column]) << n * Format::kBits;
      }
      to[Format::kCodes + block * Format::kBlockStep + byte] = static_cast<unsigned char>(bits);
    }
    store_tail<Format>(row, to);
    __syncwarp();
  }
};

}  // namespace flashjit::auxiliary
