// The debug mode of waits: kernels that are right stay so, and one that would hang ends with an error. Each
// in a process of its own, whose context may be lost, and which is ended when it hangs all the same.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "support/built.hpp"
#include "tests/support/gpu_support.hpp"
#include "tests/support/run_command.hpp"

namespace flashjit::test {
namespace {

namespace fs = std::filesystem;

class CheckWaits : public GpuTest {
 protected:
  test::CommandResult verify(const std::string& arguments) {
    return test::run_command(
        folder_, "verify " + arguments,
        fmt::format("FLASHJIT_LIBCUDA='{}' FLASHJIT_CHECK_WAITS=on {} timeout -s KILL 60",
                    read_environment().libcuda, templates_));
  }
  /// From now on kernels are made of templates in which `was`, which occurs once, is `is`.
  void change_template(const std::string& name, const std::string& was, const std::string& is) {
    const fs::path copy = folder_.path() / "templates";
    fs::copy(test::sources() + "/templates", copy, fs::copy_options::recursive);
    std::string text = read_file((copy / name).string());
    const std::size_t at = text.find(was);
    ASSERT_NE(at, text.npos) << name << " has no '" << was << "'";
    ASSERT_EQ(text.find(was, at + 1), text.npos) << name << " has more than one '" << was << "'";
    std::ofstream(copy / name) << text.replace(at, was.size(), is);
    templates_ = fmt::format("FLASHJIT_TEMPLATE_DIR='{}'", copy.string());
  }
  void expect_launch_error(const std::string& arguments) {
    const test::CommandResult result = verify(arguments);
    EXPECT_EQ(result.code, 4) << "137: it hung\n" << result.out << result.err;
    const auto says = [&](const char* what) { return result.err.find(what) != std::string::npos; };
    EXPECT_TRUE(says("CUDA_ERROR_LAUNCH_FAILED") || says("CUDA_ERROR_ILLEGAL_INSTRUCTION")) << result.err;
  }
  static bool is_hopper() { return gpu().info.arch == "sm_90a"; }

 private:
  test::TemporaryDirectory folder_;
  std::string templates_;
};

TEST_F(CheckWaits, LeavesResultsRight) {
  for (const char* spec :
       {"bf16:d64", "fp16:d128:causal", "bf16:d128:det", "bf16:d256:causal:det",
        "bwd:bf16:d64:det --config sm80:br32:bc64:w4", "bwd:bf16:d128:causal --config sm90:br64:bc256:w8:s2",
        "bwd:fp16:d64 --config sm90:br128:bc512:w8:s2"}) {
    const test::CommandResult result =
        verify(fmt::format("--shape b1:hq4:hkv2:sq700:skv900 --spec {}", spec));
    EXPECT_EQ(result.code, 0) << spec << "\n" << result.out << result.err;
  }
}

TEST_F(CheckWaits, EndABarrierThatIsNeverComplete) {
  if (!is_hopper()) GTEST_SKIP() << "only kernels for sm_90a have mbarriers";
  change_template("async/mbarrier.cuh", "\"r\"(barrier), \"r\"(bytes)", "\"r\"(barrier), \"r\"(bytes + 16)");
  expect_launch_error("--spec fwd:bf16:d64 --shape b1:hq1:hkv1:sq128:skv128");
}

TEST_F(CheckWaits, EndATurnThatNeverComesOnHopper) {
  if (!is_hopper()) GTEST_SKIP() << "needs sm_90a";
  change_template("sm90/backward_dq.cuh", "atomicAdd(semaphore, 1);", "");
  expect_launch_error("--spec bwd:bf16:d64:det --shape b1:hq1:hkv1:sq64:skv1024");
}

TEST_F(CheckWaits, EndASumThatIsNeverRead) {
  if (!is_hopper()) GTEST_SKIP() << "needs sm_90a";
  change_template("sm90/backward_dq.cuh", "barrier_arrive_remote(in_cta(smem.dq_read(i), lane));", "{}");
  expect_launch_error("--spec bwd:bf16:d64 --shape b1:hq1:hkv1:sq400:skv200 --config sm90:br64:bc256:w8:s2");
}

TEST_F(CheckWaits, EndAHeadThatIsNeverDone) {
  if (!is_hopper()) GTEST_SKIP() << "needs sm_90a";
  change_template("sm90/backward_dq.cuh", "atomicAdd(done, 1);", "");
  expect_launch_error("--spec bwd:bf16:d64 --shape b1:hq1:hkv1:sq64:skv64");
}

TEST_F(CheckWaits, EndATurnThatNeverComes) {
  if (gpu().info.compute_capability < 80) GTEST_SKIP() << "needs sm_80";
  change_template("sm80/backward_dq.cuh", "if (threadIdx.x == 0) atomicAdd(semaphore, 1);", "");
  expect_launch_error("--spec bwd:bf16:d64:det --shape b1:hq1:hkv1:sq64:skv1024 --config sm80:br32:bc64:w4");
}

}  // namespace
}  // namespace flashjit::test
