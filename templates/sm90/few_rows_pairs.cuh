// Codes of K and V as pairs for mma.sync, for few_rows_codes.cuh: what a lane's words of a group of 32
// columns become, and which columns these are.
#pragma once

#include "flashjit/sm90/forward_policy.cuh"

namespace flashjit::sm90 {

// --- Instructions -----------------------------------------------------------------------------------------

/// An 8 x 8 matrix of 16-bit elements in mma's register layout, transposed.
__device__ __forceinline__ unsigned transposed_matrix(unsigned word) {
  unsigned y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(word));
  return y;
}
/// x & mask ^ flipped, as one instruction: of two constants ptxas makes two.
__device__ __forceinline__ unsigned masked_and_flipped(unsigned x, unsigned mask, unsigned flipped) {
  unsigned y;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(y) : "r"(x), "r"(mask), "r"(flipped));
  return y;
}

/// P^T of two keys as a right operand.
template <class Element>
__device__ __forceinline__ unsigned weights_of_keys(float x, float y) {
  return transposed_matrix(pack<Element>(x, y));
}

// --- Columns ----------------------------------------------------------------------------------------------

// Which columns of a group of 32 a lane has. read_q(): Q's in the order of K's pairs; of_tile(): the first of
// two neighbours that a tile of O has of V's.

/// Eight in turn, where a pair has columns that are four apart.
struct EightInTurn {
  static __device__ __forceinline__ void read_q(const char* tile, int lane, int group, unsigned (&to)[4]) {
    const uint4 eight =
        *reinterpret_cast<const uint4*>(tile + chunk_offset<kFewRows>(lane / 4, group * 4 + lane % 4));
    to[0] = select_bytes(eight.x, eight.z, 0x5410), to[1] = select_bytes(eight.x, eight.z, 0x7632);
    to[2] = select_bytes(eight.y, eight.w, 0x5410), to[3] = select_bytes(eight.y, eight.w, 0x7632);
  }
  static __device__ __forceinline__ int of_tile(int lane, int tile) {
    return tile / 2 * 32 + lane / 4 * 4 + tile % 2 * 2;
  }
};
/// Four of each half of a group, whose pairs are neighbours, or two apart.
template <bool kNeighbors>
struct FourOfHalves {
  static __device__ __forceinline__ void read_q(const char* tile, int lane, int group, unsigned (&to)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int chunk = group * 4 + half * 2 + lane % 4 / 2;
      const uint2 four =
          *reinterpret_cast<const uint2*>(tile + chunk_offset<kFewRows>(lane / 4, chunk) + lane % 2 * 8);
      to[2 * half] = kNeighbors ? four.x : select_bytes(four.x, four.y, 0x5410);
      to[2 * half + 1] = kNeighbors ? four.y : select_bytes(four.x, four.y, 0x7632);
    }
  }
  static __device__ __forceinline__ int of_tile(int lane, int tile) {
    return tile / 2 * 32 + tile % 2 * 16 + lane / 4 * 2;
  }
};
/// Sixteen of each 64 columns, in tiles of whole codes.
struct SixteenOf64 {
  static __device__ __forceinline__ void read_q(const char* tile, int lane, int group, unsigned (&to)[4]) {
    const int chunk = group / 2 * 8 + lane % 4 * 2 + group % 2;
    const uint4 eight = *reinterpret_cast<const uint4*>(tile + chunk_offset<kFewRows>(lane / 4, chunk));
    to[0] = eight.x, to[1] = eight.y, to[2] = eight.z, to[3] = eight.w;
  }
  static __device__ __forceinline__ int of_tile(int lane, int tile) {
    return tile / 4 * 64 + lane / 8 * 16 + tile % 4 * 4 + lane / 4 % 2 * 2;
  }
};

// --- Pairs of codes ---------------------------------------------------------------------------------------

// How a lane's words of a group become pairs. `Element`: what these are multiplied as; kOffset: what they are
// too large by; kOfOnes: how often sums of ones are taken off; kUnit: what products of K lack; kScalesSums: a
// scale is of a whole group of 32 columns.

/// Integers of 4 bits, in halves with columns that are sixteen apart in a byte, or of 2 bits, four in each
/// half of a word. fp16 where keys share scales, with which elements are made.
template <class P, class Format, bool kOfK>
struct IntegerOperands {
  using Element = Conditional<(Format::kKeys > 0), fp16, typename P::Element>;
  using Columns = Conditional<Format::kHalves, FourOfHalves<false>, EightInTurn>;
  static constexpr int kWords = 1;
  static constexpr float kUnit = 1.0f;
  static constexpr bool kSigned = Format::kCode == KvCode::int4, kScalesSums = true;
  static constexpr unsigned kBias = Format::kCode == KvCode::uint4 || Format::kBits == 2 ? 0u : 8u;
  static constexpr unsigned kOffsetPair = CodeBits<Element>::kOffset | kBias * 0x10001u;
  static constexpr float kOffset = (kIsFp16<Element> ? 1024.0f : 128.0f) + static_cast<float>(kBias);
  static constexpr float kOfOnes = Format::kZero == KvZero::none ? kOffset : 1.0f;

  static __device__ __forceinline__ void pairs(const unsigned (&words)[1], unsigned (&to)[4]) {
    constexpr unsigned kFlipped = CodeBits<Element>::kOffset ^ (kSigned ? 0x00080008u : 0u);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int place = Format::kHalves ? i / 2 + i % 2 * 2 : i;
      constexpr unsigned kMask = Format::kBits == 2 ? 0x00030003u : 0x000f000fu;
      to[i] = masked_and_flipped(words[0] >> Format::kBits * place, kMask, kFlipped);
    }
  }
};
/// Signs and magnitudes: as bits they are far below what they mean, which sums over K are multiplied with.
/// Beside scales of e4m3 fp16 has all products; P times other scales it may not have.
template <class P, class Format, bool kOfK>
struct SmallFloatOperands {
  using Columns = EightInTurn;
  static constexpr int kWords = 1;
  static constexpr bool kScalesSums = Format::kBlock >= 32;
  using Element = Conditional<kScalesSums && !kOfK, typename P::Element, fp16>;
  using Bits = CodeBits<Element>;
  static constexpr float kOffset = 0.0f, kOfOnes = 0.0f, kUnit = kScalesSums && kOfK ? 0x1p14f : 1.0f;

  static __device__ __forceinline__ void pairs(const unsigned (&words)[1], unsigned (&to)[4]) {
    if (kOfK)
      bits(words[0], to);
    else
      pairs(words, Bits::kE2m1Factor, to);
  }
  static __device__ __forceinline__ void pairs(const unsigned (&words)[1], unsigned scale,
                                               unsigned (&to)[4]) {
    bits(words[0], to);
#pragma unroll
    for (unsigned& pair : to) pair = fma_pair<Element>(pair, scale, kNoAddend);
  }
  /// Two scales of e4m3 as factors of bits.
  static __device__ __forceinline__ unsigned factors(unsigned two) {
    constexpr unsigned kSmallFactor = 0x54005400u;
    static_assert(CodeBits<fp16>::kSmallFactor == 0x1p6f);
    return fma_pair<fp16>(fp16_of_codes<e4m3>(two), kSmallFactor, kNoAddend);
  }

 private:
  static __device__ __forceinline__ unsigned shifted(unsigned word, int left) {
    return left >= 0 ? word << left : word >> -left;
  }
  static __device__ __forceinline__ void bits(unsigned word, unsigned (&to)[4]) {
    if (kIsFp16<Element>) {  // in upper bytes
      const unsigned even = (word << 4 & 0x80808080u) | (word << 1 & 0x0e0e0e0eu),
                     odd = (word & 0x80808080u) | (word >> 3 & 0x0e0e0e0eu);
      to[0] = select_bytes(even, 0u, 0x2404), to[2] = even & 0xff00ff00u;
      to[1] = select_bytes(odd, 0u, 0x2404), to[3] = odd & 0xff00ff00u;
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      to[i] = (shifted(word, 12 - 4 * i) & 0x80008000u) |
              (shifted(word, 12 - 4 * i - Bits::kE2m1Shift) & Bits::kE2m1Mask);
  }
};
/// A code of 8 bits of a KvFormat as a type.
template <KvCode kCode>
struct CodeType {
  using Type = e4m3;
};
template <>
struct CodeType<KvCode::e5m2> {
  using Type = e5m2;
};
/// Floats of 8 bits: K as fp16, which has all of them, and V as P.
template <class P, class Format, bool kOfK>
struct ByteFloatOperands {
  using Element = Conditional<kOfK, fp16, typename P::Element>;
  using Columns = FourOfHalves<true>;
  using Code = typename CodeType<Format::kCode>::Type;
  static constexpr int kWords = 2;
  static constexpr float kOffset = 0.0f, kOfOnes = 0.0f, kUnit = 1.0f;
  static constexpr bool kScalesSums = true;

  static __device__ __forceinline__ void pairs(const unsigned (&words)[2], unsigned (&to)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned word = kOfK ? words[half] : select_bytes(words[half], 0u, 0x3120);
      to[2 * half] = pair_of_fp16<Element>(fp16_of_codes<Code>(word));
      to[2 * half + 1] = pair_of_fp16<Element>(fp16_of_upper_codes<Code>(word));
    }
  }
};
/// Integers of 8 bits: fp16 has them from 1024 on in its last bits, K's with that offset. bf16 has seven bits
/// there, from 128 on, and the eighth in what is taken off, 128 or 256.
template <class P, class Format, bool kOfK>
struct ByteOperands {
  using Element = Conditional<kOfK, fp16, typename P::Element>;
  using Columns = FourOfHalves<false>;
  using Bits = CodeBits<Element>;
  static constexpr int kWords = 2;
  static constexpr float kOffset = kOfK ? 1024.0f + 128.0f : 0.0f, kOfOnes = kOffset, kUnit = 1.0f;
  static constexpr bool kScalesSums = true;

  static __device__ __forceinline__ void pairs(const unsigned (&words)[2], unsigned (&to)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      to[2 * half] = pair(words[half]), to[2 * half + 1] = pair(words[half] >> 8);
  }

 private:
  /// Elements of the codes in the lower bytes of halves.
  static __device__ __forceinline__ unsigned pair(unsigned word) {
    if (!kIsFp16<Element>) {
      const unsigned above = masked_and_flipped(word, 0x007f007fu, 0x43004300u),
                     off = masked_and_flipped(word, 0x00800080u, 0xc300c300u);
      return fma_pair<Element>(above, Bits::kOne, off);
    }
    const unsigned above = masked_and_flipped(word, 0x00ff00ffu, 0x64806480u);
    return kOfK ? above : fma_pair<Element>(above, Bits::kOne, 0xe480e480u);
  }
};
template <class P, class Format, bool kOfK>
using CodeOperands =
    Conditional<Format::kCode == KvCode::int8, ByteOperands<P, Format, kOfK>,
                Conditional<Format::kBits == 8, ByteFloatOperands<P, Format, kOfK>,
                            Conditional<kHasSmallFloats<Format>, SmallFloatOperands<P, Format, kOfK>,
                                        IntegerOperands<P, Format, kOfK>>>>;
/// Codes of 8 bits in tiles: pairs are neighbours.
template <class P>
struct WholeCodes {
  using Columns = SixteenOf64;
  using Element = ProductElement<P>;
  static constexpr float kOffset = 0.0f, kOfOnes = 0.0f, kUnit = 1.0f;

  static __device__ __forceinline__ unsigned lower(unsigned word) {
    return pair_of_fp16<Element>(fp16_of_codes<typename P::KvElement>(word));
  }
  static __device__ __forceinline__ unsigned upper(unsigned word) {
    return pair_of_fp16<Element>(fp16_of_upper_codes<typename P::KvElement>(word));
  }
};
template <class P, bool kDecodes = kDecodesKv<P>>
struct FewRowsCodes {
  using K = WholeCodes<P>;
  using V = WholeCodes<P>;
};
template <class P>
struct FewRowsCodes<P, true> {
  using K = CodeOperands<P, OfHead<typename P::KFormat>, true>;
  using V = CodeOperands<P, OfHead<typename P::VFormat>, false>;
};

}  // namespace flashjit::sm90
