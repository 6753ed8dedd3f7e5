// Products and sums of sizes that nothing bounds, in C++ alone: compilers have different functions for them.
#pragma once

#include <cstdint>
#include <limits>

namespace flashjit {

/// Whether a * b leaves 64 bits; if not, `product` is set to it.
constexpr bool multiply_overflows(std::int64_t a, std::int64_t b, std::int64_t& product) {
  using Limits = std::numeric_limits<std::int64_t>;
  const auto has_32_bits = [](std::int64_t x) { return x == static_cast<std::int32_t>(x); };
  if (!has_32_bits(a) || !has_32_bits(b)) {  // the others need no division
    if (a > 0 && (b > 0 ? a > Limits::max() / b : b < Limits::min() / a)) return true;
    if (a < 0 && (b > 0 ? a < Limits::min() / b : b < Limits::max() / a)) return true;
  }
  product = a * b;
  return false;
}

/// Whether a + b leaves 64 bits; if not, `sum` is set to it.
constexpr bool add_overflows(std::int64_t a, std::int64_t b, std::int64_t& sum) {
  using Limits = std::numeric_limits<std::int64_t>;
  if (b > 0 ? a > Limits::max() - b : a < Limits::min() - b) return true;
  sum = a + b;
  return false;
}

}  // namespace flashjit
