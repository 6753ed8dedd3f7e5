// The debug mode of captured tensors' indices: what its kernels print, in a process of their own.
#include <gtest/gtest.h>

#include <string>

#include "tests/support/gpu_support.hpp"
#include "tests/support/run_command.hpp"

namespace flashjit::test {
namespace {

class CheckIndices : public GpuTest {
 protected:
  /// Both passes of one small problem with this score; what was printed.
  std::string printed(const std::string& score, const std::string& mode) {
    return verified("b1:hq2:hkv1:sq5:skv6", "bwd:bf16:d64:score{t: fp32 1d; " + score + "}", mode);
  }
  std::string verified(const std::string& shape, const std::string& spec, const std::string& mode) {
    const test::CommandResult result = test::run_command(
        folder_, "verify --shape " + shape + " --spec '" + spec + "'",
        "FLASHJIT_LIBCUDA='" + read_environment().libcuda + "' FLASHJIT_CHECK_INDICES=" + mode);
    EXPECT_EQ(result.code, 0) << result.out << result.err;
    return result.out;
  }
  static bool says(const std::string& text, const std::string& what) {
    return text.find(what) != std::string::npos;
  }

  test::TemporaryDirectory folder_;
};

TEST_F(CheckIndices, TellsOfEachThatIsOutOfRangeAndWhere) {
  const std::string text = printed("score + t[kv - q - 6]", "on");
  for (const char* place : {"index -6 of dimension 0 of the captured tensor 't' is not in [0, ",
                            "at b 0, h 0, q 0, kv 0;", "at b 0, h 1, q 4, kv 5;"})
    EXPECT_TRUE(says(text, place)) << place << "\n" << text;
  EXPECT_FALSE(says(text, "kv 6")) << "a pair past the end was told of\n" << text;
}

TEST_F(CheckIndices, SaysNothingOfWhatIsInRange) {
  EXPECT_FALSE(says(printed("score + t[0]", "on"), "captured tensor"));
}

TEST_F(CheckIndices, TellsOfEntriesOfListsThatAreNoKeys) {
  const std::string shape = "b1:hq2:hkv1:sq9:skv64", spec = "fwd:bf16:d64:indices";
  EXPECT_TRUE(says(verified(shape, spec, "on"), "which has 64 keys; it is none"));
  EXPECT_FALSE(says(verified(shape, spec, "off"), "it is none"));
}

// Tiles of a dense bias are not copied then, and the planner's shared memory is the kernel's.
TEST_F(CheckIndices, DenseBiasesAreReadElementByElement) {
  for (const char* dims : {"d64", "d96", "d128", "d256"}) {
    const std::string spec = "bwd:bf16:" + std::string(dims) + ":score{bias: bf16 2d; score + bias[q, kv]}";
    EXPECT_FALSE(says(verified("b1:hq4:hkv4:sq200:skv300", spec, "on"), "captured tensor")) << dims;
  }
}

TEST_F(CheckIndices, SaysNothingWhereNobodyAsked) {
  EXPECT_FALSE(says(printed("score + t[kv - q - 6]", "off"), "captured tensor"));
}

}  // namespace
}  // namespace flashjit::test
