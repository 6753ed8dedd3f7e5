// fp16 and bf16 on the host: rounding to nearest even and the bit patterns, as the hardware makes them.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace flashjit {

/// An IEEE-like 16-bit format with `exponent_bits` and `mantissa_bits`; infinities, NaN and subnormals
/// included.
template <int exponent_bits, int mantissa_bits>
struct SmallFloat {
  static constexpr int kBias = (1 << (exponent_bits - 1)) - 1;
  static constexpr int kMinExponent = 1 - kBias;  ///< of the smallest normal number
  static constexpr std::uint16_t kInfinity = ((1 << exponent_bits) - 1) << mantissa_bits;

  static constexpr double power_of_two(int exponent) {
    return std::bit_cast<double>(static_cast<std::uint64_t>(exponent + 1023) << 52);
  }
  static constexpr double kMax = (2.0 - power_of_two(-mantissa_bits)) * power_of_two(kBias);

  /// The nearest value of the format, ties to even; beyond kMax by half a step or more: infinity.
  static double round(double value) {
    if (!(std::fabs(value) < 2 * kMax)) return std::isnan(value) ? value : std::copysign(kHuge, value);
    const int exponent = static_cast<int>(std::bit_cast<std::uint64_t>(value) >> 52 & 0x7ff) - 1023;
    // fp64 has 52 mantissa bits: adding and subtracting 1.5 * 2^(52 + q) leaves a multiple of 2^q.
    const int quantum = (exponent > kMinExponent ? exponent : kMinExponent) - mantissa_bits;
    const double magic = 1.5 * power_of_two(52 + quantum);
    const double rounded = (value + magic) - magic;
    return std::copysign(std::fabs(rounded) > kMax ? kHuge : rounded, value);
  }

  static std::uint16_t encode(double value) {
    const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    if (std::isnan(value)) return sign | kInfinity | (1 << (mantissa_bits - 1));
    const double magnitude = std::fabs(round(value));
    if (magnitude > kMax) return sign | kInfinity;
    if (magnitude < power_of_two(kMinExponent)) {
      return sign | static_cast<std::uint16_t>(magnitude / power_of_two(kMinExponent - mantissa_bits));
    }
    const std::uint64_t bits = std::bit_cast<std::uint64_t>(magnitude) >> (52 - mantissa_bits);
    return sign | static_cast<std::uint16_t>(bits - (std::uint64_t{1023 - kBias} << mantissa_bits));
  }

  static double decode(std::uint16_t bits) {
    const int exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1);
    const int mantissa = bits & ((1 << mantissa_bits) - 1);
    const double sign = bits & 0x8000 ? -1.0 : 1.0;
    if (exponent == (1 << exponent_bits) - 1) {
      return mantissa ? std::numeric_limits<double>::quiet_NaN() : sign * kHuge;
    }
    if (exponent == 0) return sign * mantissa * power_of_two(kMinExponent - mantissa_bits);
    return sign * (1 + mantissa * power_of_two(-mantissa_bits)) * power_of_two(exponent - kBias);
  }

 private:
  static constexpr double kHuge = std::numeric_limits<double>::infinity();
};

using Fp16 = SmallFloat<5, 10>;
using Bf16 = SmallFloat<8, 7>;

}  // namespace flashjit
