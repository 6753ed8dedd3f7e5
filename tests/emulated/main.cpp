// The runtime of these tests opens the emulator's libcuda and NVRTC. FLASHJIT_LIBCUDA=libcuda.so.1 runs them
// on a GPU, with the NVRTC that is found. Without a filter, or with one that only leaves out tests, a run has
// a twelfth of the cases of each test, drawn by the templates; with FLASHJIT_EVERY_KERNEL=1 all.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "tests/support/built.hpp"
#include "tests/support/spread.hpp"

namespace {

/// The first case, too, so that no test is without any.
std::string drawn_tests() {
  constexpr int kAlways = 1;
  std::string filter;
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  for (int i = 0; i < all.total_test_suite_count(); ++i) {
    const testing::TestSuite& suite = *all.GetTestSuite(i);
    for (int j = 0; j < suite.total_test_count(); ++j) {
      const testing::TestInfo& test = *suite.GetTestInfo(j);
      const std::string name = std::string(suite.name()) + "." + test.name();
      if (test.value_param() == nullptr || j < kAlways || flashjit::test::is_drawn(name, 12))
        filter += name + ":";
    }
  }
  return filter;
}

}  // namespace

int main(int argc, char** argv) {
  if (std::getenv("FLASHJIT_LIBCUDA") == nullptr) {
    ::setenv("FLASHJIT_LIBCUDA", flashjit::test::built(FLASHJIT_EMULATED_CUDA).c_str(), 1);
    ::setenv("FLASHJIT_NVRTC", flashjit::test::built(FLASHJIT_EMULATED_NVRTC).c_str(), 1);
  }
  testing::InitGoogleTest(&argc, argv);
  const std::string filter = GTEST_FLAG_GET(filter);
  if (filter == "*" || filter.starts_with('-'))
    GTEST_FLAG_SET(filter, drawn_tests() + (filter == "*" ? "" : filter));
  return RUN_ALL_TESTS();
}
