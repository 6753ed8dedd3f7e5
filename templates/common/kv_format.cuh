// Rows of K and V in a format that is decoded as tiles are loaded: codes with scales, and zero points, of
// blocks in the row, a tail of elements, a scale of the call. A rendered Problem says where each is in a row,
// as KFormat and VFormat (runtime/render/kv_format_text.cpp); all kernels decode by decode16().
#pragma once

#include "flashjit/common/kv_source.cuh"

namespace flashjit {

// By the names of include/flashjit/kv_format.hpp; a Problem is rendered with the names.
enum class KvCode : int { element, e4m3, e5m2, int8, uint8, e2m1, int4, int4_offset, uint4, uint2, book };
enum class KvNumber : int { fp32, fp16, bf16, e4m3, e8m0 };
enum class KvZero : int { none, subtracted, added };

constexpr int size_of(KvNumber type) { return type == KvNumber::fp32 ? 4 : type <= KvNumber::bf16 ? 2 : 1; }

/// Reads bytes, as many at a time as their alignment allows.
template <int kBytes, int kAlignment>
__device__ __forceinline__ void load_bytes(const unsigned char* from, unsigned (&words)[(kBytes + 3) / 4]) {
  constexpr int kStep = min(kBytes, kAlignment);
#pragma unroll
  for (unsigned& word : words) word = 0;
#pragma unroll
  for (int i = 0; i < kBytes; i += kStep) {
    if (kStep == 16) {
      const uint4 four = *reinterpret_cast<const uint4*>(from + i);
      const unsigned each[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (i / 4 + j < (kBytes + 3) / 4) words[i / 4 + j] = each[j];
    } else if (kStep == 8) {
      const uint2 two = *reinterpret_cast<const uint2*>(from + i);
      words[i / 4] = two.x;
      if (i / 4 + 1 < (kBytes + 3) / 4) words[i / 4 + 1] = two.y;
    } else if (kStep == 4) {
      words[i / 4] = *reinterpret_cast<const unsigned*>(from + i);
    } else if (kStep == 2) {
      words[i / 4] |= static_cast<unsigned>(*reinterpret_cast<const unsigned short*>(from + i)) << i % 4 * 8;
    } else {
      words[i / 4] |= static_cast<unsigned>(from[i]) << i % 4 * 8;
    }
  }
}

/// A number from its bits.
template <KvNumber kType>
__device__ __forceinline__ float number_of_bits(unsigned bits) {
  switch (kType) {
    case KvNumber::fp32:
      return __uint_as_float(bits);
    case KvNumber::fp16:
      return to_float(fp16{static_cast<unsigned short>(bits)});
    case KvNumber::bf16:
      return to_float(bf16{static_cast<unsigned short>(bits)});
    case KvNumber::e4m3:
      return to_float(e4m3{static_cast<unsigned char>(bits)});
    default:  // a power of two; 0 is 2^-127, and 255 NaN
      return __uint_as_float(bits == 0 ? 0x00400000u : bits == 255 ? 0x7fffffffu : bits << 23);
  }
}
template <KvNumber kType, int kAlignment>
__device__ __forceinline__ float load_number(const unsigned char* from) {
  unsigned bits[1];
  load_bytes<size_of(kType), kAlignment>(from, bits);
  return number_of_bits<kType>(bits[0]);
}

/// What a code means, without its scale.
template <class Format>
__device__ __forceinline__ float value_of_code(unsigned code) {
  switch (Format::kCode) {
    case KvCode::e4m3:
      return to_float(e4m3{static_cast<unsigned char>(code)});
    case KvCode::e5m2:
      return to_float(e5m2{static_cast<unsigned char>(code)});
    case KvCode::int8:
      return to_float(int8{static_cast<unsigned char>(code)});
    case KvCode::e2m1: {  // magnitudes 0, 1, 2, 3, 4, 6, 8, 12 of a half
      const unsigned magnitude = code & 7u;
      const unsigned halves = magnitude < 4 ? magnitude : (2u | (magnitude & 1u)) << ((magnitude >> 1) - 1);
      const float value = static_cast<float>(halves) * 0.5f;
      return (code & 8u) != 0 ? -value : value;
    }
    case KvCode::int4:
      return static_cast<float>(static_cast<int>(code ^ 8u) - 8);
    case KvCode::int4_offset:
      return static_cast<float>(static_cast<int>(code) - 8);
    case KvCode::book:
      return Format::book(code);
    default:
      return static_cast<float>(code);
  }
}

/// Columns of a row that are elements.
template <class Format>
__device__ __forceinline__ void load_tail16(const unsigned char* row, int column, float (&to)[16]) {
  constexpr int kSize = size_of(Format::kTailType);
  unsigned words[4 * kSize];
  load_bytes<16 * kSize, Format::kAlignment>(row + Format::kTail + (column - Format::kColumns) * kSize,
                                             words);
#pragma unroll
  for (int i = 0; i < 16; ++i)
    to[i] = number_of_bits<Format::kTailType>(kSize == 4 ? words[i] : words[i / 2] >> i % 2 * 16 & 0xffffu);
}

/// Columns [column, column + 16) of a row, which are all codes of one block or all elements. `argument` is
/// the call's scale.
template <class Format>
__device__ __forceinline__ void decode16(const unsigned char* row, int column, float argument,
                                         float (&to)[16]) {
  if (column >= Format::kColumns) return load_tail16<Format>(row, column, to);
  constexpr int kBits = Format::kBits, kAlignment = Format::kAlignment;
  constexpr int kBytes = Format::kHalves ? 16 : 2 * kBits;
  const int block = column / Format::kBlock, in_block = column % Format::kBlock;
  const bool upper_half = Format::kHalves && in_block >= Format::kBlock / 2;
  unsigned words[kBytes / 4];
  load_bytes<kBytes, kAlignment>(
      row + Format::kCodes + block * Format::kBlockStep +
          (Format::kHalves ? in_block - (upper_half ? Format::kBlock / 2 : 0) : in_block / 8 * kBits),
      words);
  const unsigned char* of_block = row + block * Format::kScaleStep;
  float scale = argument, zero = 0.0f;
  if (Format::kScalesInRow) scale *= load_number<Format::kScaleType, kAlignment>(of_block + Format::kScales);
  if (Format::kZero != KvZero::none)
    zero = load_number<Format::kScaleType, kAlignment>(of_block + Format::kZeros);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const unsigned code = Format::kHalves ? words[i / 4] >> (i % 4 * 8 + (upper_half ? 4 : 0)) & 0xfu
                                          : words[i * kBits / 32] >> i * kBits % 32 & ((1u << kBits) - 1);
    const float value = value_of_code<Format>(code);
    to[i] = Format::kZero == KvZero::added        ? value * scale + zero * argument
            : Format::kZero == KvZero::subtracted ? (value - zero) * scale
                                                  : value * scale;
  }
}

/// Eight of them as elements.
template <class Element>
__device__ __forceinline__ uint4 pack_eight(const float* x) {
  return {pack<Element>(x[0], x[1]), pack<Element>(x[2], x[3]), pack<Element>(x[4], x[5]),
          pack<Element>(x[6], x[7])};
}

template <class P>
constexpr bool kDecodesKv = requires {
  typename P::KFormat;
};

/// The keys of one head of one sequence, in K or in V, where rows are decoded.
template <class P, class Format>
class DecodedKvSource : public KvSource<P, typename Format::Stored> {
 public:
  __device__ DecodedKvSource(const Params& p, const TensorParam& tensor, const ScaleParam& scales,
                             const Sequence<P>& sequence, int h_kv, int first_key = 0)
      : KvSource<P, typename Format::Stored>(p, tensor, sequence, h_kv, first_key),
        scales_(p, scales, sequence, h_kv, first_key) {}

  /// Columns [column, column + 16) of key `kv`, which exists.
  __device__ __forceinline__ void decode16(int kv, int column, float (&to)[16]) const {
    flashjit::decode16<Format>(reinterpret_cast<const unsigned char*>(this->row(kv)), column,
                               Format::kArgument ? *scales_.of_key(kv) : 1.0f, to);
  }

 private:
  KvScales<P, Format::kArgumentOfKeys> scales_;
};

/// The sources of K and V.
template <class P, bool kDecodes = kDecodesKv<P>>
struct KvSources {
  static __device__ __forceinline__ KvSource<P> k(const Params& p, const Sequence<P>& sequence, int h_kv,
                                                  int first_key) {
    return {p, p.k, sequence, h_kv, first_key};
  }
  static __device__ __forceinline__ KvSource<P> v(const Params& p, const Sequence<P>& sequence, int h_kv,
                                                  int first_key) {
    return {p, p.v, sequence, h_kv, first_key};
  }
};
template <class P>
struct KvSources<P, true> {
  using K = DecodedKvSource<P, typename P::KFormat>;
  using V = DecodedKvSource<P, typename P::VFormat>;
  static __device__ __forceinline__ K k(const Params& p, const Sequence<P>& sequence, int h_kv,
                                        int first_key) {
    return {p, p.k, p.k_scale, sequence, h_kv, first_key};
  }
  static __device__ __forceinline__ V v(const Params& p, const Sequence<P>& sequence, int h_kv,
                                        int first_key) {
    return {p, p.v, p.v_scale, sequence, h_kv, first_key};
  }
};

}  // namespace flashjit
