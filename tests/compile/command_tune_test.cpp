// `flashjit tune` from end to end: real kernels, compiled by NVRTC, on two GPUs that only tell times.
#include <gtest/gtest.h>

#include <filesystem>

#include "support/file.hpp"
#include "tests/support/built.hpp"
#include "tests/support/run_command.hpp"

namespace flashjit {
namespace {

namespace fs = std::filesystem;

/// Few candidates, which compile fast.
constexpr const char* kProblem =
    "--spec fwd:fp32:d32 --shape b1:hq4:hkv4:sq256:skv256 --families simt --max-candidates 6";

class CommandTune : public ::testing::Test {
 protected:
  test::CommandResult tune(const std::string& arguments) const {
    return test::run_command(folder_, "tune " + arguments,
                             "FLASHJIT_LIBCUDA='" + test::built(FLASHJIT_FAKE_CUDA) + "'");
  }
  std::string file(const std::string& name) const { return folder_.file(name); }
  std::string text(const std::string& name) const { return read_file(folder_.file(name)); }
  std::size_t records() const {
    std::size_t count = 0;
    for (const auto& entry : fs::recursive_directory_iterator(folder_.path()))
      count +=
          entry.path().extension() == ".json" && entry.path().string().find("tuning") != std::string::npos;
    return count;
  }

  test::TemporaryDirectory folder_;
};

TEST_F(CommandTune, WritesARecordThatTheRuntimeAndTheNextRunTake) {
  const auto first =
      tune(std::string(kProblem) + " --json --report " + file("page.html") + " --ship " + file("ship.txt"));
  ASSERT_EQ(first.code, 0) << first.err;
  const auto problem = first.json()["problems"][0];
  EXPECT_EQ(problem["ending"], "complete") << problem.dump(2);
  EXPECT_LE(problem["measured"], 6);
  EXPECT_GT(problem["best_ms"], 0);
  for (const auto& timing : problem["timings"]) {
    const double ms = timing["ms"];
    EXPECT_TRUE(ms == 0 || ms >= 0.99 * problem["best_ms"].get<double>()) << timing.dump();
    EXPECT_GT(timing["predicted_ms"], 0) << timing.dump();
  }
  EXPECT_EQ(records(), 1u);
  EXPECT_NE(first.err.find("best"), std::string::npos) << "progress, a line a candidate: " << first.err;
  EXPECT_EQ(first.err.find('\r'), std::string::npos) << "no bar where there is no terminal";

  EXPECT_NE(text("page.html").find("simt: fastest of each"), std::string::npos);
  EXPECT_NE(text("ship.txt").find("device Fake GPU\n"), std::string::npos);
  const std::string line =
      "fwd:fp32:d32 b1:hq4:hkv4:sq256:skv256 " + problem["best"].get<std::string>() + "\n";
  EXPECT_TRUE(text("ship.txt").ends_with(line)) << text("ship.txt");

  const auto again = tune(std::string(kProblem) + " --json");
  EXPECT_EQ(again.json()["problems"][0]["ending"], "already tuned");
  EXPECT_EQ(again.json()["problems"][0]["measured"], 0);
}

TEST_F(CommandTune, MeasuresTangentsAndTangentsOfGradients) {
  const auto result = tune(
      "--spec 'jvp:fp32:d32:score{w: fp32 1d grad; score * w[h]}' bwd_jvp:fp32:d32 "
      "--shape b1:hq4:hkv2:sq256:skv256 --max-candidates 3 --json");
  ASSERT_EQ(result.code, 0) << result.err;
  for (const auto& problem : result.json()["problems"]) {
    EXPECT_EQ(problem["ending"], "complete") << problem.dump(2);
    EXPECT_GT(problem["measured"], 0);
    EXPECT_GT(problem["best_ms"], 0);
  }
  EXPECT_EQ(records(), 2u);
}

TEST_F(CommandTune, TellsHowTheGpuFared) {
  const auto without = tune(std::string(kProblem) + " --json");
  EXPECT_TRUE(without.json()["problems"][0]["clock_mhz"].is_null()) << without.out;
  EXPECT_EQ(without.err.find("clock"), std::string::npos) << without.err;

  fs::create_directory(file("lib"));
  fs::create_symlink(test::built(FLASHJIT_FAKE_NVML), file("lib/libnvidia-ml.so.1"));
  const auto result = test::run_command(
      folder_, "tune --force --json " + std::string(kProblem) + " --report " + file("page.html"),
      "FLASHJIT_LIBCUDA='" + test::built(FLASHJIT_FAKE_CUDA) + "' LD_LIBRARY_PATH='" + file("lib") + "'");
  ASSERT_EQ(result.code, 0) << result.err;
  const auto problem = result.json()["problems"][0];
  EXPECT_EQ(problem["clock_mhz"]["first"], 1980) << problem.dump(2);
  EXPECT_LT(problem["clock_mhz"]["last"], 1980);
  EXPECT_EQ(problem["celsius"]["least"], 35);
  EXPECT_EQ(problem["slowed_by"], "the power limit");
  const std::string told = "clock 1980 -> ";
  EXPECT_NE(result.err.find(told), std::string::npos) << result.err;
  EXPECT_NE(text("page.html").find("While measuring: clock 1980 -&gt; "), std::string::npos);
}

TEST_F(CommandTune, SeveralGpusShareTheProblems) {
  write_file_atomically(file("suite.txt"),
                        "fwd:fp32:d32 b1:hq4:hkv4:sq256:skv256\nfwd:fp32:d32 b1:hq2:hkv2:sq100:skv300\n"
                        "fwd:fp32:d32 b2:hq1:hkv1:sq64:skv64\n");
  const auto result =
      tune("--suite " + file("suite.txt") + " --families simt --max-candidates 2 --device all --json");
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.json()["problems"].size(), 3u);
  EXPECT_EQ(result.json()["problems"][1]["shape"], "b1:hq2:hkv2:sq100:skv300") << "in the order of the suite";
  EXPECT_EQ(records(), 3u);
  EXPECT_NE(result.err.find("GPU 0: "), std::string::npos) << result.err;
  EXPECT_NE(result.err.find("GPU 1: "), std::string::npos) << result.err;

  const auto missing = tune(std::string(kProblem) + " --device 0,2");
  EXPECT_EQ(missing.code, 2);
  EXPECT_NE(missing.err.find("--device is '2'; there are 2 devices"), std::string::npos) << missing.err;
}

TEST_F(CommandTune, ABudgetKeepsWhatIsKnown) {
  const auto result = tune(std::string(kProblem) + " --json --budget 0.001");
  const auto first = result.json()["problems"][0];
  EXPECT_LE(first.value("measured", 0), 1) << result.err;
  EXPECT_EQ(records(), first.value("measured", 0)) << result.out;
  const auto more = tune(std::string(kProblem) + " --json");
  const auto second = more.json()["problems"][0];
  EXPECT_EQ(second["ending"], "complete") << more.err;
  EXPECT_EQ(second["measured"].get<int>() + first.value("measured", 0), 6)
      << "what is known is not measured again";
}

}  // namespace
}  // namespace flashjit
