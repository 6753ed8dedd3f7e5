// Tests that all skip themselves, as without a GPU, end with 77: ctest then counts them as skipped.
#include <gtest/gtest.h>

#include "tests/support/drawn_tests.hpp"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  flashjit::test::draw_tests();
  const int status = RUN_ALL_TESTS();
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  const bool nothing_ran = all.successful_test_count() == 0 && all.skipped_test_count() > 0;
  return status == 0 && nothing_ran ? 77 : status;
}
