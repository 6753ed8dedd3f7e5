// Tuning in a running service from end to end: real kernels, compiled by NVRTC, on a GPU that only tells
// times.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>

#include "device/resources.hpp"
#include "flashjit/flashjit.hpp"
#include "tests/support/built.hpp"
#include "tests/support/kept_log.hpp"
#include "tests/support/run_command.hpp"

namespace flashjit {
namespace {

const KernelSpec kSpec{{.dtype = DType::fp32, .head_dim = 32}};
constexpr AttentionShape kShape{1, 4, 4, 256, 256};

class Background : public ::testing::Test {
 protected:
  Background() { setenv("FLASHJIT_LIBCUDA", test::built(FLASHJIT_FAKE_CUDA).c_str(), 1); }
  ~Background() override { unsetenv("FLASHJIT_LIBCUDA"); }

  Runtime runtime(bool tune) {
    return Runtime({.cache_dir = folder_.file("cache"), .tune_in_background = tune, .log = log_.writer()});
  }

  test::TemporaryDirectory folder_;
  test::KeptLog log_;
};

TEST_F(Background, AShapeInUseIsTunedAndTheRecordIsKept) {
  const device::PrimaryContext gpu(device::Driver::open(test::built(FLASHJIT_FAKE_CUDA)));
  {
    Runtime tuning = runtime(true);
    EXPECT_EQ(tuning.prepare(kSpec, kShape).config_source, ConfigSource::heuristic);
    const auto start = std::chrono::steady_clock::now();
    ConfigSource source = ConfigSource::heuristic;
    while (source != ConfigSource::tuned &&
           std::chrono::steady_clock::now() - start < std::chrono::seconds(60)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      source = tuning.prepare(kSpec, kShape).config_source;
    }
    EXPECT_EQ(source, ConfigSource::tuned) << log_.text();
    EXPECT_TRUE(log_.has("tuned fwd:fp32:d32 at b1:hq4:hkv4:sq256:skv256 in the background")) << log_.text();
  }
  Runtime next = runtime(false);
  EXPECT_EQ(next.prepare(kSpec, kShape).config_source, ConfigSource::tuned);
}

TEST_F(Background, ARuntimeThatIsDestroyedMeanwhileEndsSoon) {
  const device::PrimaryContext gpu(device::Driver::open(test::built(FLASHJIT_FAKE_CUDA)));
  const KernelSpec slow{{.dtype = DType::bf16, .head_dim = 128}};
  const auto start = std::chrono::steady_clock::now();
  { runtime(true).prepare(slow, {1, 8, 8, 1024, 1024}); }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
  EXPECT_FALSE(log_.has("cannot tune")) << log_.text();
}

}  // namespace
}  // namespace flashjit
