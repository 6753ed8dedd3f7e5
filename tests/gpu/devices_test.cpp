// One Runtime on several devices, and contexts that come and go on each.
#include <gtest/gtest.h>

#include <atomic>
#include <exception>
#include <filesystem>
#include <mutex>
#include <string>
#include <thread>

#include "tests/support/lifetime.hpp"
#include "tests/support/run_command.hpp"

namespace flashjit::test {
namespace {

using Bytes = std::vector<std::uint8_t>;

/// Calls body(device) in a thread for each device, several each; what one throws is the test's failure.
void on_every_device(int threads_each, const std::function<void(int)>& body) {
  const int devices = device::device_count(*gpu().driver());
  std::vector<std::thread> threads;
  for (int i = 0; i < threads_each * devices; ++i)
    threads.emplace_back([&, device = i % devices] {
      try {
        body(device);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "device " << device << ": " << error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
}

/// A context that is the test's own, current on the constructing thread.
class OwnContext {
 public:
  explicit OwnContext(int device) {
    // By the names that all drivers have: those of newer headers take other arguments.
    const auto create = driver_function<CUresult(CUcontext*, unsigned, CUdevice)>("cuCtxCreate_v2");
    gpu().driver()->check(create(&context_, 0, device), "cuCtxCreate");
  }
  ~OwnContext() {
    EXPECT_EQ(driver_function<CUresult(CUcontext)>("cuCtxDestroy_v2")(context_), CUDA_SUCCESS);
  }
  OwnContext(const OwnContext&) = delete;
  OwnContext& operator=(const OwnContext&) = delete;

 private:
  CUcontext context_ = nullptr;
};

TEST_F(Lifetime, ContextsOfOnesOwnComeAndGoOnEveryDevice) {
  Runtime runtime(in_memory());
  const Bytes wanted = kProblem.run(runtime, nullptr);
  on_every_device(1, [&](int device) {
    for (int round = 0; round < 4; ++round) {
      const OwnContext context(device);
      EXPECT_EQ(kProblem.run(runtime, nullptr) == wanted, true) << "device " << device << ", round " << round;
    }
  });
  gpu().context->make_current();
  EXPECT_EQ(kProblem.run(runtime, nullptr) == wanted, true) << "the context that was there before";
}

class LifetimeOfDevices : public Lifetime {
 protected:
  void SetUp() override {
    Lifetime::SetUp();
    if (!IsSkipped() && device::device_count(*gpu().driver()) < 2)
      GTEST_SKIP() << "needs two GPUs; here is one";
  }
};

TEST_F(LifetimeOfDevices, ThreadsOnEachShareOneRuntimeAndItsKernels) {
  std::mutex mutex;
  int compiled = 0;
  RuntimeOptions options = in_memory();
  options.packs = std::vector<std::string>{};
  options.log = [&](std::string_view line) {
    const std::lock_guard lock(mutex);
    compiled += line.starts_with("compiled ");
  };
  Runtime runtime(options);
  std::vector<Bytes> results;
  on_every_device(3, [&](int device) {
    const device::PrimaryContext context(gpu().driver(), device);
    const device::StreamOwner stream(gpu().driver());
    for (int call = 0; call < 10; ++call) {
      Bytes result = kProblem.run(runtime, call % 2 ? stream.get() : nullptr);
      const std::lock_guard lock(mutex);
      if (results.empty() || results.back() != result) results.push_back(std::move(result));
    }
  });
  EXPECT_EQ(results.size(), 1u) << "all calls on all devices give the same bits";
  EXPECT_EQ(compiled, 2) << "the forward and the backward pass, for all devices of one kind";
}

TEST_F(LifetimeOfDevices, ResultsOfEachAreWithinTheLimits) {
  Runtime runtime(in_memory());
  on_every_device(1, [&](int device) {
    const device::PrimaryContext context(gpu().driver(), device);
    const AttentionCase test{.spec = {.dtype = DType::bf16, .head_dim = 64, .mask = causal()},
                             .shape = {2, 4, 2, 300, 260},
                             .family = Family::sm90,
                             .seed = static_cast<unsigned>(device)};
    AttentionRun run(test);
    run.check_forward(runtime, config_of(test, Pass::forward));
    run.check_backward(runtime, config_of(test, Pass::backward));
  });
}

TEST_F(LifetimeOfDevices, TensorsOfAnotherAreRefused) {
  Runtime runtime(in_memory());
  const device::PrimaryContext other(gpu().driver(), 1);
  const device::DeviceBuffer memory = kProblem.memory();
  const ForwardArgs args = kProblem.within(memory.data());
  EXPECT_EQ(code_of([&] { runtime.forward(kProblem.spec, args, nullptr); }), ErrorCode{0})
      << "its own device";
  gpu().context->make_current();
  EXPECT_EQ(code_of([&] { runtime.forward(kProblem.spec, args, nullptr); }), ErrorCode::no_device);
}

TEST_F(LifetimeOfDevices, OneIsResetAndMadeAnewWhileTheOtherWorks) {
  const auto reset = driver_function<CUresult(CUdevice)>("cuDevicePrimaryCtxReset_v2");
  ASSERT_TRUE(reset);
  expect_in_its_own_process([&] {
    Runtime runtime(in_memory());
    const Bytes wanted = kProblem.run(runtime, nullptr);
    std::atomic<bool> done = false, others_are_right = true;
    std::thread other([&] {
      gpu().context->make_current();
      while (!done) others_are_right = others_are_right && kProblem.run(runtime, nullptr) == wanted;
    });
    bool resets = true, mine_are_right = true;
    for (int round = 0; round < 4; ++round) {
      const device::PrimaryContext context(gpu().driver(), 1);
      mine_are_right = mine_are_right && kProblem.run(runtime, nullptr) == wanted;
      resets = resets && reset(context.device()) == CUDA_SUCCESS;
    }
    done = true;
    other.join();
    answer({resets, mine_are_right, others_are_right});
  });
}

}  // namespace
}  // namespace flashjit::test
