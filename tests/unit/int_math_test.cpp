#include "templates/common/int_math.cuh"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace flashjit {
namespace {

constexpr int kLeast = std::numeric_limits<int>::min(), kMost = std::numeric_limits<int>::max();

/// Around zero, around each power of two, and at random.
std::vector<int> edges_and_others() {
  std::vector<int> all;
  for (int bit = 0; bit < 32; ++bit)
    for (unsigned near = 0; near < 4; ++near)
      for (const unsigned value : {(1u << bit) + near, (1u << bit) - near})
        for (const unsigned sized : {value, 0u - value}) all.push_back(static_cast<int>(sized));
  for (const int extreme : {kLeast, kLeast + 1, kMost, kMost - 1}) all.push_back(extreme);
  std::mt19937 random(1);
  for (int i = 0; i < 1000; ++i) all.push_back(static_cast<int>(random() >> random() % 32));
  return all;
}

TEST(IntMath, ADivisorDividesLikeTheOperators) {
  const std::vector<int> values = edges_and_others();
  for (const int by : values) {
    const Divisor divisor(by);
    const Multiples multiples(by);
    for (const int a : values) {
      ASSERT_EQ(divisor.quotient(a), wrap_divide(a, by)) << a << " / " << by;
      ASSERT_EQ(divisor.rest(a), wrap_modulo(a, by)) << a << " % " << by;
      ASSERT_EQ(multiples.contain(a), wrap_modulo(a, by) == 0) << a << " % " << by;
    }
    // Where the quotient changes.
    const std::int64_t size = magnitude(by);
    for (std::int64_t times = 1; size > 1 && times * size <= kMost; times = times * 5 / 2 + 1)
      for (const std::int64_t a : {times * size - 1, times * size, -times * size, -times * size + 1}) {
        const int n = static_cast<int>(a);
        ASSERT_EQ(divisor.quotient(n), wrap_divide(n, by)) << a << " / " << by;
        ASSERT_EQ(divisor.rest(n), wrap_modulo(n, by)) << a << " % " << by;
        ASSERT_EQ(multiples.contain(n), wrap_modulo(n, by) == 0) << a << " % " << by;
      }
  }
}

TEST(IntMath, NaturalNumbersDivideLikeInts) {
  const std::vector<int> values = edges_and_others();
  for (const int by : values) {
    const NaturalDivisor divisor(by);
    const auto check = [&](int a) {
      ASSERT_EQ(divisor.quotient(a), wrap_divide(a, by)) << a << " / " << by;
      ASSERT_EQ(divisor.rest(a), wrap_modulo(a, by)) << a << " % " << by;
      if (by <= 0) return;
      ASSERT_EQ(natural_divide(a, by), wrap_divide(a, by)) << a << " / " << by;
      ASSERT_EQ(natural_modulo(a, by), wrap_modulo(a, by)) << a << " % " << by;
    };
    for (const int a : values)
      if (a >= 0) check(a);
    // Where the quotient changes.
    const std::int64_t size = magnitude(by);
    for (std::int64_t times = 1; size > 1 && times * size <= kMost; times = times * 5 / 2 + 1)
      for (const std::int64_t a : {times * size - 1, times * size}) check(static_cast<int>(a));
  }
}

TEST(IntMath, SmallDivisorsDivideEverythingTheyMeet) {
  for (int by = -40; by <= 40; ++by) {
    const Divisor divisor(by);
    const NaturalDivisor natural(by);
    const Multiples multiples(by);
    for (int a = -70000; a <= 70000; ++a) {
      if (a >= 0) {
        ASSERT_EQ(natural.quotient(a), wrap_divide(a, by)) << a << " / " << by;
        ASSERT_EQ(natural.rest(a), wrap_modulo(a, by)) << a << " % " << by;
      }
      ASSERT_EQ(divisor.quotient(a), wrap_divide(a, by)) << a << " / " << by;
      ASSERT_EQ(divisor.rest(a), wrap_modulo(a, by)) << a << " % " << by;
      ASSERT_EQ(multiples.contain(a), wrap_modulo(a, by) == 0) << a << " % " << by;
    }
  }
}

}  // namespace
}  // namespace flashjit
