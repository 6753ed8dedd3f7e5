// The runtime of these tests opens the emulator's libcuda and NVRTC.
#include <gtest/gtest.h>

#include <cstdlib>

int main(int argc, char** argv) {
  ::setenv("FLASHJIT_LIBCUDA", FLASHJIT_EMULATED_CUDA, 1);
  ::setenv("FLASHJIT_NVRTC", FLASHJIT_EMULATED_NVRTC, 1);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
