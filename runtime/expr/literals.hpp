// The values that operations give for literals; the language's definition of integer arithmetic.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "flashjit/expr.hpp"

namespace flashjit::expr {

constexpr std::int32_t wrap(std::int64_t value) { return static_cast<std::int32_t>(value); }

/// A binary operation on ints that gives an int. Truncates like C, wraps, and is 0 where C divides by zero.
constexpr std::int32_t compute(Op op, std::int32_t x, std::int32_t y) {
  const std::int64_t a = x, b = y;
  switch (op) {
    case Op::add:
      return wrap(a + b);
    case Op::subtract:
      return wrap(a - b);
    case Op::multiply:
      return wrap(a * b);
    case Op::divide:
      return y == 0 ? 0 : wrap(a / b);
    case Op::modulo:
      return y == 0 ? 0 : wrap(a % b);
    case Op::shift_left:
      return static_cast<std::int32_t>(static_cast<std::uint32_t>(x) << (y & 31));
    case Op::shift_right:
      return x >> (y & 31);
    case Op::bit_and:
      return x & y;
    case Op::bit_or:
      return x | y;
    case Op::bit_xor:
      return x ^ y;
    case Op::min:
      return x < y ? x : y;
    default:
      return x > y ? x : y;
  }
}

/// A comparison of two of one type.
template <class Value>
constexpr bool compare(Op op, Value x, Value y) {
  switch (op) {
    case Op::equal:
      return x == y;
    case Op::not_equal:
      return x != y;
    case Op::less:
      return x < y;
    case Op::less_equal:
      return x <= y;
    case Op::greater:
      return x > y;
    default:
      return x >= y;
  }
}

/// Truncates and saturates; NaN gives 0.
inline std::int32_t saturate(double value) {
  if (std::isnan(value)) return 0;
  if (value <= std::numeric_limits<std::int32_t>::min()) return std::numeric_limits<std::int32_t>::min();
  if (value >= std::numeric_limits<std::int32_t>::max()) return std::numeric_limits<std::int32_t>::max();
  return static_cast<std::int32_t>(value);
}

}  // namespace flashjit::expr
