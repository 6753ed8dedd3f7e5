// Rows of K in formats whose keys share scales, one for each column (KIVI's K): codes are a row's, scales and
// zero points its group's of keys, a row of their own tensor with a number for each column.
#pragma once

#include "flashjit/common/kv_format.cuh"

namespace flashjit {

/// A format that has such scales.
template <class Format>
concept KeysShareScales = (Format::kKeys > 0);

/// What the codes of eight columns are multiplied with, and their zero points.
template <class Format>
struct ColumnScales8 {
  static constexpr KvNumber kType = Format::kScaleType;
  static constexpr int kSize = size_of(kType);
  static constexpr int kZeroBits = Format::kZeroBits;
  static constexpr int kZeroBytes = kZeroBits > 0 ? kZeroBits : 8 * kSize;
  unsigned factors[2 * kSize], zeros[(kZeroBytes + 3) / 4];

  /// Loads the scales of columns [column, column + 8); `scales` is the row of the keys' group.
  __device__ __forceinline__ void load(const unsigned char* scales, int column) {
    constexpr int kAlignment = min(8 * kSize, Format::kScaleAlignment);
    load_bytes<8 * kSize, kAlignment>(scales + Format::kScales + column * kSize, factors);
    if (Format::kZero != KvZero::none)
      load_bytes<kZeroBytes, min(kZeroBytes, Format::kScaleAlignment)>(
          scales + Format::kZeros + (kZeroBits > 0 ? column / 8 * kZeroBits : column * kSize), zeros);
  }
  __device__ __forceinline__ float apply(float value, int i) const {
    const float zero = kZeroBits > 0 ? integer_zero<Format>(zeros[i * kZeroBits / 32], i * kZeroBits % 32)
                       : Format::kZero != KvZero::none ? number_of_words<kType>(zeros, i)
                                                       : 0.0f;
    return scaled<Format>(value, number_of_words<kType>(factors, i), zero);
  }
  /// Decodes codes `first` to `first` + 7.
  template <class Element>
  __device__ __forceinline__ uint4 elements(const KvCodes16<Format>& codes, int first) const {
    unsigned pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float low, high;
      values_of_pair<Element>(codes, first / 2 + i, low, high);
      pairs[i] = pack<Element>(apply(low, 2 * i), apply(high, 2 * i + 1));
    }
    return {pairs[0], pairs[1], pairs[2], pairs[3]};
  }
};

/// Columns [column, column + 16) of a row.
template <class Format>
requires KeysShareScales<Format> __device__ __forceinline__ void decode16(const unsigned char* row,
                                                                          const unsigned char* scales,
                                                                          int column, float argument,
                                                                          float (&to)[16]) {
  if (column >= Format::kColumns) return load_tail16<Format>(row, column, to);
  KvCodes16<Format> codes;
  load_codes16(row, scales, column, argument, codes);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    ColumnScales8<Format> by;
    by.load(scales, column + 8 * half);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      to[8 * half + i] = by.apply(value_of_code<Format>(codes.code(8 * half + i)), i);
  }
}

/// The same as elements.
template <class Element, class Format>
requires KeysShareScales<Format> __device__ __forceinline__ void decode16(const unsigned char* row,
                                                                          const unsigned char* scales,
                                                                          int column, float argument,
                                                                          uint4 (&to)[2]) {
  if (column >= Format::kColumns) return tail_elements16<Element, Format>(row, column, to);
  KvCodes16<Format> codes;
  load_codes16(row, scales, column, argument, codes);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    ColumnScales8<Format> by;
    by.load(scales, column + 8 * half);
    to[half] = by.template elements<Element>(codes, 8 * half);
  }
}

}  // namespace flashjit
