// tools/count_tests.awk, which sums a test run: nothing that went wrong may be counted as passed.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>

namespace {

struct Count {
  std::string all, last_line;
  int exit_code = -1;
};

/// Runs the script on a log of `ctest --verbose` that ended with `status`.
Count count(const std::string& log, int status) {
  std::string path = (std::filesystem::temp_directory_path() / "flashjit_log_XXXXXX").string();
  const int file = mkstemp(path.data());
  EXPECT_GE(file, 0);
  close(file);
  std::ofstream(path) << log;
  const std::string command = "awk -v status=" + std::to_string(status) +
                              " -f '" FLASHJIT_SOURCE_DIR "/tools/count_tests.awk' '" + path + "'";
  FILE* pipe = popen(command.c_str(), "r");
  Count result;
  for (std::array<char, 256> line; std::fgets(line.data(), line.size(), pipe);)
    result.all += result.last_line = line.data();
  result.exit_code = WEXITSTATUS(pclose(pipe));
  std::filesystem::remove(path);
  return result;
}

const std::string kStart = "      Start  1: unit\n\n1: Test command: /b/unit\n";
const std::string kRunThree = "1: [==========] Running 3 tests from 1 test suite.\n";
const std::string kOk = "1: [       OK ] A.a (0 ms)\n";
const std::string kSkipped = "1: [  SKIPPED ] A.b (0 ms)\n";
const std::string kFailed = "1: [  FAILED  ] A.c/0, where GetParam() = \"x y\" (12 ms)\n";
const std::string kSummaryOfFailed =
    "1: [  FAILED  ] 1 test, listed below:\n1: [  FAILED  ] A.c/0, where ...\n";
const std::string kPassedTest = "1/1 Test  #1: unit .............................   Passed    0.00 sec\n";
const std::string kFailedTest = "1/1 Test  #1: unit .............................***Failed    0.00 sec\n";

TEST(CountTests, SumsTestByTest) {
  const Count all_well =
      count(kStart + kRunThree + kOk + kSkipped + "1: noise" + kOk.substr(3) + kPassedTest, 0);
  EXPECT_EQ(all_well.last_line, "2 passed, 0 failed, 1 skipped\n");
  EXPECT_EQ(all_well.exit_code, 0);

  const Count one_failed =
      count(kStart + kRunThree + kOk + kSkipped + kFailed + kSummaryOfFailed + kFailedTest, 8);
  EXPECT_EQ(one_failed.last_line, "1 passed, 1 failed, 1 skipped\n");
  EXPECT_EQ(one_failed.exit_code, 1);
}

TEST(CountTests, WhatAFailedTestPrintedStandsBeforeTheSum) {
  const std::string run = "1: [ RUN      ] A.", why = "1: a.cpp:7: Failure\n";
  const Count one_failed = count(kStart + kRunThree + run + "a\n1: chatter\n" + kOk + run + "c/0\n" + why +
                                     kFailed + kSkipped + kFailedTest,
                                 8);
  EXPECT_EQ(one_failed.all,
            run + "c/0\n" + why + kFailed + "failed: unit (1)\n1 passed, 1 failed, 1 skipped\n");
}

TEST(CountTests, PytestCountsTestByTest) {
  const Count all_well = count(kStart + "1: 35 passed, 3 skipped in 0.31s\n" + kPassedTest, 0);
  EXPECT_EQ(all_well.last_line, "35 passed, 0 failed, 3 skipped\n");
  EXPECT_EQ(all_well.exit_code, 0);
  const Count some_failed =
      count(kStart + "1: 1 failed, 34 passed, 3 skipped, 2 errors in 70.31s (0:01:10)\n" + kFailedTest, 8);
  EXPECT_EQ(some_failed.last_line, "34 passed, 3 failed, 3 skipped\n");
  EXPECT_EQ(some_failed.exit_code, 1);
}

TEST(CountTests, WhatDidNotReportFailed) {
  const std::string crash = "1/1 Test  #1: unit ..............Subprocess aborted***Exception:   0.00 sec\n";
  EXPECT_EQ(count(kStart + kRunThree + kOk + crash, 8).last_line, "1 passed, 2 failed, 0 skipped\n");
  // A test that called exit(0): ctest is content.
  EXPECT_EQ(count(kStart + kRunThree + kOk + kPassedTest, 0).last_line, "1 passed, 2 failed, 0 skipped\n");
  // ctest was killed.
  EXPECT_EQ(count(kStart + kRunThree + kOk, 0).exit_code, 1);
  EXPECT_EQ(count("", 0).last_line, "0 passed, 1 failed, 0 skipped\n");
  // A test binary that no test was linked into.
  EXPECT_EQ(
      count(kStart + "1: [==========] Running 0 tests from 0 test suites.\n" + kPassedTest, 0).exit_code, 1);
  // All passed, and then the process crashed at its end.
  EXPECT_EQ(count(kStart + kRunThree + kOk + kOk + kOk + crash, 8).last_line,
            "3 passed, 1 failed, 0 skipped\n");
}

TEST(CountTests, OtherProgramsCountAsOne) {
  EXPECT_EQ(count(kStart + kPassedTest, 0).last_line, "1 passed, 0 failed, 0 skipped\n");
  EXPECT_EQ(count(kStart + "1/1 Test  #1: unit ........***Skipped   0.00 sec\n", 0).last_line,
            "0 passed, 0 failed, 1 skipped\n");
  for (const std::string verdict : {"***Failed ", "***Not Run ", "***Timeout ", "***Exception: SegFault "}) {
    EXPECT_EQ(count(kStart + "1/1 Test  #1: unit ........" + verdict + "  0.00 sec\n", 8).last_line,
              "0 passed, 1 failed, 0 skipped\n")
        << verdict;
  }
}

}  // namespace
