// The integers of the program language: 32 bits that wrap. Host and device include this file: the CPU
// evaluates programs with the same arithmetic as kernels.
#pragma once

namespace flashjit {

constexpr int wrap_add(int a, int b) {
  return static_cast<int>(static_cast<unsigned>(a) + static_cast<unsigned>(b));
}
constexpr int wrap_subtract(int a, int b) {
  return static_cast<int>(static_cast<unsigned>(a) - static_cast<unsigned>(b));
}
constexpr int wrap_multiply(int a, int b) {
  return static_cast<int>(static_cast<unsigned>(a) * static_cast<unsigned>(b));
}
constexpr int wrap_negate(int a) { return wrap_subtract(0, a); }
constexpr int wrap_abs(int a) { return a < 0 ? wrap_negate(a) : a; }

/// Towards zero; a zero divisor gives 0.
constexpr int wrap_divide(int a, int b) {
  if (b == 0) return 0;
  return b == -1 ? wrap_negate(a) : a / b;
}
/// The rest of wrap_divide, with the sign of `a`; a zero divisor gives 0.
constexpr int wrap_modulo(int a, int b) { return b == 0 || b == -1 ? 0 : a % b; }

/// The same for a dividend that is not negative and a positive divisor: without signs a power of two is one
/// shift, and the compiler sees which of a tile's positions have the same quotient.
constexpr int natural_divide(int a, int b) {
  return static_cast<int>(static_cast<unsigned>(a) / static_cast<unsigned>(b));
}
constexpr int natural_modulo(int a, int b) {
  return static_cast<int>(static_cast<unsigned>(a) % static_cast<unsigned>(b));
}

constexpr unsigned magnitude(int a) {
  return a < 0 ? 0u - static_cast<unsigned>(a) : static_cast<unsigned>(a);
}

/// Divides by one number as wrap_divide and wrap_modulo do, for all ints, by a product: Granlund and
/// Montgomery, "Division by Invariant Integers using Multiplication" (1994), for magnitudes of up to 2^31.
struct Divisor {
  int by = 0;
  unsigned multiplier = 0;
  int shift = 0;

  constexpr Divisor() = default;
  constexpr explicit Divisor(int by_) : by(by_) {
    const unsigned size = magnitude(by);
    if (size < 2) return;
    while (shift < 30 && 2u << shift < size) ++shift;  // 2^(shift + 1) is the first that is at least size
    multiplier = static_cast<unsigned>((1ull << (32 + shift)) / size + 1);
  }
  constexpr int quotient(int a) const {
    if (magnitude(by) < 2) return wrap_multiply(a, by);
    const int size = static_cast<int>(quotient_of_magnitude(a));
    return (a ^ by) < 0 ? wrap_negate(size) : size;
  }
  constexpr int rest(int a) const {
    if (magnitude(by) < 2) return 0;
    const int size = static_cast<int>(magnitude(a) - quotient_of_magnitude(a) * magnitude(by));
    return a < 0 ? -size : size;
  }

 private:
  constexpr unsigned quotient_of_magnitude(int a) const {
    return static_cast<unsigned>(static_cast<unsigned long long>(magnitude(a)) * multiplier >> 32) >> shift;
  }
};

/// Like Divisor, for numbers that are not negative: with 31 bits the product is right for all divisors,
/// without special cases (the same paper, section 4).
struct NaturalDivisor {
  unsigned multiplier = 0, size = 1;  ///< of twice the number; the divisor's magnitude, 1 where that is 0
  int shift = 0, sign = 0;            ///< sign 0: the quotient is 0

  constexpr NaturalDivisor() = default;
  constexpr explicit NaturalDivisor(int by) : size(by == 0 ? 1 : magnitude(by)), sign((by > 0) - (by < 0)) {
    while (shift < 31 && 1u << shift < size) ++shift;  // 2^shift is the first that is at least size
    multiplier = static_cast<unsigned>(((1ull << (31 + shift)) + size - 1) / size);
  }
  constexpr int quotient(int a) const { return wrap_multiply(static_cast<int>(quotient_of_size(a)), sign); }
  constexpr int rest(int a) const {
    return static_cast<int>(static_cast<unsigned>(a) - quotient_of_size(a) * size);
  }

 private:
  constexpr unsigned quotient_of_size(int a) const {
    return static_cast<unsigned>(2ull * static_cast<unsigned>(a) * multiplier >> 32) >> shift;
  }
};

/// Tests whether ints are multiples of a number, as wrap_modulo would: the same paper, section 9. A multiple
/// times the inverse of the number's odd part is small, and has zeros where the number has.
struct Multiples {
  unsigned inverse = 0, offset = 0, most = ~0u;
  int zeros = 0;

  constexpr Multiples() = default;
  constexpr explicit Multiples(int of) {
    if (of == 0) return;
    unsigned odd = magnitude(of);
    for (; odd % 2 == 0; odd /= 2) ++zeros;
    inverse = odd;  // to 3 bits; each step doubles them
    for (int step = 0; step < 4; ++step) inverse *= 2 - odd * inverse;
    offset = 0x7fffffffu / odd & (0u - (1u << zeros));  // shifts negative numbers to positive ones
    most = odd == 1 ? ~0u >> zeros : offset >> zeros << 1;
  }
  constexpr bool contain(int a) const {
    const unsigned product = static_cast<unsigned>(a) * inverse + offset;
    return (product >> zeros | product << (-zeros & 31)) <= most;
  }
};

/// Counts are taken modulo 32.
constexpr int wrap_shift_left(int a, int count) {
  return static_cast<int>(static_cast<unsigned>(a) << (count & 31));
}
constexpr int wrap_shift_right(int a, int count) { return a >> (count & 31); }

/// Sums and differences of 64 bits saturate: a limit of INT64_MAX plus a position is no limit still, and
/// comparisons of such sums may be moved to ints.
constexpr long long saturate_add(long long a, long long b) {
  const long long sum =
      static_cast<long long>(static_cast<unsigned long long>(a) + static_cast<unsigned long long>(b));
  const bool overflows = ((a ^ sum) & (b ^ sum)) < 0;
  return overflows ? a >> 63 ^ 0x7fffffffffffffffLL : sum;
}
constexpr long long saturate_subtract(long long a, long long b) {
  const long long rest =
      static_cast<long long>(static_cast<unsigned long long>(a) - static_cast<unsigned long long>(b));
  const bool overflows = ((a ^ b) & (a ^ rest)) < 0;
  return overflows ? a >> 63 ^ 0x7fffffffffffffffLL : rest;
}
/// All else is the same as of 32 bits.
constexpr long long wrap_multiply(long long a, long long b) {
  return static_cast<long long>(static_cast<unsigned long long>(a) * static_cast<unsigned long long>(b));
}
constexpr long long wrap_negate(long long a) {
  return static_cast<long long>(0ull - static_cast<unsigned long long>(a));
}
constexpr long long wrap_abs(long long a) { return a < 0 ? wrap_negate(a) : a; }
constexpr long long wrap_divide(long long a, long long b) {
  if (b == 0) return 0;
  return b == -1 ? wrap_negate(a) : a / b;
}
constexpr long long wrap_modulo(long long a, long long b) { return b == 0 || b == -1 ? 0 : a % b; }
/// Counts are taken modulo 64.
constexpr long long wrap_shift_left(long long a, long long count) {
  return static_cast<long long>(static_cast<unsigned long long>(a) << (count & 63));
}
constexpr long long wrap_shift_right(long long a, long long count) { return a >> (count & 63); }

constexpr int low_word_of(long long a) { return static_cast<int>(static_cast<unsigned>(a)); }
constexpr int high_word_of(long long a) { return static_cast<int>(a >> 32); }

constexpr bool fits_int(long long value) { return value >= -2147483648LL && value <= 2147483647LL; }
/// The nearest int.
constexpr int saturate_int(long long value) {
  if (fits_int(value)) return static_cast<int>(value);
  return value < 0 ? static_cast<int>(-2147483648LL) : 2147483647;
}

/// Quotients rounded down and up, for a positive divisor.
constexpr long long floor_divide(long long a, long long b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }
constexpr long long ceil_divide(long long a, long long b) { return -floor_divide(-a, b); }

}  // namespace flashjit
