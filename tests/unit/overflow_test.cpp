#include "support/overflow.hpp"

#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <vector>

namespace flashjit {
namespace {

/// Around what 31, 32 and 63 bits hold, and numbers of all lengths.
std::vector<std::int64_t> numbers() {
  using Limits = std::numeric_limits<std::int64_t>;
  std::vector<std::int64_t> all = {Limits::min(), Limits::min() + 1, Limits::max(), Limits::max() - 1};
  for (const int bits : {0, 1, 16, 31, 32, 33, 61, 62})
    for (const std::int64_t near : {-1, 0, 1})
      for (const std::int64_t sign : {-1, 1}) all.push_back(sign * ((std::int64_t{1} << bits) + near));
  std::mt19937_64 random(1);
  for (int bits = 1; bits < 64; ++bits) all.push_back(static_cast<std::int64_t>(random()) >> bits);
  return all;
}

TEST(Overflow, IsWhatTheCompilersOwnFunctionsSay) {
  for (const std::int64_t a : numbers())
    for (const std::int64_t b : numbers()) {
      std::int64_t wanted = 0, product = 7, sum = 7;
      const bool too_large = __builtin_mul_overflow(a, b, &wanted);
      EXPECT_EQ(multiply_overflows(a, b, product), too_large) << a << " * " << b;
      EXPECT_EQ(product, too_large ? 7 : wanted) << a << " * " << b;
      const bool too_far = __builtin_add_overflow(a, b, &wanted);
      EXPECT_EQ(add_overflows(a, b, sum), too_far) << a << " + " << b;
      EXPECT_EQ(sum, too_far ? 7 : wanted) << a << " + " << b;
    }
}

}  // namespace
}  // namespace flashjit
