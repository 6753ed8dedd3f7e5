// Rows of K in formats whose keys share scales, one for each column (KIVI's K): codes are a row's, scales and
// zero points those of its group of keys, a row of their own tensor with a number for each column.
#pragma once

#include "flashjit/common/kv_format.cuh"

namespace flashjit {

/// A format that has such scales.
template <class Format>
concept KeysShareScales = (Format::kKeys > 0);

/// Columns [column, column + 8) of a row, whose codes are codes `first` to `first` + 7.
template <class Format>
__device__ __forceinline__ void decode8(const KvCodes16<Format>& codes, int first,
                                        const unsigned char* scales, int column, float (&to)[8]) {
  constexpr KvNumber kType = Format::kScaleType;
  constexpr int kSize = size_of(kType), kAlignment = min(8 * kSize, Format::kScaleAlignment);
  unsigned factors[2 * kSize], zeros[2 * kSize] = {};
  load_bytes<8 * kSize, kAlignment>(scales + Format::kScales + column * kSize, factors);
  if (Format::kZero != KvZero::none)
    load_bytes<8 * kSize, kAlignment>(scales + Format::kZeros + column * kSize, zeros);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float zero = Format::kZero != KvZero::none ? number_of_words<kType>(zeros, i) : 0.0f;
    to[i] = scaled<Format>(value_of_code<Format>(codes.code(first + i)), number_of_words<kType>(factors, i),
                           zero);
  }
}

/// Calls put(half, x) with columns [column + 8 * half, column + 8 * half + 8) of a row for both halves;
/// `scales` is its group's.
template <class Format, class Put>
__device__ __forceinline__ void decode_halves(const unsigned char* row, const unsigned char* scales,
                                              int column, float argument, const Put& put) {
  KvCodes16<Format> codes;
  load_codes16(row, scales, column, argument, codes);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float x[8];
    decode8(codes, 8 * half, scales, column + 8 * half, x);
    put(half, x);
  }
}

/// Columns [column, column + 16) of a row.
template <class Format>
requires KeysShareScales<Format> __device__ __forceinline__ void decode16(const unsigned char* row,
                                                                          const unsigned char* scales,
                                                                          int column, float argument,
                                                                          float (&to)[16]) {
  if (column >= Format::kColumns) return load_tail16<Format>(row, column, to);
  decode_halves<Format>(row, scales, column, argument, [&](int half, const float(&x)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) to[8 * half + i] = x[i];
  });
}

/// The same as elements.
template <class Element, class Format>
requires KeysShareScales<Format> __device__ __forceinline__ void decode16(const unsigned char* row,
                                                                          const unsigned char* scales,
                                                                          int column, float argument,
                                                                          uint4 (&to)[2]) {
  if (column >= Format::kColumns) return tail_elements16<Element, Format>(row, column, to);
  decode_halves<Format>(row, scales, column, argument,
                        [&](int half, const float(&x)[8]) { to[half] = pack_eight<Element>(x); });
}

}  // namespace flashjit
