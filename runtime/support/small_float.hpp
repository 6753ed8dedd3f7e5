// Floats of 16 and 8 bits on the host: rounding to nearest even and the bit patterns, as the hardware makes
// them.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace flashjit {

/// An IEEE-like format with a sign, `exponent_bits` and `mantissa_bits`; NaN and subnormals included. What is
/// too large becomes infinity in 16 bits and the largest number in 8, as the hardware converts. Without
/// infinities the highest exponent is a number's, too, and the highest code alone is NaN.
template <int exponent_bits, int mantissa_bits, bool has_infinities = true>
struct SmallFloat {
  static constexpr int kBits = 1 + exponent_bits + mantissa_bits;
  static_assert(kBits == 16 || kBits == 8);
  using Bits = std::conditional_t<kBits == 8, std::uint8_t, std::uint16_t>;
  static constexpr int kBias = (1 << (exponent_bits - 1)) - 1;
  static constexpr int kMinExponent = 1 - kBias;  ///< of the smallest normal number
  static constexpr Bits kSign = 1u << (kBits - 1);
  static constexpr Bits kHighest = kSign - 1;
  static constexpr Bits kInfinity = ((1 << exponent_bits) - 1) << mantissa_bits;
  static constexpr Bits kNaN = kBits == 8 ? kHighest : kInfinity | (1 << (mantissa_bits - 1));

  static constexpr double power_of_two(int exponent) {
    return std::bit_cast<double>(static_cast<std::uint64_t>(exponent + 1023) << 52);
  }
  static constexpr double kMax = has_infinities
                                     ? (2.0 - power_of_two(-mantissa_bits)) * power_of_two(kBias)
                                     : (2.0 - power_of_two(1 - mantissa_bits)) * power_of_two(kBias + 1);

  /// The nearest value of the format, ties to even. Beyond kMax by half a step or more it is too large.
  static double round(double value) {
    if (!(std::fabs(value) < 2 * kMax)) return std::isnan(value) ? value : std::copysign(kTooLarge, value);
    const int exponent = static_cast<int>(std::bit_cast<std::uint64_t>(value) >> 52 & 0x7ff) - 1023;
    // fp64 has 52 mantissa bits: adding and subtracting 1.5 * 2^(52 + q) leaves a multiple of 2^q.
    const int quantum = (exponent > kMinExponent ? exponent : kMinExponent) - mantissa_bits;
    const double magic = 1.5 * power_of_two(52 + quantum);
    const double rounded = (value + magic) - magic;
    return std::copysign(std::fabs(rounded) > kMax ? kTooLarge : rounded, value);
  }

  static Bits encode(double value) {
    const Bits sign = std::signbit(value) ? kSign : 0;
    if (std::isnan(value)) return sign | kNaN;
    const double magnitude = std::fabs(round(value));
    if (magnitude > kMax) return sign | kInfinity;
    if (magnitude < power_of_two(kMinExponent)) {
      return sign | static_cast<Bits>(magnitude / power_of_two(kMinExponent - mantissa_bits));
    }
    const std::uint64_t bits = std::bit_cast<std::uint64_t>(magnitude) >> (52 - mantissa_bits);
    return sign | static_cast<Bits>(bits - (std::uint64_t{1023 - kBias} << mantissa_bits));
  }

  static double decode(Bits bits) {
    const int exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1);
    const int mantissa = bits & ((1 << mantissa_bits) - 1);
    const double sign = bits & kSign ? -1.0 : 1.0;
    const bool special =
        has_infinities ? exponent == (1 << exponent_bits) - 1 : (bits & kHighest) == kHighest;
    if (special) return mantissa ? std::numeric_limits<double>::quiet_NaN() : sign * kHuge;
    if (exponent == 0) return sign * mantissa * power_of_two(kMinExponent - mantissa_bits);
    return sign * (1 + mantissa * power_of_two(-mantissa_bits)) * power_of_two(exponent - kBias);
  }

 private:
  static constexpr double kHuge = std::numeric_limits<double>::infinity();
  static constexpr double kTooLarge = kBits == 8 ? kMax : kHuge;
};

using Fp16 = SmallFloat<5, 10>;
using Bf16 = SmallFloat<8, 7>;
using E4m3 = SmallFloat<4, 3, false>;
using E5m2 = SmallFloat<5, 2>;

}  // namespace flashjit
