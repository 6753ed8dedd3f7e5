// O as codes and their scales (kOutCodes): where the bytes of a row are, and the codes of what the lanes of a
// row have together, whose blocks' scales they find. A rendered Problem has the format as OutFormat. Lanes of
// rows that do not exist go with the others, and write nothing.
#pragma once

#include "flashjit/common/kv_encode.cuh"
#include "flashjit/common/out_scales.cuh"

namespace flashjit {

template <class P>
constexpr bool kOutCodes = requires {
  typename P::OutFormat;
};

/// Where a row's codes and the scales of its blocks go; null: there is no such row. `argument`: the scale of
/// all codes, 1 where the call has none.
struct CodedRow {
  unsigned char *codes, *scales;
  float argument, reciprocal;
};
template <class P>
__device__ __forceinline__ CodedRow coded_row(const Params& p, const Sequence<P>& sequence, int h, int q,
                                              bool exists) {
  using Format = typename P::OutFormat;
  const float argument = Format::kArgument ? __ldg(p.out_scale) : 1.0f;
  CodedRow row{nullptr, nullptr, argument, 1.0f / argument};
  if (!exists) return row;
  row.codes = sequence.template q_pointer<unsigned char>(p.o, h, q);
  row.scales = reinterpret_cast<unsigned char*>(OutScalePlace<P>::row(p, sequence, h, q));
  return row;
}

/// The largest magnitude so far, as bits, which grow as floats without a sign do, NaN's being the largest. By
/// one instruction: with integers the elements of both of a thread's rows were kept twice, and spilled.
template <int kArch>
__device__ __forceinline__ unsigned larger_magnitude(unsigned bits, float x) {
  if (kArch < 80) return max(bits, __float_as_uint(x) & 0x7fffffffu);
  return __float_as_uint(max_or_nan(__uint_as_float(bits), fabsf(x)));
}

__device__ __forceinline__ void store_number(float* to, unsigned bits) { *to = __uint_as_float(bits); }
__device__ __forceinline__ void store_number(unsigned char* to, unsigned bits) {
  *to = static_cast<unsigned char>(bits);
}

// How the scale of a block is found from the bits of its largest magnitude; BlockScale<P> names one of these.

/// As encoders of KV formats do.
template <class P>
struct AnyBlockScale {
  using Format = typename P::OutFormat;
  static __device__ __forceinline__ unsigned bits(const CodedRow& row, unsigned largest) {
    const BlockExtremes found{__uint_as_float(largest), 0, 0.0f, 0.0f, largest < 0x7f800000u};
    return symmetric_scale<Format>(found, row.argument);
  }
  static __device__ __forceinline__ float factor(float scale) { return factor_of_scale<Format>(scale); }
};
/// The same numbers for scales of e4m3; a thread finds one for four elements: by a conversion, and
/// by products in place of quotients.
template <class P>
struct ShortBlockScale {
  using Format = typename P::OutFormat;
  static __device__ __forceinline__ unsigned bits(const CodedRow& row, unsigned largest) {
    constexpr float kLargest = Format::kLargest;
    const float magnitude = nearest_quotient(__uint_as_float(largest), row.argument, row.reciprocal);
    const float scale = nearest_quotient(magnitude, kLargest, 1.0f / kLargest);
    const unsigned bits = pair_of_e4m3(fminf(fmaxf(scale, 0.001953125f), 448.0f), 0.0f) & 0xffu;
    return largest >= 0x7f800000u ? 0x7fu : magnitude == 0.0f ? 0x38u : bits;
  }
  static __device__ __forceinline__ float factor(float scale) { return nearest_reciprocal(scale); }
};
/// Problems of sm90, which have kTmaStoresO; with mma.sync registers do not suffice for it.
template <class P>
constexpr bool kShortBlockScales = P::OutFormat::kScaleType == KvNumber::e4m3 &&
                                   (P::kArch >= 89) && requires {
  P::kTmaStoresO;
};
template <class P>
using BlockScale = Conditional<kShortBlockScales<P>, ShortBlockScale<P>, AnyBlockScale<P>>;

/// What elements of a block are multiplied with, from the bits of its largest magnitude, which all its lanes
/// have. The lane that `writes` writes the block's scale.
template <class P>
__device__ __forceinline__ float factor_of_block(const CodedRow& row, int block, unsigned largest,
                                                 bool writes) {
  using Format = typename P::OutFormat;
  if (!Format::kBlockScales) return factor_of_scale<Format>(row.argument);
  const unsigned bits = BlockScale<P>::bits(row, largest);
  if (writes && row.scales != nullptr)
    store_number(
        reinterpret_cast<typename Format::StoredScale*>(row.scales) + OutScalePlace<P>::of_block(block),
        bits);
  return BlockScale<P>::factor(number_of_bits<Format::kScaleType>(bits) * row.argument);
}

/// The codes of two neighbouring columns, the first in the lower bits.
template <class Format, int kArch>
__device__ __forceinline__ unsigned code_pair(float x, float y) {
  if (Format::kCode == KvCode::e4m3 && kArch >= 89) return pair_of_e4m3(x, y);
  if (kHasSmallFloats<Format>) return e2m1_by_sums(x) | e2m1_by_sums(y) << Format::kBits;
  return code_of_value<Format>(x) | code_of_value<Format>(y) << Format::kBits;
}

/// The codes of four chunks of eight columns: each of the four lanes of a row has a pair of each chunk, as
/// accumulators lie, and stores one chunk. `count`: chunks that there are. By kBits.
template <int kBits>
struct ChunkCodes;
template <>
struct ChunkCodes<8> {
  static __device__ __forceinline__ void store(unsigned char* to, const unsigned (&pairs)[4], int count) {
    const int part = static_cast<int>(threadIdx.x) % 4;
    const bool odd = part % 2 != 0, late = part / 2 != 0;
    const unsigned low = pairs[0] | pairs[1] << 16, high = pairs[2] | pairs[3] << 16;
    const unsigned keep = late ? high : low, got = __shfl_xor_sync(kWholeWarp, late ? low : high, 2);
    const unsigned own = select_bytes(keep, got, odd ? 0x7632 : 0x5410);
    const unsigned other = __shfl_xor_sync(kWholeWarp, select_bytes(keep, got, odd ? 0x5410 : 0x7632), 1);
    const unsigned first = select_bytes(own, other, odd ? 0x1054 : 0x5410),
                   second = select_bytes(own, other, odd ? 0x3276 : 0x7632);
    if (to != nullptr && part < count)
      store_global(to + part * 8, late ? uint2{second, first} : uint2{first, second});
  }
};
template <>
struct ChunkCodes<4> {
  static __device__ __forceinline__ void store(unsigned char* to, const unsigned (&pairs)[4], int count) {
    const int part = static_cast<int>(threadIdx.x) % 4;
    const unsigned all = pairs[0] | pairs[1] << 8 | pairs[2] << 16 | pairs[3] << 24;
    const unsigned over = __shfl_xor_sync(kWholeWarp, all, 2);
    const unsigned halves = select_bytes(all, over, part / 2 != 0 ? 0x7632 : 0x5410);
    const unsigned beside = __shfl_xor_sync(kWholeWarp, halves, 1);
    const int order = part == 0 ? 0x6240 : part == 1 ? 0x3715 : part == 2 ? 0x4062 : 0x1537;
    if (to != nullptr && part < count)
      *reinterpret_cast<unsigned*>(to + part * 4) = select_bytes(halves, beside, order);
  }
};

/// Stores a thread's values of one of its two rows of an accumulator, o[chunk * 4 + half * 2] and the next:
/// of all columns, or of so many `chunks` of eight, whole blocks, from `first` on. By whole warps.
template <class P, int kHalf, int kCount>
__device__ __forceinline__ void store_codes(const CodedRow& row, const float (&o)[kCount], int first = 0,
                                            int chunks = kCount / 4) {
  using Format = typename P::OutFormat;
  constexpr int kChunks = kCount / 4, kBlockChunks = Format::kBlockScales ? Format::kBlock / 8 : kChunks;
  static_assert(kChunks * 8 <= Format::kColumns && kChunks % kBlockChunks == 0);
  const int part = static_cast<int>(threadIdx.x) % 4;
  unsigned pairs[4] = {};
#pragma unroll
  for (int block = 0; block < kChunks / kBlockChunks; ++block) {
    unsigned largest = 0;
#pragma unroll
    for (int n = 0; n < (Format::kBlockScales ? 2 * kBlockChunks : 0); ++n)
      largest =
          larger_magnitude<P::kArch>(largest, o[(block * kBlockChunks + n / 2) * 4 + kHalf * 2 + n % 2]);
    largest = max(largest, __shfl_xor_sync(kWholeWarp, largest, 1));
    largest = max(largest, __shfl_xor_sync(kWholeWarp, largest, 2));
    const float factor = factor_of_block<P>(row, first / kBlockChunks + block, largest,
                                            part == block % 4 && block * kBlockChunks < chunks);
#pragma unroll
    for (int n = 0; n < kBlockChunks; ++n) {
      const int chunk = block * kBlockChunks + n, at = chunk * 4 + kHalf * 2;
      pairs[chunk % 4] = code_pair<Format, P::kArch>(o[at] * factor, o[at + 1] * factor);
      if (chunk % 4 == 3 || chunk == kChunks - 1)
        ChunkCodes<Format::kBits>::store(
            row.codes == nullptr ? nullptr : row.codes + (first + chunk / 4 * 4) * Format::kBits, pairs,
            chunks - chunk / 4 * 4);
    }
  }
}

/// Stores a row. Each of kLanes neighbouring lanes has four of its columns from (lane + kLanes * i) * 4 on,
/// in x[i]. By whole warps.
template <class P, int kLanes, int kCount>
__device__ __forceinline__ void store_codes_of_lanes(const CodedRow& row, const float4 (&x)[kCount]) {
  using Format = typename P::OutFormat;
  constexpr bool kOfRow = Format::kBlock == Format::kColumns;
  constexpr int kBlockLanes = kOfRow ? kLanes : Format::kBlock / 4;
  static_assert(kBlockLanes <= kLanes);
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  unsigned largest[kCount] = {};
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const bool exists = (lane + kLanes * i) * 4 < Format::kColumns;
    unsigned& of_block = largest[kOfRow ? 0 : i];
    for (const float value : {x[i].x, x[i].y, x[i].z, x[i].w})
      if (exists) of_block = larger_magnitude<P::kArch>(of_block, value);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int column = (lane + kLanes * i) * 4;
    unsigned& of_block = largest[kOfRow ? 0 : i];
#pragma unroll
    for (int lanes = kBlockLanes / 2; lanes > 0; lanes /= 2)
      if (!kOfRow || i == 0) of_block = max(of_block, __shfl_xor_sync(kWholeWarp, of_block, lanes));
    if (row.codes == nullptr || column >= Format::kColumns) continue;
    const float factor =
        factor_of_block<P>(row, column / Format::kBlock, of_block, column % Format::kBlock == 0);
    const unsigned low = code_pair<Format, P::kArch>(x[i].x * factor, x[i].y * factor),
                   high = code_pair<Format, P::kArch>(x[i].z * factor, x[i].w * factor);
    unsigned char* to = row.codes + column * Format::kBits / 8;
    if (Format::kBits == 8)
      *reinterpret_cast<unsigned*>(to) = low | high << 16;
    else
      *reinterpret_cast<unsigned short*>(to) = static_cast<unsigned short>(low | high << 8);
  }
}

/// A row by one thread, from value_at(column): of rows without keys, which are few.
template <class P, class ValueAt>
__device__ __forceinline__ void store_codes_of_thread(const CodedRow& row, const ValueAt& value_at) {
  using Format = typename P::OutFormat;
  constexpr int kOfByte = 8 / Format::kBits;
#pragma unroll 1
  for (int first = 0; first < Format::kColumns; first += Format::kBlock) {
    unsigned largest = 0;
#pragma unroll 1
    for (int column = 0; Format::kBlockScales && column < Format::kBlock; ++column)
      largest = larger_magnitude<P::kArch>(largest, value_at(first + column));
    const float factor = factor_of_block<P>(row, first / Format::kBlock, largest, true);
#pragma unroll 1
    for (int column = first; column < first + Format::kBlock; column += kOfByte) {
      unsigned codes = 0;
      for (int n = 0; n < kOfByte; ++n)
        codes |= code_of_value<Format>(value_at(column + n) * factor) << n * Format::kBits;
      row.codes[column / kOfByte] = static_cast<unsigned char>(codes);
    }
  }
}

}  // namespace flashjit
