// `flashjit tune` as one sees it on a terminal: the bar, Ctrl-C, a GPU that slows down. NVRTC and the driver
// are those of tests/fake; tests/compile has what takes real kernels.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "plan/records.hpp"
#include "tests/support/built.hpp"
#include "tests/support/run_command.hpp"

namespace flashjit {
namespace {

class CommandTune : public ::testing::Test {
 protected:
  static std::string environment(const std::string& more = "") {
    return "FLASHJIT_NVRTC='" + test::built(FLASHJIT_FAKE_NVRTC) + "' FLASHJIT_LIBCUDA='" +
           test::built(FLASHJIT_FAKE_CUDA) + "' " + more;
  }
  static std::string arguments(const std::string& more) {
    return "tune --spec fwd:bf16:d128 --shape b1:hq4:hkv4:sq512:skv512 " + more;
  }
  /// That the cache folder holds and that can be read.
  std::size_t records() const {
    plan::TuningRecords all;
    all.load(folder_.path() / "cache" / "v1" / "tuning");
    return all.size();
  }

  test::TemporaryDirectory folder_;
};

TEST_F(CommandTune, OnATerminalThereIsABarWithTheTimeLeft) {
  test::CommandOnTerminal command(folder_, arguments("--max-candidates 4"), environment());
  const test::CommandResult result = command.finish();
  EXPECT_EQ(result.code, 0) << result.out;
  EXPECT_NE(result.out.find('\r'), std::string::npos) << result.out;
  EXPECT_NE(result.out.find("[######..................] 1/4, "), std::string::npos) << result.out;
  EXPECT_NE(result.out.find("[########################] 4/4, 0 s left: "), std::string::npos) << result.out;
}

TEST_F(CommandTune, CtrlCKeepsWhatIsKnownAndSaysSoInTheExitCode) {
  test::CommandOnTerminal command(folder_, arguments("--exhaustive"), environment("FAKE_NVRTC_MS=20"));
  EXPECT_TRUE(command.shows(" ms, best "));
  command.press_ctrl_c();
  const test::CommandResult result = command.finish();
  EXPECT_EQ(result.code, 130) << result.out;
  EXPECT_NE(result.out.find("interrupted"), std::string::npos) << result.out;
  EXPECT_EQ(records(), 1u) << result.out;
}

TEST_F(CommandTune, AFolderThatCannotBeWrittenIsReportedBeforeAnythingIsMeasured) {
  const auto result = test::run_command(folder_, arguments("--dir /proc/self/no/such"), environment());
  EXPECT_EQ(result.code, 2) << result.err;
  EXPECT_NE(result.err.find("no tuning records can be kept in '/proc/self/no/such'"), std::string::npos)
      << result.err;
  EXPECT_EQ(result.err.find(" ms, best "), std::string::npos) << result.err;
}

TEST_F(CommandTune, AGpuThatSlowsDownIsWarnedOf) {
  const auto warned = [&](const std::string& more) {
    const auto result =
        test::run_command(folder_, arguments("--max-candidates 24 --force"), environment(more));
    EXPECT_EQ(result.code, 0) << result.err;
    return result.err.find("the time of the heuristic's choice moved by") != std::string::npos;
  };
  EXPECT_FALSE(warned(""));
  EXPECT_FALSE(warned("FAKE_CUDA_SLOWER=0.000001"));
  EXPECT_TRUE(warned("FAKE_CUDA_SLOWER=0.00002"));
}

}  // namespace
}  // namespace flashjit
