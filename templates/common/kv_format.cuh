// Rows of K and V in a format that is decoded as tiles are loaded: codes with scales, and zero points, of
// blocks, in the row or in a row of another tensor, a tail of elements, a scale of the call. A rendered
// Problem says where each is in a row, as KFormat and VFormat (runtime/render/kv_format_text.cpp); kernels
// decode by decode16(), from the sources of common/decoded_kv.cuh, and sm90 by its two halves,
// load_codes16() and elements_of_codes16().
#pragma once

#include "flashjit/common/element.cuh"
#include "flashjit/common/ptx.cuh"

namespace flashjit {

// By the names of include/flashjit/kv_format.hpp; a Problem is rendered with the names.
enum class KvCode : int {
  element,
  e4m3,
  e5m2,
  int8,
  uint8,
  e2m1,
  int4,
  int4_offset,
  uint4,
  uint2,
  int5_offset,
  uint5,
  uint3,
  book
};
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

/// The same where bytes around may be read, as in shared memory: words at multiples of four, shifted.
template <int kWords>
__device__ __forceinline__ void load_shifted(const unsigned char* from, unsigned (&words)[kWords]) {
  const int ahead = static_cast<int>(reinterpret_cast<unsigned long long>(from) & 3u);
  const auto* whole = reinterpret_cast<const unsigned*>(from - ahead);
  unsigned low = whole[0];
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const unsigned high = whole[i + 1];
    words[i] = select_bytes(low, high, 0x3210 + ahead * 0x1111);
    low = high;
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

/// One of 16 numbers that load_bytes() has read.
template <KvNumber kType, int kWords>
__device__ __forceinline__ float number_of_words(const unsigned (&words)[kWords], int i) {
  constexpr int kBits = 8 * size_of(kType);
  const unsigned word = words[i * kBits / 32] >> i * kBits % 32;
  return number_of_bits<kType>(kBits == 32 ? word : word & ((1u << kBits % 32) - 1));
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
    case KvCode::int5_offset:
      return static_cast<float>(static_cast<int>(code) - 16);
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
  for (int i = 0; i < 16; ++i) to[i] = number_of_words<Format::kTailType>(words, i);
}

template <class Format>
constexpr int kLowestCode = Format::kCode == KvCode::int8                                           ? -128
                            : Format::kCode == KvCode::int4 || Format::kCode == KvCode::int4_offset ? -8
                            : Format::kCode == KvCode::int5_offset                                  ? -16
                                                                                                    : 0;
/// A zero point that is an integer, from a word of these.
template <class Format>
__device__ __forceinline__ float integer_zero(unsigned word, int shift) {
  return static_cast<float>(kLowestCode<Format> +
                            static_cast<int>(word >> shift & ((1u << Format::kZeroBits) - 1)));
}
/// Formats whose elements are an expression of code, scale and zero point: codes' values are the codes.
template <class Format>
concept DecodesByExpression = requires {
  Format::decoded(0, 0.0f, 0.0f);
};
/// A value times its scale, with the zero point.
template <DecodesByExpression Format>
__device__ __forceinline__ float scaled(float value, float scale, float zero) {
  return Format::decoded(static_cast<int>(value), scale, zero);
}
template <class Format>
__device__ __forceinline__ float scaled(float value, float scale, float zero) {
  return Format::kZero == KvZero::added        ? value * scale + zero
         : Format::kZero == KvZero::subtracted ? (value - zero) * scale
                                               : value * scale;
}

/// Codes of 16 columns of a row, and what they are multiplied with.
template <class Format>
struct KvCodes16 {
  static constexpr int kBits = Format::kHalves ? 8 : Format::kBits;  ///< from a code to the next
  static constexpr int kWords = (kBits + 1) / 2;
  unsigned words[kWords];
  float scale, zero;

  __device__ __forceinline__ unsigned code(int i) const {
    const int word = i * kBits / 32, shift = i * kBits % 32;
    unsigned bits = words[word] >> shift;
    if (32 % kBits != 0 && shift + kBits > 32) bits |= words[min(word + 1, kWords - 1)] << (32 - shift);
    return bits & ((1u << Format::kBits) - 1);
  }
};

/// Adds the fifth bits of 16 codes in halves, which are before all codes of the block.
template <class Format, int kWords>
__device__ __forceinline__ void add_fifth_bits(const unsigned char* of_block, int in_block,
                                               unsigned (&words)[kWords]) {
  unsigned bits[1];
  load_bytes<2, min(Format::kAlignment, 2)>(of_block + in_block / 8, bits);
#pragma unroll
  for (int i = 0; i < kWords; ++i)  // each of four bits becomes bit 4 of a byte
    words[i] |= (bits[0] >> 4 * i & 15u) * 0x02040810u & 0x10101010u;
}

/// The codes of columns [column, column + 16), which are of one block. `scales` is the row that has scales:
/// `row`, or another tensor's; `argument` is the call's scale; kAround: bytes around the row may be read.
template <class Format, bool kAround = false>
__device__ __forceinline__ void load_codes16(const unsigned char* row, const unsigned char* scales,
                                             int column, float argument, KvCodes16<Format>& to) {
  constexpr int kBits = Format::kBits, kAlignment = Format::kAlignment;
  const int block = column / Format::kBlock, in_block = column % Format::kBlock;
  const bool upper_half = Format::kHalves && in_block >= Format::kBlock / 2;
  constexpr int kFifthBits = Format::kHalves && kBits == 5 ? Format::kBlock / 8 : 0;  // bytes
  const unsigned char* of_codes = row + Format::kCodes + block * Format::kBlockStep;
  const unsigned char* first =
      of_codes + kFifthBits +
      (Format::kHalves ? in_block - (upper_half ? Format::kBlock / 2 : 0) : in_block / 8 * kBits);
  constexpr int kBytes = 2 * KvCodes16<Format>::kBits, kCodeAlignment = min(kAlignment, kBytes & -kBytes);
  if (kAround && kCodeAlignment < 4)
    load_shifted(first, to.words);
  else
    load_bytes<kBytes, kCodeAlignment>(first, to.words);
  if (Format::kHalves)
#pragma unroll
    for (unsigned& word : to.words) word = word >> (upper_half ? 4 : 0) & 0x0f0f0f0fu;
  if (kFifthBits > 0) add_fifth_bits<Format>(of_codes, in_block, to.words);
  const unsigned char* of_block = scales + block * Format::kScaleStep;
  to.scale = argument, to.zero = 0.0f;
  if (Format::kBlockScales)
    to.scale *= load_number<Format::kScaleType, Format::kScaleAlignment>(of_block + Format::kScales);
  if (Format::kBlockScales && Format::kZero != KvZero::none && Format::kZeroBits == 0)
    to.zero = load_number<Format::kScaleType, Format::kScaleAlignment>(of_block + Format::kZeros);
  if (Format::kBlockScales && Format::kZeroBits > 0) {
    const int bit = block * Format::kZeroStep;
    to.zero = integer_zero<Format>(scales[Format::kZeros + bit / 8], bit % 8);
  }
  if (Format::kZero == KvZero::added) to.zero *= argument;
}

/// Columns [column, column + 16) of a row, which are all codes of one block or all elements. `scales` and
/// `argument` are as of load_codes16().
template <class Format>
__device__ __forceinline__ void decode16(const unsigned char* row, const unsigned char* scales, int column,
                                         float argument, float (&to)[16]) {
  if (column >= Format::kColumns) return load_tail16<Format>(row, column, to);
  KvCodes16<Format> codes;
  load_codes16(row, scales, column, argument, codes);
#pragma unroll
  for (int i = 0; i < 16; ++i)
    to[i] = scaled<Format>(value_of_code<Format>(codes.code(i)), codes.scale, codes.zero);
}

/// Eight of them as elements.
template <class Element>
__device__ __forceinline__ uint4 pack_eight(const float* x) {
  return {pack<Element>(x[0], x[1]), pack<Element>(x[2], x[3]), pack<Element>(x[4], x[5]),
          pack<Element>(x[6], x[7])};
}

// --- Codes as pairs of elements ---------------------------------------------------------------------------

/// Codes that are floats of a sign and three bits.
template <class Format>
constexpr bool kHasSmallFloats = Format::kCode == KvCode::e2m1;

// Two codes at a time become 16-bit floats, which have all of them exactly, by the bits of these; the values
// of a book of 16 are rounded to these.
template <class Format>
constexpr bool kHasPairs = Format::kCode == KvCode::book ? Format::kBits == 4 : Format::kBits <= 8;

/// A format whose reader multiplies results with the call's scale of a head, and with kUnit: e2m1 with scales
/// of e4m3 is then one product away from its bits. A tail has neither.
template <class Format>
struct OfHead : Format {
  static constexpr bool kWhole = Format::kColumns == Format::kDim;
  static constexpr bool kArgument = Format::kArgument && (Format::kArgumentOfKeys || !kWhole);
  static constexpr bool kArgumentOfHead = Format::kArgument && !kArgument;
  static constexpr bool kSmall = Format::kCode == KvCode::e2m1 && Format::kZero == KvZero::none &&
                                 Format::kBlockScales && Format::kScaleType == KvNumber::e4m3 && !kArgument &&
                                 kWhole;
  static constexpr float kUnit = kSmall ? 256.0f : 1.0f;
};
template <class Format>
constexpr bool kIsSmall = false;
template <class Format>
constexpr bool kIsSmall<OfHead<Format>> = OfHead<Format>::kSmall;

/// Constants of a type of 16 bits: 2^(bits of the significand), in whose last bits a code is; how far and
/// where the magnitude of e2m1 goes, and what it is multiplied with there; divided by OfHead's kUnit.
template <class Element>
struct CodeBits {
  static constexpr unsigned kOffset = 0x43004300u, kOne = 0x3f803f80u;
  static constexpr unsigned kE2m1Mask = 0x01c001c0u, kE2m1Factor = 0x7e807e80u;
  static constexpr float kSmallFactor = 0x1p118f;
  static constexpr int kE2m1Shift = 6;
};
template <>
struct CodeBits<fp16> {
  static constexpr unsigned kOffset = 0x64006400u, kOne = 0x3c003c00u;
  static constexpr unsigned kE2m1Mask = 0x0e000e00u, kE2m1Factor = 0x74007400u;
  static constexpr float kSmallFactor = 0x1p6f;
  static constexpr int kE2m1Shift = 3;
};
constexpr unsigned kNoAddend = 0x80008000u;  // -0, which changes nothing

/// Two bytes of a word, from `byte` on, with the upper bytes of an offset.
template <class Element>
__device__ __forceinline__ unsigned pair_of_bytes(unsigned word, int byte) {
  return select_bytes(word, CodeBits<Element>::kOffset, byte | (byte + 1) << 8 | 0x5050);
}
/// Codes 2i and 2i + 1 of 4 bits, or of 5 in halves, as integers, which begin with -kBias.
template <class Element, class Format, unsigned kBias>
__device__ __forceinline__ unsigned pair_of_integers(const KvCodes16<Format>& codes, int i) {
  using Bits = CodeBits<Element>;
  constexpr unsigned kFlipped = Format::kCode == KvCode::int4 ? 0x08080808u : 0u;
  unsigned pair;
  if (Format::kHalves) {
    pair = pair_of_bytes<Element>(codes.words[i / 2] ^ kFlipped, i % 2 * 2);
  } else {
    const unsigned word = codes.words[i / 4], even = (word & 0x0f0f0f0fu) ^ kFlipped,
                   odd = (word >> 4 & 0x0f0f0f0fu) ^ kFlipped;
    pair = (select_bytes(even, odd, i % 4 * 0x1111 + 0x4400) & 0x00ff00ffu) | Bits::kOffset;
  }
  return fma_pair<Element>(pair, Bits::kOne, (Bits::kOffset | kBias * 0x10001u) ^ 0x80008000u);
}
/// Codes 2i and 2i + 1 of 2 bits as integers.
template <class Element, class Format>
__device__ __forceinline__ unsigned pair_of_uint2(const KvCodes16<Format>& codes, int i) {
  using Bits = CodeBits<Element>;
  const unsigned word = codes.words[0];
  const unsigned upper = i < 4 ? word << (14 - 4 * i) : word >> (4 * i - 14);
  const unsigned pair = (word >> 4 * i & 0x3u) | (upper & 0x30000u) | Bits::kOffset;
  return fma_pair<Element>(pair, Bits::kOne, Bits::kOffset ^ 0x80008000u);
}
/// Codes 2i and 2i + 1 of 3 or 5 bits, one after the other, as integers, which begin with -kBias.
template <class Element, class Format, unsigned kBias>
__device__ __forceinline__ unsigned pair_of_neighbors(const KvCodes16<Format>& codes, int i) {
  using Bits = CodeBits<Element>;
  const unsigned pair = codes.code(2 * i) | codes.code(2 * i + 1) << 16 | Bits::kOffset;
  return fma_pair<Element>(pair, Bits::kOne, (Bits::kOffset | kBias * 0x10001u) ^ 0x80008000u);
}
template <class Element, class Format>
__device__ __forceinline__ unsigned pair_of_e2m1(const KvCodes16<Format>& codes, int i) {
  using Bits = CodeBits<Element>;
  const unsigned word = codes.words[Format::kHalves ? i / 2 : i / 4];
  const unsigned upper = Format::kHalves
                             ? select_bytes(word << 4, 0u, i % 2 * 0x2222 + 0x1100)
                             : select_bytes(word << 4, word, i % 4 * 0x1111 + 0x4400);  // bits 12 to 15
  const unsigned bits = (upper & 0x80008000u) | (upper >> Bits::kE2m1Shift & Bits::kE2m1Mask);
  return kIsSmall<Format> ? bits : fma_pair<Element>(bits, Bits::kE2m1Factor, kNoAddend);
}
/// Four bytes of a table of 16, by indices whose upper bits `upper` has as bytes.
__device__ __forceinline__ unsigned bytes_of_table(const unsigned (&table)[4], unsigned lower,
                                                   unsigned upper) {
  return (select_bytes(table[0], table[1], lower) & ~upper) |
         (select_bytes(table[2], table[3], lower) & upper);
}
/// Codes 2i and 2i + 1 of a book of 16 values: their elements' bytes are selected from the bytes of the book.
template <class Element, class Format>
__device__ __forceinline__ unsigned pair_of_book(const KvCodes16<Format>& codes, int i) {
  unsigned low[4], high[4];  // bytes of the 16 elements
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    const auto pair = [&](int at) {
      return pack<Element>(Format::book(word * 4 + at), Format::book(word * 4 + at + 1));
    };
    low[word] = select_bytes(pair(0), pair(2), 0x6420);
    high[word] = select_bytes(pair(0), pair(2), 0x7531);
  }
  unsigned indices, upper;  // of four codes
  if (Format::kHalves) {
    const unsigned word = codes.words[i / 2];
    indices = select_bytes(word | word >> 4, 0u, 0x4420);
    upper = select_bytes(word << 4, 0u, 0xba98);
  } else {
    const unsigned word = codes.words[i / 4];
    indices = word >> i / 2 % 2 * 16;
    upper = select_bytes(word << 4, word, i / 2 % 2 == 0 ? 0xd9c8 : 0xfbea);
  }
  indices &= 0x7777u;
  return select_bytes(bytes_of_table(low, indices, upper), bytes_of_table(high, indices, upper),
                      i % 2 == 0 ? 0x5140 : 0x7362);
}
/// Values of codes 2i and 2i + 1 of a book of 4 or 8: their bytes are selected from the bytes of the book's
/// floats. Bytes that are zero in all floats need no instruction.
template <class Format>
__device__ __forceinline__ void values_of_small_book(const KvCodes16<Format>& codes, int i, float& low,
                                                     float& high) {
  const unsigned indices = codes.code(2 * i) | codes.code(2 * i + 1) << 4;
  unsigned bytes[4];
#pragma unroll
  for (int byte = 0; byte < 4; ++byte) {
    unsigned table[2] = {};
#pragma unroll
    for (int at = 0; at < min(1 << Format::kBits, 8); ++at)
      table[at / 4] |= (__float_as_uint(Format::book(at)) >> 8 * byte & 0xffu) << at % 4 * 8;
    bytes[byte] = (table[0] | table[1]) == 0 ? 0u : select_bytes(table[0], table[1], indices);
  }
  const unsigned lower = select_bytes(bytes[0], bytes[1], 0x5140),
                 upper = select_bytes(bytes[2], bytes[3], 0x5140);
  low = __uint_as_float(select_bytes(lower, upper, 0x5410));
  high = __uint_as_float(select_bytes(lower, upper, 0x7632));
}
/// Codes 2i and 2i + 1 of 8 bits, as fp16.
template <class Format>
__device__ __forceinline__ unsigned pair_of_8bit(const KvCodes16<Format>& codes, int i) {
  const unsigned word = codes.words[i / 2];
  const auto of = [&](auto code) {
    using Code = decltype(code);
    return i % 2 ? fp16_of_upper_codes<Code>(word) : fp16_of_codes<Code>(word);
  };
  if (Format::kCode == KvCode::e4m3) return of(e4m3{});
  if (Format::kCode == KvCode::e5m2) return of(e5m2{});
  if (Format::kCode == KvCode::int8) return of(int8{});
  using Bits = CodeBits<fp16>;
  return fma_pair<fp16>(pair_of_bytes<fp16>(word, i % 2 * 2), Bits::kOne, Bits::kOffset ^ 0x80008000u);
}
template <class Format, class Element>
using PairElement = Conditional<Format::kBits == 8, fp16, Element>;
/// Codes 2i and 2i + 1 as PairElement<Format, Element>.
template <class Element, class Format>
__device__ __forceinline__ unsigned code_pair(const KvCodes16<Format>& codes, int i) {
  if (Format::kBits == 8) return pair_of_8bit(codes, i);
  if (Format::kCode == KvCode::e2m1) return pair_of_e2m1<Element>(codes, i);
  if (Format::kCode == KvCode::book) return pair_of_book<Element>(codes, i);
  if (Format::kCode == KvCode::uint4) return pair_of_integers<Element, Format, 0>(codes, i);
  if (Format::kCode == KvCode::uint2) return pair_of_uint2<Element>(codes, i);
  constexpr unsigned kBias = Format::kCode == KvCode::int5_offset ? 16 : Format::kBits == 4 ? 8 : 0;
  if (Format::kBits == 4 || Format::kHalves) return pair_of_integers<Element, Format, kBias>(codes, i);
  return pair_of_neighbors<Element, Format, kBias>(codes, i);
}

/// Their values.
template <class Element, class Format>
__device__ __forceinline__ void values_of_pair(const KvCodes16<Format>& codes, int i, float& low,
                                               float& high) {
  if (kHasPairs<Format>) {
    using Pair = PairElement<Format, Element>;
    const unsigned pair = code_pair<Element>(codes, i);
    low = low_of<Pair>(pair), high = high_of<Pair>(pair);
  } else if (Format::kBits < 4) {
    values_of_small_book(codes, i, low, high);
  } else {
    low = value_of_code<Format>(codes.code(2 * i)), high = value_of_code<Format>(codes.code(2 * i + 1));
  }
}

/// Whether an element type has all scales of a format.
template <class Format, class Element>
constexpr bool kHoldsScales =
    !Format::kArgument && (Format::kScaleType == KvNumber::e4m3 ||
                           Format::kScaleType == (kIsFp16<Element> ? KvNumber::fp16 : KvNumber::bf16) ||
                           (!kIsFp16<Element> && Format::kScaleType == KvNumber::e8m0));
/// Whether pairs of codes are multiplied as elements; else as fp32, which has what fp16 has no exponents for.
template <class Format, class Element>
constexpr bool kScalesPairs =
    kHasPairs<Format>&& Format::kBits != 8 && Format::kZero == KvZero::none && !DecodesByExpression<Format> &&
    (!kIsFp16<Element> || kHoldsScales<Format, Element>);

/// Sixteen codes as elements, each rounded once, or of pairs with scales in two parts, nearly so.
template <class Element, class Format>
__device__ __forceinline__ void elements_of_codes16(const KvCodes16<Format>& codes, uint4 (&to)[2]) {
  unsigned pairs[8];
  const float factor = kIsSmall<Format> ? codes.scale * CodeBits<Element>::kSmallFactor : codes.scale;
  const unsigned scale = pack<Element>(factor, factor);
  const float rest = factor - low_of<Element>(scale);
  const unsigned low_part = pack<Element>(rest, rest);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (kScalesPairs<Format, Element>) {
      const unsigned pair = code_pair<Element>(codes, i);
      const unsigned added =
          kHoldsScales<Format, Element> ? kNoAddend : fma_pair<Element>(pair, low_part, kNoAddend);
      pairs[i] = fma_pair<Element>(pair, scale, added);
      continue;
    }
    float low, high;
    values_of_pair<Element>(codes, i, low, high);
    pairs[i] = pack<Element>(scaled<Format>(low, codes.scale, codes.zero),
                             scaled<Format>(high, codes.scale, codes.zero));
  }
  to[0] = {pairs[0], pairs[1], pairs[2], pairs[3]};
  to[1] = {pairs[4], pairs[5], pairs[6], pairs[7]};
}

/// Sixteen columns of a row's tail as elements.
template <class Element, class Format>
__device__ __forceinline__ void tail_elements16(const unsigned char* row, int column, uint4 (&to)[2]) {
  if (Format::kTailType == (kIsFp16<Element> ? KvNumber::fp16 : KvNumber::bf16)) {
    unsigned words[8];
    load_bytes<32, Format::kAlignment>(row + Format::kTail + (column - Format::kColumns) * 2, words);
    to[0] = {words[0], words[1], words[2], words[3]};
    to[1] = {words[4], words[5], words[6], words[7]};
  } else {
    float x[16];
    load_tail16<Format>(row, column, x);
    to[0] = pack_eight<Element>(x);
    to[1] = pack_eight<Element>(x + 8);
  }
}

/// Columns [column, column + 16) of a row as elements, see decode16() above.
template <class Element, class Format>
__device__ __forceinline__ void decode16(const unsigned char* row, const unsigned char* scales, int column,
                                         float argument, uint4 (&to)[2]) {
  if (column >= Format::kColumns) return tail_elements16<Element, Format>(row, column, to);
  KvCodes16<Format> codes;
  load_codes16(row, scales, column, argument, codes);
  elements_of_codes16<Element>(codes, to);
}

}  // namespace flashjit
