// The runtime of these tests opens the emulator's libcuda and NVRTC. FLASHJIT_LIBCUDA=libcuda.so.1 runs them
// on a GPU, with the NVRTC that is found.
#include <gtest/gtest.h>

#include <cstdlib>

#include "tests/support/built.hpp"
#include "tests/support/drawn_tests.hpp"

int main(int argc, char** argv) {
  if (std::getenv("FLASHJIT_LIBCUDA") == nullptr) {
    ::setenv("FLASHJIT_LIBCUDA", flashjit::test::built(FLASHJIT_EMULATED_CUDA).c_str(), 1);
    ::setenv("FLASHJIT_NVRTC", flashjit::test::built(FLASHJIT_EMULATED_NVRTC).c_str(), 1);
  }
  testing::InitGoogleTest(&argc, argv);
  flashjit::test::draw_tests();
  return RUN_ALL_TESTS();
}
