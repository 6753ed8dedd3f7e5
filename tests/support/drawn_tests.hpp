// Which tests of a program a run has: a twelfth of the cases of each test, drawn by the templates.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "tests/support/spread.hpp"

namespace flashjit::test {

/// Unless the filter names tests: one that leaves some out still does. The first case of each suite, too, so
/// that no test is without any. With FLASHJIT_EVERY_KERNEL=1 all.
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
