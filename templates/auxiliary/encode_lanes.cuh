// Rows as the bytes of a KV format from registers: a lane has eight columns side by side of each of four
// rows. A block's lanes find together what its scale needs, of a row or two each, and make that scale for
// all: for rows of whole blocks, the same bytes as RowEncoder's.
#pragma once

#include "flashjit/auxiliary/encode_row.cuh"
#include "flashjit/common/chunk.cuh"

namespace flashjit::auxiliary {

constexpr int kLaneColumns = 8, kLaneRows = 4;

/// Whether a warp's lanes encode a format together: a block has a power of two of lanes, and a lane's codes
/// are whole bytes of one row.
template <class Format>
constexpr bool kEncodesByLanes =
    (Format::kBits == 4 || Format::kBits == 8 || (Format::kBits == 5 && Format::kHalves)) &&
    Format::kCode != KvCode::book && !DecodesByExpression<Format> && Format::kColumns == Format::kDim
    && Format::kKeys == 0 && Format::kBlock % (2 * kLaneColumns) == 0 &&
    (Format::kBlock & (Format::kBlock - 1)) == 0 && Format::kBlock <= 256 && Format::kDim <= 256 &&
    (Format::kDim & (Format::kDim - 1)) == 0;
/// Lanes of a block, and blocks whose scales a lane makes.
template <class Format>
constexpr int kBlockLanes = Format::kBlock / kLaneColumns;
template <class Format>
constexpr int kOwnScales = kBlockLanes<Format> == 2 ? 2 : 1;

__device__ __forceinline__ int lane_of_warp() { return static_cast<int>(threadIdx.x) % 32; }

__device__ __forceinline__ unsigned larger_of(unsigned a, unsigned b) { return a > b ? a : b; }

// --- What scales need -------------------------------------------------------------------------------------

/// Keys that grow as 16-bit floats do as signed integers, of two at a time, from their bits and back.
__device__ __forceinline__ unsigned ordered_halves(unsigned pair) {
  return pair ^ (select_bytes(pair, 0u, 0xbb99) & 0x7fff7fffu);
}

/// Where the largest magnitude's sign counts, a result has, from its highest bit down: the magnitude, how
/// early the lane is, how early the column, a bit if a lane has both signs in an unknown order, the sign.
constexpr unsigned kTwoSigns = 2;
template <class Format>
constexpr bool kOfSigned = Format::kZero == KvZero::none && !kOfMagnitudes<Format>;
template <class Format>
__device__ __forceinline__ unsigned earliness_of_lane() {
  return static_cast<unsigned>(~lane_of_warp() & (kBlockLanes<Format> - 1)) << 8;
}
/// As found_by_lane(), column by column.
template <class Format>
__device__ __forceinline__ unsigned found_by_columns(const uint4& own) {
  const unsigned words[4] = {own.x, own.y, own.z, own.w};
  unsigned largest = 0;
#pragma unroll
  for (unsigned i = 0; i < kLaneColumns; ++i) {
    const unsigned half = i % 2 ? words[i / 2] >> 16 : words[i / 2] & 0xffffu;
    largest = larger_of(largest, (half & 0x7fffu) << 16 | (kLaneColumns - 1 - i) << 5 | half >> 15);
  }
  return largest | earliness_of_lane<Format>();
}

/// What a lane finds in its columns; the larger of two lanes' results is for both. It is the largest
/// magnitude, alone or with its sign, or keys of the largest number and of the least, inverted.
template <class Format>
__device__ __forceinline__ unsigned found_by_lane(const uint4& own) {
  const unsigned words[4] = {own.x, own.y, own.z, own.w};
  unsigned most = 0, least = 0;
  if (kOfMagnitudes<Format>) {
#pragma unroll
    for (const unsigned word : words) most = __vmaxu2(most, word & 0x7fff7fffu);
    return larger_of(most & 0xffffu, most >> 16);
  }
  if (kOfSigned<Format>) {  // unsigned, negative numbers are larger, by their magnitudes
#pragma unroll
    for (const unsigned word : words) most = __vmaxs2(most, word), least = __vmaxu2(least, word);
    const unsigned positive = larger_of(most & 0xffffu, most >> 16) << 16;
    const unsigned lowest = larger_of(least & 0xffffu, least >> 16);
    const unsigned negative = static_cast<unsigned>(max(static_cast<int>(lowest) - 0x8000, 0)) << 16;
    return (larger_of(positive, negative | 1u) | earliness_of_lane<Format>()) +
           (positive == negative ? kTwoSigns : 0u);
  }
  most = ordered_halves(words[0]), least = ~most;
#pragma unroll
  for (int i = 1; i < 4; ++i) {
    const unsigned keys = ordered_halves(words[i]);
    most = __vmaxs2(most, keys), least = __vmaxs2(least, ~keys);
  }
  return __vmaxs2(select_bytes(most, least, 0x5410), select_bytes(most, least, 0x7632));
}
template <class Format>
__device__ __forceinline__ unsigned larger_found(unsigned a, unsigned b) {
  return Format::kZero == KvZero::none ? larger_of(a, b) : __vmaxs2(a, b);
}
/// Joins what a block's lanes found in four rows; a lane keeps its own rows' results: row lane % 4 in blocks
/// of four lanes or more, rows lane % 2 and lane % 2 + 2 in blocks of two.
template <class Format>
__device__ __forceinline__ void join_lanes(unsigned (&found)[kLaneRows]) {
  const auto exchange = [](unsigned& to, unsigned lower, unsigned upper, int lanes) {
    const bool is_upper = (lane_of_warp() & lanes) != 0;
    const unsigned got = __shfl_xor_sync(kWholeWarp, is_upper ? lower : upper, lanes);
    to = larger_found<Format>(is_upper ? upper : lower, got);
  };
  exchange(found[0], found[0], found[1], 1);
  exchange(found[1], found[2], found[3], 1);
  if (kBlockLanes<Format> == 2) return;
  exchange(found[0], found[0], found[1], 2);
#pragma unroll
  for (int lanes = 4; lanes < kBlockLanes<Format>; lanes *= 2)
    found[0] = larger_found<Format>(found[0], __shfl_xor_sync(kWholeWarp, found[0], lanes));
}
template <class Element, class Format>
__device__ __forceinline__ BlockExtremes extremes_of_found(unsigned found) {
  constexpr unsigned kInfinity = kIsFp16<Element> ? 0x7c00u : 0x7f80u;
  if (kOfMagnitudes<Format>) return {low_of<Element>(found), 0, 0.0f, 0.0f, found < kInfinity};
  if (Format::kZero == KvZero::none)
    return {low_of<Element>(found >> 16 | (found & 1u) << 15), 0, 0.0f, 0.0f, found >> 16 < kInfinity};
  const unsigned pair = ordered_halves(found ^ 0xffff0000u), magnitudes = pair & 0x7fff7fffu;
  const bool finite = max(magnitudes & 0xffffu, magnitudes >> 16) < kInfinity;
  return {0.0f, 0, high_of<Element>(pair) + 0.0f, low_of<Element>(pair), finite};  // -0 becomes 0
}

// --- Codes ------------------------------------------------------------------------------------------------

/// What a code is the nearest to.
template <class Format>
__device__ __forceinline__ float quotient_of(const KvQuantizer& by, float x) {
  return Format::kZero == KvZero::added ? quotient<Format>(x - by.zero, by.factor)
                                        : quotient<Format>(x, by.factor) + by.zero;
}

/// Floats of 8 bits, whose conversions saturate.
template <class Format>
constexpr bool kConverts = Format::kCode == KvCode::e4m3 || Format::kCode == KvCode::e5m2;
/// Bounds of quotients whose codes are found by sums, unless a scale is the least or the largest number or
/// not normal. Sums of e2m1 give at most 7 for quotients up to 7, or, if cut at 7, far beyond.
template <class Format>
constexpr float kLargestQuotient = kHasSmallFloats<Format>
                                       ? (Format::kScaleType == KvNumber::e8m0 ? 8.4f : 6.9f)
                                       : (Format::kLargest < 0.0f ? -Format::kLargest : Format::kLargest) +
                                             0.4f;
template <class Format>
constexpr bool kKeepsRange = Format::kBlockScales&& Format::kZero == KvZero::none;
/// The largest code, where quotients of that range have larger ones; else 0.
template <class Format>
constexpr unsigned kLargestOfSums = kHasSmallFloats<Format>
                                        ? (Format::kScaleType == KvNumber::e8m0 ? 7u : 0u)
                                        : (Format::kLargest < 0.0f ? (1u << Format::kBits) - 1 : 0u);

template <class Format>
__device__ __forceinline__ float within_codes(float x) {
  if (kHasSmallFloats<Format>) return fminf(fmaxf(x, -6.5f), 6.5f);
  return fminf(fmaxf(x, static_cast<float>(kLowestCode<Format>)), static_cast<float>(kHighestCode<Format>));
}
/// Bits that end with the code of a quotient, 16 of them without a sign; of e2m1 with the magnitude's; of 8
/// bits, the byte alone.
template <class Format>
__device__ __forceinline__ unsigned sum_of_code(float x) {
  if (kHasSmallFloats<Format>) {
    const float y = fabsf(x);
    const unsigned halves = __float_as_uint(fmaf(y, 2.0f, kRoundingShift)),
                   ones = __float_as_uint(y + (kRoundingShift + 2.0f)),
                   twos = __float_as_uint(fmaf(y, 0.5f, kRoundingShift + 4.0f));
    return min(min(halves, ones), twos);
  }
  constexpr int kBias = Format::kBits == 8 ? 0 : -kLowestCode<Format>;
  return __float_as_uint(x + (kRoundingShift + static_cast<float>(kBias)));
}
/// The codes of two columns, each in 16 bits.
template <class Format>
__device__ __forceinline__ unsigned pair_of_sums(unsigned low, unsigned high) {
  const unsigned pair = select_bytes(low, high, 0x5410);
  return kLargestOfSums<Format> ? __vminu2(pair, kLargestOfSums<Format> * 0x10001u) : pair;
}
/// The signs of eight quotients, at the highest bits of 4 each.
__device__ __forceinline__ unsigned signs_of(const float (&x)[kLaneColumns]) {
  unsigned signs = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // of columns i and i + 4
    const unsigned pair = select_bytes(__float_as_uint(x[i]), __float_as_uint(x[i + 4]), 0x7632);
    signs |= pair >> (12 - 4 * i) & 0x00080008u << 4 * i;
  }
  return signs;
}

/// A lane's eight codes: one after the other, in halves each in a byte.
template <class Element, class Format>
__device__ __forceinline__ void codes_of_lane(const uint4& own, const KvQuantizer& by, bool in_range,
                                              unsigned (&words)[2]) {
  float x[kLaneColumns];
  unpack_chunk<Element>(own, x);
#pragma unroll
  for (float& value : x) value = quotient_of<Format>(by, value);
  if (kConverts<Format>) {
    using Code = Conditional<Format::kCode == KvCode::e4m3, e4m3, e5m2>;
    words[0] = codes_of_four<Code>({x[0], x[1], x[2], x[3]});
    words[1] = codes_of_four<Code>({x[4], x[5], x[6], x[7]});
    return;
  }
  if (!kKeepsRange<Format> || !in_range)
#pragma unroll
    for (float& value : x) value = within_codes<Format>(value);
  unsigned sums[kLaneColumns];
#pragma unroll
  for (int i = 0; i < kLaneColumns; ++i) sums[i] = sum_of_code<Format>(x[i]);
  const auto pair = [&](int low, int high) { return pair_of_sums<Format>(sums[low], sums[high]); };
  if (Format::kBits == 8) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      words[i] = select_bytes(select_bytes(sums[4 * i], sums[4 * i + 1], 0x0040),
                              select_bytes(sums[4 * i + 2], sums[4 * i + 3], 0x0040), 0x5410);
    return;
  }
  if (Format::kHalves) {
    words[0] = pair(0, 2) + (pair(1, 3) << 8), words[1] = pair(4, 6) + (pair(5, 7) << 8);
    if (!kHasSmallFloats<Format>) return;
    const unsigned signs = signs_of(x);
    const unsigned even = signs & 0x08080808u, odd = signs >> 4 & 0x08080808u;
    words[0] |= select_bytes(even, odd, 0x5140), words[1] |= select_bytes(even, odd, 0x7362);
    return;
  }
  words[0] = (pair(0, 4) + (pair(1, 5) << 4)) + ((pair(2, 6) << 8) + (pair(3, 7) << 12));
  if (kHasSmallFloats<Format>) words[0] |= signs_of(x);
}

/// Joins codes of a block whose second half is in the upper bits of bytes: each of the lane's four bytes gets
/// one code of its own and one of the lane in the other half. Returns the first byte's place.
template <class Format>
__device__ __forceinline__ int join_halves(unsigned (&words)[2]) {
  constexpr int kLanes = kBlockLanes<Format>, kOther = kLanes / 2;
  const int lane = lane_of_warp() % kLanes;
  const bool upper = lane >= kOther;
  const unsigned first = words[0] & 0x0f0f0f0fu, second = words[1] & 0x0f0f0f0fu;
  const unsigned got = __shfl_xor_sync(kWholeWarp, upper ? first : second, kOther);
  words[0] = upper ? got | second << 4 : first | got << 4;
  return lane % kOther * kLaneColumns + (upper ? 4 : 0);
}
/// The fifth bits of eight codes that each have a byte.
__device__ __forceinline__ unsigned fifth_bits(const unsigned (&words)[2]) {
  const unsigned bits = (words[0] >> 4 & 0x01010101u) | (words[1] & 0x10101010u);
  return (bits * 0x01020408u) >> 24;  // no two of the products' bits meet
}
/// Stores a lane's codes of a row.
template <class Format, int kBytes>
__device__ __forceinline__ void store_lane(unsigned char* at, const unsigned (&words)[2]) {
  constexpr int kStep = min(kBytes, Format::kAlignment);
#pragma unroll
  for (int i = 0; i < kBytes; i += kStep) {
    const unsigned word = words[i / 4] >> i % 4 * 8;
    if (kStep == 8)
      *reinterpret_cast<uint2*>(at) = uint2{words[0], words[1]};
    else if (kStep == 4)
      *reinterpret_cast<unsigned*>(at + i) = word;
    else if (kStep == 2)
      *reinterpret_cast<unsigned short*>(at + i) = static_cast<unsigned short>(word);
    else
      at[i] = static_cast<unsigned char>(word);
  }
}

// --- Rows -------------------------------------------------------------------------------------------------

/// The row for which a lane makes scale `i`, and the lane that made a row's scale.
template <class Format>
__device__ __forceinline__ int row_of_own(int i) {
  return kOwnScales<Format> == 1 ? lane_of_warp() % 4 : lane_of_warp() % 2 + 2 * i;
}
template <class Format>
__device__ __forceinline__ KvQuantizer quantizer_of_row(const KvQuantizer (&own)[kOwnScales<Format>],
                                                        int row) {
  const int lane = lane_of_warp();
  const int from = kOwnScales<Format> == 1 ? lane - lane % 4 + row : lane - lane % 2 + row % 2;
  const KvQuantizer& by = own[kOwnScales<Format> == 1 ? 0 : row / 2];
  const float factor = __shfl_sync(kWholeWarp, by.factor, from);
  return {factor, Format::kZero == KvZero::none ? 0.0f : __shfl_sync(kWholeWarp, by.zero, from)};
}

/// Writes zero points that are integers, of a byte's blocks by the first one's lane; all lanes of a warp.
template <class Format>
__device__ __forceinline__ void store_lane_zeros(float zero, int block, bool writes, unsigned char* scales) {
  constexpr int kBlocks = Format::kColumns / Format::kBlock,
                kPerByte = min(Format::kZeroStep < 8 ? 8 / max(Format::kZeroBits, 1) : 1, kBlocks);
  unsigned bits = static_cast<unsigned>(static_cast<int>(zero) - kLowestCode<Format>);
#pragma unroll
  for (int n = 1; n < kPerByte; n *= 2)  // the neighbouring blocks' lanes have the same rows
    bits |= __shfl_xor_sync(kWholeWarp, bits, n * kBlockLanes<Format>) << n * Format::kZeroBits;
  if (writes && block % kPerByte == 0)
    scales[Format::kZeros + block * Format::kZeroStep / 8] = static_cast<unsigned char>(bits);
}

/// Where a lane's rows go: the first, and how far the next one is, in bytes.
struct LaneRows {
  unsigned char *to, *scales;
  long long step, scale_step;
  int count;  ///< rows that exist
};

/// Encodes columns from `column` on. `arguments` are the call's scales of the lane's own rows. refill(r): row
/// `r` is free. All lanes of a warp.
template <class Element, class Format, class Refill>
__device__ __forceinline__ void encode_rows(const uint4 (&own)[kLaneRows], int column,
                                            const float (&arguments)[2], const LaneRows& rows,
                                            const Refill& refill) {
  const int block = column / Format::kBlock;
  KvQuantizer quantizers[kOwnScales<Format>];
  bool in_range = true;
  if (Format::kBlockScales) {
    unsigned found[kLaneRows];
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) found[r] = found_by_lane<Format>(own[r]);
    join_lanes<Format>(found);
    const auto has_two_signs = [](unsigned of) { return (of & kTwoSigns) != 0 && of >> 16 != 0; };
    if (kOfSigned<Format> && __any_sync(kWholeWarp, has_two_signs(found[0]) || (kOwnScales<Format> == 2 &&
                                                                                has_two_signs(found[1])))) {
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) found[r] = found_by_columns<Format>(own[r]);
      join_lanes<Format>(found);
    }
#pragma unroll
    for (int i = 0; i < kOwnScales<Format>; ++i) {
      const int row = row_of_own<Format>(i);
      const BlockExtremes extremes = extremes_of_found<Element, Format>(found[i]);
      const bool writes = row < rows.count && lane_of_warp() % kBlockLanes<Format> < 4;
      unsigned char* scale = rows.scales + row * rows.scale_step + block * Format::kScaleStep;
      quantizers[i] = quantizer_for<Format>(extremes, arguments[i], writes, scale + Format::kScales,
                                            scale + Format::kZeros);
      if (Format::kZeroBits > 0)
        store_lane_zeros<Format>(quantizers[i].zero, block, writes, rows.scales + row * rows.scale_step);
      in_range = in_range && fabsf(extremes.extreme * quantizers[i].factor) <= kLargestQuotient<Format>;
    }
    if (kKeepsRange<Format> && !kConverts<Format>) in_range = __all_sync(kWholeWarp, in_range) != 0;
  } else {
#pragma unroll
    for (int i = 0; i < kOwnScales<Format>; ++i)
      quantizers[i] = {factor_of_scale<Format>(arguments[i]), 0.0f};
  }
  unsigned char* to = rows.to + Format::kCodes + block * Format::kBlockStep;
#pragma unroll
  for (int r = 0; r < kLaneRows; ++r, to += rows.step) {
    const KvQuantizer by = quantizer_of_row<Format>(quantizers, r);
    unsigned words[2];
    codes_of_lane<Element, Format>(own[r], by, in_range, words);
    refill(r);
    const unsigned fifth = fifth_bits(words);
    const int first =
        Format::kHalves ? join_halves<Format>(words) : column % Format::kBlock * Format::kBits / 8;
    if (Format::kCode == KvCode::int4) words[0] ^= 0x88888888u;
    if (r >= rows.count) continue;
    constexpr int kFifthBytes = Format::kBits == 5 ? Format::kBlock / 8 : 0;
    if (kFifthBytes > 0) to[column % Format::kBlock / 8] = static_cast<unsigned char>(fifth);
    store_lane<Format, Format::kHalves ? 4 : Format::kBits>(to + kFifthBytes + first, words);
  }
}

}  // namespace flashjit::auxiliary
