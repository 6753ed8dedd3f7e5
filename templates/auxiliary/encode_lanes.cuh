// A row as the bytes of a KV format from registers: each lane has eight columns side by side, and a block's
// lanes find its scale together. For rows of whole blocks, the same bytes as RowEncoder's.
#pragma once

#include "flashjit/auxiliary/encode_row.cuh"

namespace flashjit::auxiliary {

constexpr int kLaneColumns = 8;

/// Formats whose blocks are of a power of two of lanes, and of which a lane's codes are whole bytes of one
/// row.
template <class Format>
constexpr bool kEncodesByLanes =
    (Format::kBits == 4 || Format::kBits == 8) && Format::kCode != KvCode::book && !Format::kHalves
    && Format::kColumns == Format::kDim && Format::kKeys == 0 && Format::kBlock % kLaneColumns == 0 &&
    (Format::kBlock & (Format::kBlock - 1)) == 0 && Format::kBlock <= 256 && Format::kDim <= 256 &&
    (Format::kDim & (Format::kDim - 1)) == 0;

/// As extremes_of_block(), of kLanes lanes' columns.
template <int kLanes>
__device__ __forceinline__ BlockExtremes extremes_of_lanes(const float (&x)[kLaneColumns]) {
  BlockExtremes found{0.0f, static_cast<int>(threadIdx.x) % kLanes, x[0], x[0], true};
#pragma unroll
  for (int i = 0; i < kLaneColumns; ++i) {
    if (fabsf(x[i]) > fabsf(found.extreme)) found.extreme = x[i];
    found.low = fminf(found.low, x[i]), found.high = fmaxf(found.high, x[i]);
    found.finite = found.finite && fabsf(x[i]) <= 3.402823466e38f;
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
template <int kLanes>
__device__ __forceinline__ BlockExtremes magnitude_of_lanes(const float (&x)[kLaneColumns]) {
  unsigned largest = 0;
#pragma unroll
  for (const float value : x) largest = max(largest, __float_as_uint(value) & 0x7fffffffu);
#pragma unroll
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2)
    largest = max(largest, __shfl_xor_sync(kWholeWarp, largest, lanes));
  return {__uint_as_float(largest), 0, 0.0f, 0.0f, largest < 0x7f800000u};
}

/// Bits that end with the code of a value: integers and e2m1 by sums instead of conversions and comparisons.
template <class Format>
constexpr bool kCodesBySums =
    Format::kCode == KvCode::int4 || Format::kCode == KvCode::int4_offset || Format::kCode == KvCode::uint4 ||
    Format::kCode == KvCode::int8 || Format::kCode == KvCode::uint8;
template <class Format>
__device__ __forceinline__ unsigned integer_by_sum(float x) {
  constexpr float kBias = Format::kCode == KvCode::int4_offset ? 8.0f : 0.0f;
  const float within = fminf(fmaxf(x, kLowestCode<Format>), kHighestCode<Format>);
  return __float_as_uint(within + kRoundingShift + kBias) & ((1u << Format::kBits) - 1);
}
template <class Format>
__device__ __forceinline__ unsigned code_of_lane(const KvQuantizer& by, float x) {
  const float value = Format::kZero == KvZero::added ? quotient<Format>(x - by.zero, by.factor)
                                                     : quotient<Format>(x, by.factor) + by.zero;
  return kHasSmallFloats<Format> ? e2m1_by_sums(value)
         : kCodesBySums<Format>  ? integer_by_sum<Format>(value)
                                 : code_of_value<Format>(value);
}

/// A lane's eight codes, in whole words.
template <class Format>
__device__ __forceinline__ void codes_of_lane(const KvQuantizer& by, const float (&x)[kLaneColumns],
                                              unsigned (&words)[Format::kBits / 4]) {
#if __CUDA_ARCH__ >= 890
  if (Format::kCode == KvCode::e4m3 && Format::kZero != KvZero::added) {
    const auto at = [&](int i) { return quotient<Format>(x[i], by.factor) + by.zero; };
#pragma unroll
    for (int i = 0; i < Format::kBits / 4; ++i)
      words[i] = pack_e4m3(at(4 * i), at(4 * i + 1), at(4 * i + 2), at(4 * i + 3));
    return;
  }
#endif
#pragma unroll
  for (unsigned& word : words) word = 0;
#pragma unroll
  for (int i = 0; i < kLaneColumns; ++i)
    words[i * Format::kBits / 32] |= code_of_lane<Format>(by, x[i]) << i * Format::kBits % 32;
}

/// Encodes a lane's columns of a row, from `column` on. All lanes of a warp.
template <class Format>
__device__ __forceinline__ void encode_lane(const float (&x)[kLaneColumns], int column, bool exists,
                                            float argument, unsigned char* to, unsigned char* scales) {
  constexpr int kLanes = Format::kBlock / kLaneColumns;
  const int block = column / Format::kBlock;
  KvQuantizer by{0.0f, 0.0f};
  if (Format::kBlockScales)
    by = quantizer_for<Format>(
        kOfMagnitudes<Format> ? magnitude_of_lanes<kLanes>(x) : extremes_of_lanes<kLanes>(x), argument,
        exists && static_cast<int>(threadIdx.x) % kLanes == 0,
        scales + Format::kScales + block * Format::kScaleStep,
        scales + Format::kZeros + block * Format::kScaleStep);
  else
    by.factor = factor_of_scale<Format>(argument);
  unsigned words[Format::kBits / 4];
  codes_of_lane<Format>(by, x, words);
  if (!exists) return;
  unsigned char* at =
      to + Format::kCodes + block * Format::kBlockStep + column % Format::kBlock * Format::kBits / 8;
  constexpr int kBytes = Format::kBits, kStep = min(kBytes, Format::kAlignment);
#pragma unroll
  for (int i = 0; i < kBytes; i += kStep) {
    const unsigned word = words[i / 4] >> i % 4 * 8;
    if (kStep == 8)
      *reinterpret_cast<uint2*>(at) = uint2{words[0], words[Format::kBits / 4 - 1]};
    else if (kStep == 4)
      *reinterpret_cast<unsigned*>(at + i) = word;
    else if (kStep == 2)
      *reinterpret_cast<unsigned short*>(at + i) = static_cast<unsigned short>(word);
    else
      at[i] = static_cast<unsigned char>(word);
  }
}

}  // namespace flashjit::auxiliary
