// Scales and zero points of a row's four groups of 32 columns, for few_rows_codes.cuh, and what zero points
// take off sums: over a group of K with the sum of Q, and of V with P, whose products with one row of zero
// points the tensor cores sum up.
#pragma once

#include "flashjit/sm90/few_rows_pairs.cuh"

namespace flashjit::sm90 {

// --- As they are stored -----------------------------------------------------------------------------------

/// Power of two `i` of a word, as number_of_bits() has it: the least is no zero, and the largest NaN.
__device__ __forceinline__ float power_of_word(unsigned word, int i) {
  const float power = __uint_as_float((i < 3 ? word << (23 - 8 * i) : word >> 1) & 0x7f800000u);
  return fmaf(power, 0.0f, fmaxf(power, 5.877471754e-39f));
}
/// Numbers of the scales' type, from a place of the row that has them on, in words.
template <class Format, int kPlace, int kStep>
struct GroupNumbers {
  static constexpr int kSize = size_of(Format::kScaleType),
                       kCount = Format::kBlock <= 32 ? 4 : 128 / Format::kBlock,
                       kAlignment = kPlace == 0 ? Format::kScaleAlignment
                                                : min(Format::kScaleAlignment, kPlace & -kPlace);
  unsigned words[(kCount * kSize + 3) / 4];

  __device__ __forceinline__ void load(const unsigned char* row) {
    if (kStep == kSize) return load_bytes<kCount * kSize, kAlignment>(row + kPlace, words);
#pragma unroll
    for (unsigned& word : words) word = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      unsigned bits[1];
      load_bytes<kSize, kAlignment>(row + kPlace + i * kStep, bits);
      words[i * kSize / 4] |= bits[0] << i * kSize % 4 * 8;
    }
  }
  __device__ __forceinline__ float of_group(int group) const {
    const int i = group * kCount / 4;
    if (Format::kScaleType == KvNumber::e8m0) return power_of_word(words[0], i);
    return number_of_words<Format::kScaleType>(words, i);
  }
};
template <class Format>
using GroupScales = GroupNumbers<Format, Format::kScales, Format::kScaleStep>;

// --- Zero points ------------------------------------------------------------------------------------------

// Zero points of a lane's two keys. begin() and added(): what a sum over a group of K begins with, and what
// is added to it times its scale; `of_q` is less Codes::kOfOnes times the sum of Q. add(): what O has too
// much; `b` is P times the scales.

template <class Codes, class Format>
struct NoZeros {
  __device__ __forceinline__ void load(const unsigned char*, int) {}
  __device__ __forceinline__ void transpose() {}
  __device__ __forceinline__ float begin(int, int, float of_q) const { return of_q; }
  __device__ __forceinline__ float added(int, int, float, float score) const { return score; }
  template <class Out>
  __device__ __forceinline__ void add(int group, const float (&)[4], float, float, const unsigned (&b)[2],
                                      Out& o) const {
    o.add_offset(group, b);
  }
};
/// Integers of four bits: they and the codes' offset are elements, as the codes are.
template <class Codes, class Format>
struct IntegerZeros {
  using Element = typename Codes::Element;
  using Bits = CodeBits<Element>;
  static constexpr int kCount = Format::kBlock <= 32 ? 4 : 128 / Format::kBlock,
                       kAlignment = min(Format::kScaleAlignment, Format::kZeros & -Format::kZeros);
  static_assert(Format::kZeroBits == 4 && Format::kZeroStep == 4);
  unsigned words[2];  ///< four bits a block; transposed a pair of elements, of two keys

  __device__ __forceinline__ void load(const unsigned char* row, int key) {
    unsigned word[1];
    load_bytes<(kCount * 4 + 7) / 8, kAlignment>(row + Format::kZeros, word);
    words[key] = word[0];
  }
  /// Then lanes 4 i to 4 i + 3 have group i's.
  __device__ __forceinline__ void transpose() {
    const int own = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (unsigned& word : words) {
      const unsigned low = word >> 4 * (own * kCount / 4) & 15u, high = word >> 4 * ((own + 1) * kCount / 4);
      word = transposed_matrix(Bits::kOffset | low | (high & 15u) << 16);
    }
  }
  __device__ __forceinline__ float begin(int group, int key, float of_q) const {
    const unsigned code = words[key] >> 4 * (group * kCount / 4) & 15u;
    return of_q * low_of<Element>((Bits::kOffset & 0xffffu) | code);
  }
  __device__ __forceinline__ float added(int, int, float, float score) const { return score; }
  template <class Out>
  __device__ __forceinline__ void add(int group, const float (&)[4], float, float, const unsigned (&b)[2],
                                      Out& o) const {
    o.add_offset(group, b, words[0], words[1]);
  }
};
/// Numbers, which no element may have: P is multiplied with them.
template <class Codes, class Format>
struct NumberZeros {
  static constexpr bool kAdded = Format::kZero == KvZero::added;
  using Element = typename Codes::Element;
  GroupNumbers<Format, Format::kZeros, Format::kZeroStep / 8> numbers[2];

  __device__ __forceinline__ void load(const unsigned char* row, int key) { numbers[key].load(row); }
  __device__ __forceinline__ void transpose() {}
  __device__ __forceinline__ float begin(int group, int key, float of_q) const {
    return of_q * (kAdded ? Codes::kOffset : Codes::kOffset + numbers[key].of_group(group));
  }
  __device__ __forceinline__ float added(int group, int key, float of_q, float score) const {
    return kAdded ? fmaf(-of_q, numbers[key].of_group(group), score) : score;
  }
  template <class Out>
  __device__ __forceinline__ void add(int group, const float (&p)[4], float low_scale, float high_scale,
                                      const unsigned (&b)[2], Out& o) const {
    const float low = numbers[0].of_group(group) * (kAdded ? -1.0f : low_scale),
                high = numbers[1].of_group(group) * (kAdded ? -1.0f : high_scale);
    const unsigned of_zeros[2] = {weights_of_keys<Element>(p[0] * low, p[1] * low),
                                  weights_of_keys<Element>(p[2] * high, p[3] * high)};
    o.add_offset(group, b, Codes::kOffsetPair, Codes::kOffsetPair);
    o.add_offset(group, of_zeros, CodeBits<Element>::kOne, CodeBits<Element>::kOne);
  }
};
template <class Codes, class Format>
using GroupZeros =
    Conditional<Format::kZero == KvZero::none, NoZeros<Codes, Format>,
                Conditional<Format::kZeroBits == 0, NumberZeros<Codes, Format>, IntegerZeros<Codes, Format>>>;

}  // namespace flashjit::sm90
