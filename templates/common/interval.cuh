// The values that a program's integers and conditions may have over a tile of pairs.
// Host and device include this file, so that the unit tests check the kernels' classes of tiles.
#pragma once

#if defined(__CUDACC__)
#include "flashjit/common/int_math.cuh"
#include "flashjit/common/types.cuh"
#else
#include "templates/common/int_math.cuh"
#include "templates/common/types.cuh"
#endif

namespace flashjit {

/// All ints from low to high, both included. A result that may overflow int32 is any int, since ints wrap.
struct Interval {
  long long low, high;

  constexpr bool contains(long long value) const { return low <= value && value <= high; }
  constexpr bool single() const { return low == high; }
};

/// The values that a condition may have.
struct Truth {
  bool can_be_true, can_be_false;
};

constexpr Interval any_int() { return {-2147483648LL, 2147483647LL}; }
constexpr Truth any_truth() { return {true, true}; }
constexpr Truth known(bool value) { return {value, !value}; }

constexpr Interval wrapped(long long low, long long high) {
  return fits_int(low) && fits_int(high) ? Interval{low, high} : any_int();
}
constexpr long long lesser(long long a, long long b) { return a < b ? a : b; }
constexpr long long greater(long long a, long long b) { return a > b ? a : b; }
/// The smallest interval with both.
constexpr Interval join(Interval a, Interval b) { return {lesser(a.low, b.low), greater(a.high, b.high)}; }
constexpr Truth join(Truth a, Truth b) {
  return {a.can_be_true || b.can_be_true, a.can_be_false || b.can_be_false};
}

constexpr Interval operator+(Interval a, Interval b) { return wrapped(a.low + b.low, a.high + b.high); }
constexpr Interval operator-(Interval a, Interval b) { return wrapped(a.low - b.high, a.high - b.low); }
constexpr Interval operator-(Interval a) { return wrapped(-a.high, -a.low); }
constexpr Interval operator~(Interval a) { return {-a.high - 1, -a.low - 1}; }

constexpr Interval operator*(Interval a, Interval b) {
  const long long w = a.low * b.low, x = a.low * b.high, y = a.high * b.low, z = a.high * b.high;
  return wrapped(lesser(lesser(w, x), lesser(y, z)), greater(greater(w, x), greater(y, z)));
}

/// The divisors are all positive or all negative.
constexpr Interval divide_one_sign(Interval a, Interval b) {
  const long long w = a.low / b.low, x = a.low / b.high, y = a.high / b.low, z = a.high / b.high;
  const Interval bounds = {lesser(lesser(w, x), lesser(y, z)), greater(greater(w, x), greater(y, z))};
  return wrapped(bounds.low, bounds.high);
}
constexpr Interval operator/(Interval a, Interval b) {
  if (b.low > 0 || b.high < 0) return divide_one_sign(a, b);
  Interval result = {0, 0};  // of the zero divisor
  if (b.low < 0) result = join(result, divide_one_sign(a, {b.low, -1}));
  if (b.high > 0) result = join(result, divide_one_sign(a, {1, b.high}));
  return result;
}

constexpr Interval operator%(Interval a, Interval b) {
  const bool one_sign = a.low >= 0 || a.high <= 0;
  if (b.single() && b.low > 0 && one_sign && a.low / b.low == a.high / b.low)
    return {a.low % b.low, a.high % b.low};
  const long long largest = greater(greater(-b.low, b.high) - 1, 0);
  return {a.low < 0 ? greater(a.low, -largest) : 0, a.high > 0 ? lesser(a.high, largest) : 0};
}

/// Counts of shifts, modulo 32.
constexpr Interval shift_counts(Interval count) {
  if (count.low >= 0 && count.high <= 31) return count;
  if (count.single()) return {count.low & 31, count.low & 31};
  return {0, 31};
}
constexpr Interval operator<<(Interval a, Interval count) {
  const Interval by = shift_counts(count);
  return a * Interval{1LL << by.low, 1LL << by.high};
}
constexpr Interval operator>>(Interval a, Interval count) {
  const Interval by = shift_counts(count);
  return {lesser(a.low >> by.low, a.low >> by.high), greater(a.high >> by.low, a.high >> by.high)};
}

/// The smallest 2^n - 1 that is at least `value`, which is not negative.
constexpr long long all_ones(long long value) {
  long long ones = 0;
  while (ones < value) ones = ones * 2 + 1;
  return ones;
}
/// Bit operations leave the bits above both operands' equal to the sign. So the result is any number
/// with as many bits, and not negative where neither operand can be.
constexpr Interval same_bits(Interval a, Interval b) {
  const Interval both = join(a, b);
  const long long ones = all_ones(greater(both.high, -(both.low + 1)));
  return {both.low < 0 ? -ones - 1 : 0, ones};
}
constexpr Interval operator&(Interval a, Interval b) {
  if (a.single() && b.single()) return {a.low & b.low, a.low & b.low};
  if (a.low >= 0 && b.low >= 0) return {0, lesser(a.high, b.high)};
  if (a.low >= 0) return {0, a.high};
  if (b.low >= 0) return {0, b.high};
  return same_bits(a, b);
}
constexpr Interval operator|(Interval a, Interval b) {
  if (a.single() && b.single()) return {a.low | b.low, a.low | b.low};
  const Interval bits = same_bits(a, b);
  return a.low >= 0 && b.low >= 0 ? Interval{greater(a.low, b.low), bits.high} : bits;
}
constexpr Interval operator^(Interval a, Interval b) {
  if (a.single() && b.single()) return {a.low ^ b.low, a.low ^ b.low};
  return same_bits(a, b);
}

constexpr Interval min(Interval a, Interval b) { return {lesser(a.low, b.low), lesser(a.high, b.high)}; }
constexpr Interval max(Interval a, Interval b) { return {greater(a.low, b.low), greater(a.high, b.high)}; }
constexpr Interval abs(Interval a) {
  if (a.low >= 0) return a;
  if (a.high <= 0) return -a;
  return wrapped(0, greater(-a.low, a.high));
}

constexpr Truth operator<(Interval a, Interval b) { return {a.low < b.high, a.high >= b.low}; }
constexpr Truth operator<=(Interval a, Interval b) { return {a.low <= b.high, a.high > b.low}; }
constexpr Truth operator>(Interval a, Interval b) { return b < a; }
constexpr Truth operator>=(Interval a, Interval b) { return b <= a; }
constexpr Truth operator==(Interval a, Interval b) {
  return {a.low <= b.high && b.low <= a.high, !(a.single() && b.single() && a.low == b.low)};
}

constexpr Truth operator!(Truth a) { return {a.can_be_false, a.can_be_true}; }
constexpr Truth operator!=(Interval a, Interval b) { return !(a == b); }
constexpr Truth operator&&(Truth a, Truth b) {
  return {a.can_be_true && b.can_be_true, a.can_be_false || b.can_be_false};
}
constexpr Truth operator||(Truth a, Truth b) { return !(!a && !b); }
constexpr Truth operator==(Truth a, Truth b) {
  return {(a.can_be_true && b.can_be_true) || (a.can_be_false && b.can_be_false),
          (a.can_be_true && b.can_be_false) || (a.can_be_false && b.can_be_true)};
}
constexpr Truth operator!=(Truth a, Truth b) { return !(a == b); }

constexpr Interval to_int(Truth a) { return {a.can_be_false ? 0 : 1, a.can_be_true ? 1 : 0}; }
constexpr Truth to_bool(Interval a) { return a != Interval{0, 0}; }
template <class Value>
constexpr Value select(Truth condition, Value a, Value b) {
  if (!condition.can_be_false) return a;
  return condition.can_be_true ? join(a, b) : b;
}

/// q_factor * q + kv_factor * kv + rest; not wrapped.
constexpr Interval affine(long long q_factor, Interval q, long long kv_factor, Interval kv, long long rest) {
  const Interval by_q = {q_factor * (q_factor < 0 ? q.high : q.low),
                         q_factor * (q_factor < 0 ? q.low : q.high)};
  const Interval by_kv = {kv_factor * (kv_factor < 0 ? kv.high : kv.low),
                          kv_factor * (kv_factor < 0 ? kv.low : kv.high)};
  return {by_q.low + by_kv.low + rest, by_q.high + by_kv.high + rest};
}
constexpr Interval wrapped(Interval a) { return wrapped(a.low, a.high); }
constexpr bool fits(Interval a) { return fits_int(a.low) && fits_int(a.high); }

/// For the difference of two sides that do not wrap.
constexpr Truth at_most_zero(Interval difference) { return {difference.low <= 0, difference.high > 0}; }
constexpr Truth is_zero(Interval difference) {
  return {difference.contains(0), difference.low != 0 || difference.high != 0};
}
/// If a side may wrap, the condition may be anything.
constexpr Truth if_fits(Interval left, Interval right, Truth truth) {
  return fits(left) && fits(right) ? truth : any_truth();
}

constexpr TileClass class_of(Truth attends) {
  if (!attends.can_be_true) return TileClass::empty;
  return attends.can_be_false ? TileClass::partial : TileClass::full;
}

/// The positions in a range that is not empty.
constexpr Interval interval_of(Range range) { return {range.begin, range.end - 1LL}; }

/// For bounds that hold for all values of an interval instead of some.
constexpr Interval reversed(Interval a) { return {a.high, a.low}; }

/// A range of queries or keys, narrowed by one condition after another.
struct Bounds {
  long long begin, end;  ///< at first 0 and a length

  /// Keeps the x with factor * x + rest <= 0 for some rest from `low` on.
  constexpr void keep_at_most_zero(long long factor, long long low) {
    if (factor > 0) end = lesser(end, floor_divide(-low, factor) + 1);
    if (factor < 0) begin = greater(begin, ceil_divide(low, -factor));
    if (factor == 0 && low > 0) end = 0;
  }
  constexpr void keep_zero(long long factor, Interval rest) {
    keep_at_most_zero(factor, rest.low);
    keep_at_most_zero(-factor, -rest.high);
  }
  constexpr void keep_if(bool condition) {
    if (!condition) end = 0;
  }
  constexpr Range range() const {
    const long long last = greater(end, 0);
    return {static_cast<int>(lesser(begin, last)), static_cast<int>(last)};
  }
};

}  // namespace flashjit
