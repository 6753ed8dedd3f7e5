// `flashjit tune` on real devices, side by side where there are two.
#include <gtest/gtest.h>

#include <string>

#include "cache/store.hpp"
#include "plan/records.hpp"
#include "support/file.hpp"
#include "tests/support/gpu_support.hpp"
#include "tests/support/run_command.hpp"

namespace flashjit::test {
namespace {

class CommandTune : public GpuTest {
 protected:
  /// Three small problems with few candidates of the portable family, which compile fast.
  test::CommandResult tune(const std::string& devices) const {
    write_file_atomically(
        folder_.file("suite.txt"),
        "fwd:bf16:d64 b1:hq4:hkv4:sq512:skv512\nfwd:bf16:d64:causal b1:hq4:hkv4:sq512:skv512\n"
        "bwd:bf16:d64 b1:hq4:hkv4:sq512:skv512\n");
    return test::run_command(folder_,
                             "tune --json --families sm80 --max-candidates 2 --device " + devices +
                                 " --suite " + folder_.file("suite.txt"),
                             "FLASHJIT_LIBCUDA='" + read_environment().libcuda + "'");
  }
  /// Every problem has a best and a record that plans on this device take.
  void expect_all_tuned(const test::CommandResult& result) const {
    ASSERT_EQ(result.code, 0) << result.err;
    plan::TuningRecords records;
    records.load(cache::Store(folder_.file("cache"), cache::Store::Access::read_only).records_folder());
    const auto problems = result.json()["problems"];
    ASSERT_EQ(problems.size(), 3u) << result.out;
    for (const auto& problem : problems) {
      EXPECT_GT(problem["best_ms"], 0) << problem.dump(2);
      const KernelSpec spec = parse_spec(problem["spec"].get<std::string>());
      const auto match = records.find(spec, parse_shape(problem["shape"].get<std::string>()), gpu().info);
      ASSERT_TRUE(match.record) << problem.dump(2);
      EXPECT_TRUE(match.exact) << "of this device and driver";
      EXPECT_EQ(to_string(match.record->best), problem["best"]);
    }
  }

  test::TemporaryDirectory folder_;
};

TEST_F(CommandTune, WritesRecordsThatPlansTake) { expect_all_tuned(tune("0")); }

TEST_F(CommandTune, TellsHowTheGpuFared) {
  const auto result = tune("0");
  const auto problem = result.json()["problems"][0];
  if (problem["clock_mhz"].is_null()) GTEST_SKIP() << "there is no NVML here that knows the GPU";
  EXPECT_GT(problem["clock_mhz"]["least"], 100) << problem.dump(2);
  EXPECT_LT(problem["clock_mhz"]["most"], 5000);
  EXPECT_GT(problem["celsius"]["least"], 5);
  EXPECT_LT(problem["celsius"]["most"], 120);
  EXPECT_NE(result.err.find("clock "), std::string::npos) << result.err;
}

TEST_F(CommandTune, TwoDevicesTakeTheProblemsSideBySide) {
  if (device::device_count(*gpu().driver()) < 2) GTEST_SKIP() << "needs two GPUs; here is one";
  const auto result = tune("0,1");
  expect_all_tuned(result);
  for (const char* device : {"GPU 0: ", "GPU 1: "})
    EXPECT_NE(result.err.find(device), std::string::npos) << result.err;
}

}  // namespace
}  // namespace flashjit::test
