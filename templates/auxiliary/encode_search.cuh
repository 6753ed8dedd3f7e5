// Blocks of formats whose elements are an expression: their scales and zero points are searched among the
// numbers that are stored, and codes among all, with the same steps as QuantizerSearch of
// runtime/expr/kv_codec.cpp.
#pragma once

#include "flashjit/common/kv_encode.cuh"

namespace flashjit::auxiliary {

/// As they are stored.
struct FoundNumbers {
  unsigned scale_bits, zero_bits;
};

/// The bits of the largest finite number.
template <KvNumber kType>
constexpr int kMostBits = kType == KvNumber::fp32   ? 0x7f7fffff
                          : kType == KvNumber::fp16 ? 0x7bff
                          : kType == KvNumber::bf16 ? 0x7f7f
                          : kType == KvNumber::e4m3 ? 0x7e
                                                    : 254;

/// The first of [first, last] that `is`, which all behind it are; else the last.
template <class Is>
__device__ __forceinline__ int first_that(int first, int last, const Is& is) {
#pragma unroll 1
  while (first < last) {
    const int middle = (first & last) + ((first ^ last) >> 1);  // no sum that overflows
    if (is(middle))
      last = middle;
    else
      first = middle + 1;
  }
  return first;
}

template <class Format>
__device__ __forceinline__ float zero_of_bits(unsigned bits) {
  return Format::kZero == KvZero::none ? 0.0f
         : Format::kZeroBits > 0       ? static_cast<float>(bits)
                                       : number_of_bits<Format::kScaleType>(bits);
}

/// The bits of the zero point of the least highest value that is no less than `high`.
template <class Format>
__device__ __forceinline__ unsigned search_zero(float scale, float high) {
  constexpr KvNumber kType = Format::kScaleType;
  constexpr bool kInteger = Format::kZeroBits > 0, kRaises = Format::kZeroRaises != 0;
  constexpr int kMost = kInteger ? (1 << Format::kZeroBits) - 1 : kMostBits<kType>;
  constexpr unsigned kSign = 1u << (8 * size_of(kType) - 1);
  const auto bits_of = [&](int of) {
    const int place = kRaises ? of : -of;
    return place < 0 ? kSign | static_cast<unsigned>(-place) : static_cast<unsigned>(place);
  };
  return bits_of(
      first_that(!kInteger || !kRaises ? -kMost : 0, !kInteger || kRaises ? kMost : 0, [&](int of) {
        return !(Format::decoded(Format::kHighestOf, scale, zero_of_bits<Format>(bits_of(of))) < high);
      }));
}

/// The scale whose largest magnitude is the nearest to a block's; with zero points the least with which
/// values reach from its lowest to its highest.
template <class Format>
__device__ __forceinline__ FoundNumbers search_numbers(const BlockExtremes& found) {
  constexpr KvNumber kType = Format::kScaleType;
  constexpr int kLeast = kType == KvNumber::e8m0 ? 0 : 1;
  const auto scale_of = [](int bits) { return number_of_bits<kType>(static_cast<unsigned>(bits)); };
  const unsigned nan = bits_of_number<kType>(__uint_as_float(0x7fffffffu));
  if (Format::kZero != KvZero::none) {
    const int bits = first_that(kLeast, kMostBits<kType>, [&](int at) {
      const float scale = scale_of(at), zero = zero_of_bits<Format>(search_zero<Format>(scale, found.high));
      return !(Format::decoded(Format::kLowestOf, scale, zero) > found.low);
    });
    return {found.finite ? static_cast<unsigned>(bits) : nan,
            search_zero<Format>(scale_of(bits), found.high)};
  }
  const float wanted = fabsf(found.extreme);
  const auto reached = [&](int bits) {
    return fabsf(Format::decoded(Format::kLargestOf, scale_of(bits), 0.0f));
  };
  const int bits = first_that(kLeast, kMostBits<kType>, [&](int at) { return !(reached(at) < wanted); });
  const bool below = bits > kLeast && wanted - reached(bits - 1) < reached(bits) - wanted;
  return {found.finite ? static_cast<unsigned>(below ? bits - 1 : bits) : nan, 0u};
}

/// The code of the nearest value, the first of those that are as near.
template <class Format>
__device__ __forceinline__ unsigned nearest_code(float scale, float zero, float x) {
  int nearest = 0;
  float distance = fabsf(Format::decoded(0, scale, zero) - x);
#pragma unroll 1
  for (int code = 1; code < 1 << Format::kBits; ++code)
    if (const float other = fabsf(Format::decoded(code, scale, zero) - x); other < distance)
      nearest = code, distance = other;
  return static_cast<unsigned>(nearest);
}

}  // namespace flashjit::auxiliary
