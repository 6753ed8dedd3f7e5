// Calls whose kernel is compiled in the background, with a slow NVRTC: another configuration computes them
// meanwhile.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <future>
#include <thread>

#include "call/engine.hpp"
#include "plan/plain_config.hpp"
#include "plan/plan.hpp"
#include "support/file.hpp"
#include "support/worker.hpp"
#include "tests/support/built.hpp"
#include "tests/support/fakes.hpp"
#include "tests/support/kept_log.hpp"

namespace flashjit {
namespace {

namespace fs = std::filesystem;
using test::FakeDriver;
using test::Variable;

constexpr AttentionShape kShort{1, 2, 2, 128, 128}, kLong{4, 32, 8, 4096, 4096};

class Fallback : public testing::Test {
 protected:
  Fallback() {
    fs::create_directories(folder_);
    fake().reset();
  }
  ~Fallback() override { fs::remove_all(folder_); }

  static FakeDriver& fake() { return FakeDriver::state(); }

  static AttentionSpec spec() { return {.dtype = DType::bf16, .head_dim = 64}; }

  Settings settings() {
    Settings settings;
    settings.cache_dir = (folder_ / "cache").string();
    settings.cache_limit = std::uint64_t{1} << 40;
    settings.nvrtc = test::built(FLASHJIT_FAKE_NVRTC);
    settings.compile_in_background = true;
    settings.log = log_.writer();
    return settings;
  }
  std::unique_ptr<Engine> engine() { return engine(settings()); }
  static std::unique_ptr<Engine> engine(Settings settings) {
    return std::make_unique<Engine>(std::move(settings), FakeDriver::driver());
  }

  static void call(Engine& engine, const AttentionSpec& spec, const AttentionShape& s) {
    const auto at = [](std::uintptr_t address) { return reinterpret_cast<void*>(address); };
    ForwardArgs args{.q = ConstTensorView::bhsd(at(0x1000000000), s.batch, s.heads_q, s.seqlen_q, 64),
                     .k = ConstTensorView::bhsd(at(0x2000000000), s.batch, s.heads_kv, s.seqlen_kv, 64),
                     .v = ConstTensorView::bhsd(at(0x3000000000), s.batch, s.heads_kv, s.seqlen_kv, 64),
                     .out = TensorView::bhsd(at(0x4000000000), s.batch, s.heads_q, s.seqlen_q, 64)};
    args.workspace = {at(0x9000000000), engine.workspace_bytes({spec, Pass::forward}, s)};
    engine.forward(spec, args, nullptr);
  }

  /// The two shapes choose two configurations.
  static void expect_two_configs() {
    const DeviceInfo info = device::query_device(*FakeDriver::driver(), 0);
    const auto config = [&](const AttentionShape& shape) {
      return plan::make_plan(KernelSpec{spec(), Pass::forward}, shape, info, {}).config;
    };
    ASSERT_NE(config(kShort), config(kLong));
  }

  bool is_in_memory(Engine& engine, const AttentionShape& shape) {
    return engine.prepare({spec(), Pass::forward}, shape, {}).origin == KernelOrigin::memory;
  }

  const fs::path folder_ = fs::temp_directory_path() / ("flashjit-fallback-" + unique_suffix());
  test::KeptLog log_;
};

TEST_F(Fallback, ACallDoesNotWaitForTheCompiler) {
  expect_two_configs();
  const auto runtime = engine();
  runtime->prepare({spec(), Pass::forward}, kShort, {});
  log_.clear();
  const std::size_t workspace = runtime->workspace_bytes({spec(), Pass::forward}, kLong);
  const Variable slow("FAKE_NVRTC_MS", "1500");
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 3; ++i) call(*runtime, spec(), kLong);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(1000));
  EXPECT_EQ(runtime->workspace_bytes({spec(), Pass::forward}, kLong), workspace);
  EXPECT_EQ(log_.text(), "");
  ASSERT_TRUE(log_.hears("compiled fwd:bf16:d64 in the background"));
  call(*runtime, spec(), kLong);
  EXPECT_TRUE(is_in_memory(*runtime, kLong));
}

TEST_F(Fallback, TheFirstCallOfASpecHasAPlainKernel) {
  const auto runtime = engine();
  const std::size_t workspace = runtime->workspace_bytes({spec(), Pass::forward}, kLong);
  call(*runtime, spec(), kLong);
  EXPECT_EQ(runtime->workspace_bytes({spec(), Pass::forward}, kLong), workspace);
  ASSERT_TRUE(log_.hears("compiled fwd:bf16:d64 in the background")) << log_.text();
  EXPECT_TRUE(log_.has("use sm90:")) << log_.text();
  EXPECT_TRUE(is_in_memory(*runtime, kLong));
  const auto plain = runtime->prepare({spec(), Pass::forward}, kLong, TileConfig{Family::sm80, 64, 64, 4});
  EXPECT_EQ(plain.origin, KernelOrigin::memory) << "what the call used";
}

TEST_F(Fallback, TheFirstCallsOfBothPassesHavePlainKernels) {
  const auto runtime = engine();
  runtime->prepare_first_calls(spec(), kLong);
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const auto plain = runtime->prepare({spec(), pass}, kShort, TileConfig{Family::sm80, 64, 64, 4});
    EXPECT_EQ(plain.origin, KernelOrigin::memory);
    ASSERT_TRUE(log_.hears(fmt::format("compiled {}:bf16:d64 in the background", to_string(pass))));
    EXPECT_EQ(runtime->prepare({spec(), pass}, kLong, {}).origin, KernelOrigin::memory);
  }
}

TEST_F(Fallback, TheFirstCallsHaveTheBestKernelsUnlessTheSwitchIsOn) {
  Settings waits = settings();
  waits.compile_in_background = false;
  const auto runtime = engine(waits);
  runtime->prepare_first_calls(spec(), kLong);
  for (const KernelReport& report : runtime->prepare_both(spec(), kLong))
    EXPECT_EQ(report.origin, KernelOrigin::memory);
}

TEST_F(Fallback, AFirstCallWaitsWhereNoKernelIsCompiledSooner) {
  fake().compute_capability = 80;
  const auto runtime = engine();
  const Variable slow("FAKE_NVRTC_MS", "200");
  const auto start = std::chrono::steady_clock::now();
  call(*runtime, spec(), kLong);
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(200));
  EXPECT_TRUE(is_in_memory(*runtime, kLong));
}

TEST_F(Fallback, APlainKernelThatDoesNotCompileIsNotWaitedFor) {
  const auto runtime = engine();
  const Variable failing("FAKE_NVRTC_FAIL", "1");
  EXPECT_THROW(call(*runtime, spec(), kLong), Error);
}

TEST_F(Fallback, ACaptureIsNotSpoiledByAPlainKernel) {
  const auto runtime = engine();
  fake().capturing = true;
  EXPECT_THROW(call(*runtime, spec(), kLong), Error);
  EXPECT_FALSE(log_.has("in the background")) << log_.text();
}

TEST(PlainConfig, IsOfMmaSyncInPlaceOfWgmma) {
  const auto plain_of = [](const KernelSpec& spec, const char* arch) {
    const DeviceInfo info = DeviceInfo::parse(arch);
    return plan::plain_config(plan::make_plan(spec, {1, 8, 8, 4096, 4096}, info, {}), info);
  };
  const AttentionSpec dense{.dtype = DType::bf16, .head_dim = 128};
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const auto plain = plain_of({dense, pass}, "sm_90a");
    ASSERT_TRUE(plain);
    EXPECT_EQ(*plain, (TileConfig{Family::sm80, 64, 64, 4}));
    EXPECT_FALSE(plain_of({dense, pass}, "sm_80"));
  }
  EXPECT_FALSE(plain_of({{.dtype = DType::fp32, .head_dim = 64}, Pass::forward}, "sm_90a"));
}

TEST_F(Fallback, WhatMayNotChangeItsBitsWaits) {
  for (const bool deterministic : {true, false}) {
    AttentionSpec same = spec();
    (deterministic ? same.reproducible.deterministic : same.reproducible.batch_invariant) = true;
    const auto runtime = engine();
    runtime->prepare({same, Pass::forward}, kShort, {});
    call(*runtime, same, kLong);
    EXPECT_FALSE(log_.has("in the background")) << log_.text();
    EXPECT_EQ(runtime->prepare({same, Pass::forward}, kLong, {}).origin, KernelOrigin::memory);
  }
}

TEST(Worker, LetsOtherThreadsGoFirst) {
  const auto niceness = [] { return ::getpriority(PRIO_PROCESS, 0); };  // Linux: of the thread
  const int before = niceness();
  std::promise<int> inside, of_its_own;
  Worker worker;
  worker.want([&](const std::stop_token&) {
    inside.set_value(niceness());
    std::jthread([&] { of_its_own.set_value(niceness()); });
  });
  EXPECT_EQ(inside.get_future().get(), std::min(before + 10, 19));
  EXPECT_EQ(of_its_own.get_future().get(), std::min(before + 10, 19)) << "the compiler's second program";
  EXPECT_EQ(niceness(), before);
}

TEST_F(Fallback, IsOffByDefault) {
  Settings plain = settings();
  plain.compile_in_background = false;
  const auto runtime = engine(plain);
  runtime->prepare({spec(), Pass::forward}, kShort, {});
  call(*runtime, spec(), kLong);
  EXPECT_TRUE(is_in_memory(*runtime, kLong));
  EXPECT_FALSE(resolve_settings({}, {}).compile_in_background);
  EXPECT_TRUE(resolve_settings({.compile_in_background = true}, {}).compile_in_background);
  EXPECT_FALSE(
      resolve_settings({.jit = JitMode::off, .compile_in_background = true}, {}).compile_in_background);
}

TEST_F(Fallback, AStoredKernelIsUsedAtOnce) {
  engine()->prepare({spec(), Pass::forward}, kLong, {});
  const auto runtime = engine();
  runtime->prepare({spec(), Pass::forward}, kShort, {});
  const Variable slow("FAKE_NVRTC_MS", "20000");
  call(*runtime, spec(), kLong);
  EXPECT_TRUE(is_in_memory(*runtime, kLong));
}

TEST_F(Fallback, AFailureIsToldOnceAndCallsGoOn) {
  const auto runtime = engine();
  runtime->prepare({spec(), Pass::forward}, kShort, {});
  const Variable failing("FAKE_NVRTC_FAIL", "1");
  call(*runtime, spec(), kLong);
  ASSERT_TRUE(log_.hears("cannot compile fwd:bf16:d64"));
  for (int i = 0; i < 3; ++i) call(*runtime, spec(), kLong);
  call(*runtime, spec(), {4, 32, 8, 4096, 4095});
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const std::string text = log_.text();
  EXPECT_EQ(text.find("cannot compile"), text.rfind("cannot compile")) << text;
}

TEST_F(Fallback, EndsWithACompileUnderWay) {
  auto runtime = engine();
  runtime->prepare({spec(), Pass::forward}, kShort, {});
  const Variable slow("FAKE_NVRTC_MS", "300");
  call(*runtime, spec(), kLong);
  runtime.reset();
}

TEST_F(Fallback, AForkedChildEndsWithoutTheThread) {
  auto runtime = engine();
  runtime->prepare({spec(), Pass::forward}, kShort, {});
  const Variable slow("FAKE_NVRTC_MS", "300");
  call(*runtime, spec(), kLong);
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);  // ends a child that waits for ever
    call(*runtime, spec(), {2, 32, 8, 4096, 4096});
    runtime.reset();
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace
}  // namespace flashjit
