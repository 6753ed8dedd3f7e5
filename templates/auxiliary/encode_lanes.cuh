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
    (Format::kBits == 4 || Format::kBits == 8) && Format::kCode != KvCode::book &&
    (!Format::kHalves || (Format::kBits == 4 && Format::kBlock >= 2 * kLaneColumns)) &&
    Format::kColumns == Format::kDim&& Format::kKeys == 0 && Format::kBlock % kLaneColumns == 0 &&
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
  return of_all_lanes<kLanes>(found);
}
/// The same but for the smallest and the largest number: bits of floats that are not negative are ordered as
/// integers, and of negative ones as unsigned integers.
template <int kLanes>
__device__ __forceinline__ BlockExtremes extreme_of_lanes(const float (&x)[kLaneColumns]) {
  const auto lower = [](unsigned a, unsigned b) { return a > b ? a : b; };  // of negative numbers
  int most = 0;
  unsigned least = 0;
#pragma unroll
  for (const float value : x)
    most = max(most, __float_as_int(value)), least = lower(least, __float_as_uint(value));
#pragma unroll
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) {
    most = max(most, __shfl_xor_sync(kWholeWarp, most, lanes));
    least = lower(least, __shfl_xor_sync(kWholeWarp, least, lanes));
  }
  const int negative = max(static_cast<int>(least ^ 0x80000000u), 0);
  // Which of two of both signs is the first?
  if (__any_sync(kWholeWarp, most == negative && most != 0)) return extremes_of_lanes<kLanes>(x);
  const float extreme = negative > most ? -__int_as_float(negative) : __int_as_float(most);
  return {extreme, 0, 0.0f, 0.0f, max(most, negative) < 0x7f800000};
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

/// What a code is the nearest to.
template <class Format>
__device__ __forceinline__ float quotient_of(const KvQuantizer& by, float x) {
  return Format::kZero == KvZero::added ? quotient<Format>(x - by.zero, by.factor)
                                        : quotient<Format>(x, by.factor) + by.zero;
}

/// Bits that end with the code of a value: integers by sums instead of conversions and comparisons.
template <class Format>
constexpr bool kCodesBySums =
    Format::kCode == KvCode::int4 || Format::kCode == KvCode::int4_offset || Format::kCode == KvCode::uint4 ||
    Format::kCode == KvCode::int8 || Format::kCode == KvCode::uint8;
template <class Format>
constexpr float kSumsBias = -kLowestCode<Format>;  ///< so that sums end with no negative integer
/// A word of integers, from the sums' bits, whose upper ones are taken off together.
template <class Format>
__device__ __forceinline__ unsigned integers_by_sums(const KvQuantizer& by, const float* x) {
  constexpr float kBegin = kRoundingShift + kSumsBias<Format>;
  constexpr int kCount = 32 / Format::kBits;
  unsigned word = 0, upper = 0;
#pragma unroll
  for (int i = kCount - 1; i >= 0; --i) {
    const float within =
        fminf(fmaxf(quotient_of<Format>(by, x[i]), kLowestCode<Format>), kHighestCode<Format>);
    word = (word << Format::kBits) + __float_as_uint(within + kBegin);
    upper = (upper << Format::kBits) + 0x4b400000u;
  }
  constexpr unsigned kSigns = Format::kBits == 8 ? 0x80808080u : 0x88888888u;
  const bool flips = Format::kCode == KvCode::int4 || Format::kCode == KvCode::int8;
  return (word - upper) ^ (flips ? kSigns : 0u);
}
/// A word of e2m1, each as e2m1_by_sums() finds it; the sums' upper bits are taken off together.
template <class Format>
__device__ __forceinline__ unsigned word_of_e2m1(const KvQuantizer& by, const float* x) {
  unsigned word = 0, upper = 0, signs = 0;
#pragma unroll
  for (int i = kLaneColumns - 1; i >= 0; --i) {
    const float value = quotient_of<Format>(by, x[i]), y = fminf(fabsf(value), 6.5f);
    const int halves = __float_as_int(fmaf(y, 2.0f, kRoundingShift)),
              ones = __float_as_int(y + (kRoundingShift + 2.0f)),
              twos = __float_as_int(fmaf(y, 0.5f, kRoundingShift + 4.0f));
    word = (word << 4) + static_cast<unsigned>(min(min(halves, ones), twos));
    upper = (upper << 4) + 0x4b400000u;
    signs = signs << 4 | __float_as_uint(value) >> 28;
  }
  return (word - upper) | (signs & 0x88888888u);
}

/// Those of no faster way.
template <class Format>
__device__ __forceinline__ void codes_one_by_one(const KvQuantizer& by, const float (&x)[kLaneColumns],
                                                 unsigned (&words)[Format::kBits / 4]) {
#pragma unroll
  for (unsigned& word : words) word = 0;
#pragma unroll
  for (int i = 0; i < kLaneColumns; ++i)
    words[i * Format::kBits / 32] |= code_of_value<Format>(quotient_of<Format>(by, x[i]))
                                     << i * Format::kBits % 32;
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
  if (kCodesBySums<Format> || kHasSmallFloats<Format>) {
#pragma unroll
    for (int i = 0; i < Format::kBits / 4; ++i)
      words[i] = kHasSmallFloats<Format> ? word_of_e2m1<Format>(by, x)
                                         : integers_by_sums<Format>(by, x + i * 32 / Format::kBits);
    return;
  }
  codes_one_by_one<Format>(by, x, words);
}

/// Of a block whose second half is in the upper bits of bytes: the lane's four bytes, of its own codes in one
/// half and of the other half's lane's. Returns the first's place.
template <class Format>
__device__ __forceinline__ int join_halves(unsigned& codes) {
  constexpr int kLanes = Format::kBlock / kLaneColumns, kOther = kLanes / 2;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const bool upper = lane >= kOther;
  const unsigned even = codes & 0x0f0f0f0fu, odd = codes >> 4 & 0x0f0f0f0fu;
  const unsigned first = select_bytes(even, odd, 0x5140), second = select_bytes(even, odd, 0x7362);
  const unsigned got = __shfl_xor_sync(kWholeWarp, upper ? first : second, kOther);
  codes = upper ? got | second << 4 : first | got << 4;
  return lane % kOther * kLaneColumns + (upper ? 4 : 0);
}
/// Stores a lane's codes of a row.
template <class Format, int kBytes>
__device__ __forceinline__ void store_lane(unsigned char* at, const unsigned (&words)[Format::kBits / 4]) {
  constexpr int kStep = min(kBytes, Format::kAlignment);
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

/// Encodes a lane's columns of a row, from `column` on. All lanes of a warp.
template <class Format>
__device__ __forceinline__ void encode_lane(const float (&x)[kLaneColumns], int column, bool exists,
                                            float argument, unsigned char* to, unsigned char* scales) {
  constexpr int kLanes = Format::kBlock / kLaneColumns;
  const int block = column / Format::kBlock;
  KvQuantizer by{0.0f, 0.0f};
  if (Format::kBlockScales)
    by = quantizer_for<Format>(kOfMagnitudes<Format>           ? magnitude_of_lanes<kLanes>(x)
                               : Format::kZero == KvZero::none ? extreme_of_lanes<kLanes>(x)
                                                               : extremes_of_lanes<kLanes>(x),
                               argument, exists && static_cast<int>(threadIdx.x) % kLanes == 0,
                               scales + Format::kScales + block * Format::kScaleStep,
                               scales + Format::kZeros + block * Format::kScaleStep);
  else
    by.factor = factor_of_scale<Format>(argument);
  unsigned words[Format::kBits / 4];
  codes_of_lane<Format>(by, x, words);
  const int first =
      Format::kHalves ? join_halves<Format>(words[0]) : column % Format::kBlock * Format::kBits / 8;
  if (!exists) return;
  store_lane<Format, Format::kHalves ? 4 : Format::kBits>(
      to + Format::kCodes + block * Format::kBlockStep + first, words);
}

}  // namespace flashjit::auxiliary
