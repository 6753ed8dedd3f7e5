// A row of floats in shared memory as the bytes of a KV format, by a warp: the inverse of decode16(), with
// the same numbers as encode_row() of runtime/expr/kv_codec.cpp.
#pragma once

#include "flashjit/auxiliary/encode_search.cuh"
#include "flashjit/common/kv_encode.cuh"
#include "flashjit/common/ptx.cuh"

namespace flashjit::auxiliary {

/// Codes are v * factor + zero, or (v - zero) * factor where zero points are added; of an expression factor
/// is the scale.
struct KvQuantizer {
  float factor, zero;
};
template <class Format>
__device__ __forceinline__ float quotient(float x, float factor) {
  return kDivides<Format> ? x / factor : x * factor;
}

/// Joins the extremes that each of kLanes lanes found.
template <int kLanes>
__device__ __forceinline__ BlockExtremes of_all_lanes(BlockExtremes found) {
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

template <int kLanes>
__device__ __forceinline__ BlockExtremes extremes_of_block(const float* block, int columns) {
  BlockExtremes found{0.0f, 0, block[0], block[0], true};
  for (int i = static_cast<int>(threadIdx.x) % kLanes; i < columns; i += kLanes) {
    const float x = block[i];
    if (fabsf(x) > fabsf(found.extreme)) found.extreme = x, found.column = i;
    found.low = fminf(found.low, x), found.high = fmaxf(found.high, x);
    found.finite = found.finite && fabsf(x) <= 3.402823466e38f;
  }
  return of_all_lanes<kLanes>(found);
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

/// The scale and zero point of a block, or of a column of keys, which `writes` writes.
template <DecodesByExpression Format>
__device__ __forceinline__ KvQuantizer quantizer_for(const BlockExtremes& found, float, bool writes,
                                                     unsigned char* scale_at, unsigned char* zero_at) {
  const FoundNumbers numbers = search_numbers<Format>(found);
  constexpr int kBytes = size_of(Format::kScaleType);
  if (writes) store_bytes<kBytes, Format::kScaleAlignment>(scale_at, numbers.scale_bits);
  if (writes && Format::kZero != KvZero::none && Format::kZeroBits == 0)
    store_bytes<kBytes, Format::kScaleAlignment>(zero_at, numbers.zero_bits);
  return {number_of_bits<Format::kScaleType>(numbers.scale_bits), zero_of_bits<Format>(numbers.zero_bits)};
}
template <class Format>
__device__ __forceinline__ KvQuantizer quantizer_for(const BlockExtremes& found, float argument, bool writes,
                                                     unsigned char* scale_at, unsigned char* zero_at) {
  constexpr KvNumber kType = Format::kScaleType;
  constexpr int kBytes = size_of(kType);
  if (Format::kZero == KvZero::none) {
    const unsigned bits = symmetric_scale<Format>(found, argument);
    if (writes) store_bytes<kBytes, Format::kScaleAlignment>(scale_at, bits);
    return {factor_of_scale<Format>(number_of_bits<kType>(bits) * argument), 0.0f};
  }
  constexpr float kLevels = static_cast<float>(kHighestCode<Format> - kLowestCode<Format>);
  const float nan = __uint_as_float(0x7fffffffu);
  const bool added = Format::kZero == KvZero::added;
  const float low = !found.finite ? nan : added ? found.low : fminf(found.low, 0.0f);
  const float high = !found.finite ? nan : added ? found.high : fmaxf(found.high, 0.0f);
  constexpr bool kOfIntegers = Format::kZeroBits > 0;  // which store_zeros() writes
  unsigned zero_bits = added ? bits_of_number<kType>(low / argument) : 0u;
  const float least = number_of_bits<kType>(zero_bits);
  const float range = added ? high / argument - least : (high - low) / argument;
  const unsigned bits = bits_of_scale<kType>(range == 0.0f ? 1.0f : range / kLevels);
  const float scale = number_of_bits<kType>(bits) * argument;
  if (kOfIntegers) {
    constexpr int kMost = (1 << Format::kZeroBits) - 1;
    if (writes) store_bytes<kBytes, Format::kScaleAlignment>(scale_at, bits);
    const int zero = clamped(__float2int_rn(-(low / scale)), 0, kMost);
    return {factor_of_scale<Format>(scale), static_cast<float>(kLowestCode<Format> + zero)};
  }
  if (!added) zero_bits = bits_of_number<kType>(static_cast<float>(kLowestCode<Format>) - rintf(low / scale));
  if (writes) {
    store_bytes<kBytes, Format::kScaleAlignment>(scale_at, bits);
    store_bytes<kBytes, Format::kScaleAlignment>(zero_at, zero_bits);
  }
  const float zero = number_of_bits<kType>(zero_bits);
  return {factor_of_scale<Format>(scale), added ? zero * argument : zero};
}

/// Writes zero points that are integers, of `count` blocks or columns in their order, by `threads` threads.
template <class Format>
__device__ __forceinline__ void store_zeros(const KvQuantizer* quantizers, int count, int thread, int threads,
                                            unsigned char* scales) {
  constexpr int kPerByte = Format::kZeroStep < 8 ? 8 / max(Format::kZeroBits, 1) : 1;
  for (int first = thread * kPerByte; first < count; first += threads * kPerByte) {
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < kPerByte; ++i)
      if (first + i < count)
        bits |= static_cast<unsigned>(static_cast<int>(quantizers[first + i].zero) - kLowestCode<Format>)
                << i * Format::kZeroBits;
    scales[Format::kZeros + first * Format::kZeroStep / 8] = static_cast<unsigned char>(bits);
  }
}

/// The code of an element, in its lowest bits.
template <DecodesByExpression Format>
__device__ __forceinline__ unsigned code_by(const KvQuantizer& by, float x) {
  return nearest_code<Format>(by.factor, by.zero, x);
}
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
    if (Format::kZeroBits > 0) store_zeros<Format>(quantizers, kBlocks, lane, 32, scales);
    constexpr int kBlockBytes = Format::kBlock * Format::kBits / 8;
    for (int i = lane; i < kBlocks * kBlockBytes; i += 32) {
      const int block = i / kBlockBytes, byte = i % kBlockBytes;
      const KvQuantizer by = quantizers[block];
      const float* columns = row + block * Format::kBlock;
      const unsigned bits =
          byte_of_codes<Format>(byte, [&](int column) { return code_by<Format>(by, columns[column]); });
      to[Format::kCodes + block * Format::kBlockStep + byte] = static_cast<unsigned char>(bits);
    }
    store_tail<Format>(row, to);
    __syncwarp();
  }
};

}  // namespace flashjit::auxiliary
