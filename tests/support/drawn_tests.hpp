// Which tests a program runs: a twelfth of each test's cases, drawn by the templates' text.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "tests/support/spread.hpp"

namespace flashjit::test {

/// Draws cases unless the filter names tests; a filter that only leaves some out still draws. The first case
/// of each suite always runs, so no test is left without any. FLASHJIT_EVERY_KERNEL=1 runs all.
inline void draw_tests() {
  constexpr int kAlways = 1;
  const std::string given = GTEST_FLAG_GET(filter);
  if (given != "*" && !given.starts_with('-')) return;
  std::string filter;
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  for (int i = 0; i < all.total_test_suite_count(); ++i) {
    const testing::TestSuite& suite = *all.GetTestSuite(i);
    for (int j = 0; j < suite.total_test_count(); ++j) {
      const testing::TestInfo& test = *suite.GetTestInfo(j);
      const std::string name = std::string(suite.name()) + "." + test.name();
      if (test.value_param() == nullptr || j < kAlways || is_drawn(name, 12)) filter += name + ":";
    }
  }
  GTEST_FLAG_SET(filter, filter + (given == "*" ? "" : given));
}

}  // namespace flashjit::test
