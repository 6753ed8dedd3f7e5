// The integers of the program language: 32 bits that wrap. Host and device include this file: the CPU
// evaluates programs with the very arithmetic that kernels run.
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

/// Counts are taken modulo 32.
constexpr int wrap_shift_left(int a, int count) {
  return static_cast<int>(static_cast<unsigned>(a) << (count & 31));
}
constexpr int wrap_shift_right(int a, int count) { return a >> (count & 31); }

constexpr bool fits_int(long long value) { return value >= -2147483648LL && value <= 2147483647LL; }
/// The nearest int.
constexpr int saturate_int(long long value) {
  if (fits_int(value)) return static_cast<int>(value);
  return value < 0 ? static_cast<int>(-2147483648LL) : 2147483647;
}

/// Quotients rounded down and up, for a positive divisor.
constexpr long long floor_divide(long long a, long long b) {
  return a >= 0 ? a / b : -((-a + b - 1) / b);
}
constexpr long long ceil_divide(long long a, long long b) { return -floor_divide(-a, b); }

}  // namespace flashjit
