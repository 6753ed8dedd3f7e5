// The runtime as services use it: many processes, threads and devices, fork, locks that fail, contexts that
// go, a library that is unloaded. NVRTC and the driver are those of tests/fake.
#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <thread>

#include "cache/store.hpp"
#include "call/engine.hpp"
#include "device/resources.hpp"
#include "flashjit/flashjit.h"
#include "plan/plan.hpp"
#include "plan/shipped.hpp"
#include "support/file.hpp"
#include "tests/support/built.hpp"
#include "tests/support/fakes.hpp"
#include "tests/support/kept_log.hpp"
#include "tests/support/traced_child.hpp"

namespace flashjit {
namespace {

namespace fs = std::filesystem;
using test::FakeDriver;
using test::Variable;

constexpr AttentionShape kShape{1, 2, 2, 128, 128};

KernelSpec spec(std::int64_t head_dim = 64) {
  return KernelSpec{{.dtype = DType::bf16, .head_dim = static_cast<int>(head_dim)}};
}

ForwardArgs forward_args(std::int64_t head_dim = 64, const AttentionShape& s = kShape) {
  const auto at = [](std::uintptr_t address) { return reinterpret_cast<void*>(address); };
  return {.q = ConstTensorView::bhsd(at(0x1000000), s.batch, s.heads_q, s.seqlen_q, head_dim),
          .k = ConstTensorView::bhsd(at(0x2000000), s.batch, s.heads_kv, s.seqlen_kv, head_dim),
          .v = ConstTensorView::bhsd(at(0x3000000), s.batch, s.heads_kv, s.seqlen_kv, head_dim),
          .out = TensorView::bhsd(at(0x4000000), s.batch, s.heads_q, s.seqlen_q, head_dim)};
}

class Service : public testing::Test {
 protected:
  Service() {
    fs::create_directories(folder_);
    fake().reset();
  }
  ~Service() override { fs::remove_all(folder_); }

  static FakeDriver& fake() { return FakeDriver::state(); }
  fs::path cache() const { return folder_ / "cache"; }

  Settings settings() {
    Settings settings;
    settings.cache_dir = cache().string();
    settings.cache_limit = std::uint64_t{1} << 40;
    settings.nvrtc = test::built(FLASHJIT_FAKE_NVRTC);
    settings.log = log_.writer();
    return settings;
  }
  std::unique_ptr<Engine> engine() { return engine(settings()); }
  static std::unique_ptr<Engine> engine(Settings settings) {
    return std::make_unique<Engine>(std::move(settings), FakeDriver::driver());
  }

  /// How often anything was compiled, by all processes.
  int compilations() const {
    std::ifstream lines(compilations_);
    return static_cast<int>(std::count(std::istreambuf_iterator<char>(lines), {}, '\n'));
  }

  /// Holds the lock of whatever is compiled next: a process that hangs while it compiles.
  pid_t start_process_that_compiles_forever() {
    const pid_t child = ::fork();
    if (child == 0) {
      ::setenv("FAKE_NVRTC_MS", "1000000", 1);
      engine()->prepare(spec(), kShape, {});
      ::_exit(0);
    }
    while (!a_lock_is_held()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return child;
  }
  /// A lock's file is there before the lock is.
  bool a_lock_is_held() const {
    std::error_code none_yet;
    for (const auto& file : fs::directory_iterator(cache() / "v1" / "locks", none_yet)) {
      const int fd = ::open(file.path().c_str(), O_RDWR | O_CLOEXEC);
      const bool held = fd >= 0 && ::flock(fd, LOCK_EX | LOCK_NB) != 0;
      ::close(fd);
      if (held) return true;
    }
    return false;
  }
  static void end(pid_t child) {
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
  }
  static bool ended_well(pid_t child) {
    int status = 0;
    ::waitpid(child, &status, 0);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }

  fs::path folder_ = fs::path(testing::TempDir()) / ("service-" + unique_suffix());
  const std::string compilations_ = (folder_ / "compilations").string();
  const Variable log_variable_{"FAKE_NVRTC_LOG", compilations_};
  test::KeptLog log_;
};

TEST_F(Service, ManyProcessesAndThreadsCompileEachKernelOnce) {
  constexpr int kProcesses = 5, kThreads = 4;
  const std::vector<int> head_dims{32, 64, 96, 128};
  const Variable slow("FAKE_NVRTC_MS", "40");
  const auto work = [&] {
    const auto runtime = engine();
    std::atomic<int> failures = 0;
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t)
      threads.emplace_back([&, t] {
        try {
          for (std::size_t i = 0; i < head_dims.size(); ++i) {
            const int d = head_dims[(i + static_cast<std::size_t>(t)) % head_dims.size()];
            runtime->forward(spec(d), forward_args(d), nullptr);
          }
        } catch (...) {
          ++failures;
        }
      });
    for (std::thread& thread : threads) thread.join();
    const std::size_t launches = fake().launches.size();
    return failures == 0 && launches == kThreads * head_dims.size() && !log_.has("ignoring");
  };
  std::vector<pid_t> children;
  for (int i = 0; i < kProcesses; ++i) {
    children.push_back(::fork());
    if (children.back() == 0) ::_exit(work() ? 0 : 1);
  }
  for (const pid_t child : children) EXPECT_TRUE(ended_well(child));
  EXPECT_EQ(compilations(), static_cast<int>(head_dims.size()));
}

/// A file system whose locks fail with an error, or, with 0, succeed for everybody at once.
class BadLocks : public Service, public testing::WithParamInterface<int> {};
INSTANTIATE_TEST_SUITE_P(All, BadLocks, testing::Values(ENOLCK, 0),
                         [](const auto& error) { return error.param == 0 ? "SucceedForEverybody" : "Fail"; });

TEST_P(BadLocks, EveryProcessCompilesAndTheEntryIsWhole) {
  constexpr int kProcesses = 4;
  const auto work = [&] {
    try {
      for (const int head_dim : {64, 32, 128}) engine()->prepare(spec(head_dim), kShape, {});
      return !log_.has("ignoring") ? 0 : 1;
    } catch (...) {
      return 2;
    }
  };
  std::vector<test::TracedRun> runs(kProcesses);
  std::vector<std::thread> tracers;
  for (test::TracedRun& run : runs)
    tracers.emplace_back([&] {
      run = test::run_traced(work, {test::Fault::Kind::fail_every, SYS_flock, GetParam()});
    });
  for (std::thread& tracer : tracers) tracer.join();
  if (!runs[0].traced) GTEST_SKIP() << "processes cannot be traced here";
  for (const test::TracedRun& run : runs) EXPECT_EQ(run.exit_code, 0);
  EXPECT_GE(compilations(), 3);
  EXPECT_LE(compilations(), 3 * kProcesses);
  for (const int head_dim : {64, 32, 128})
    EXPECT_EQ(engine()->prepare(spec(head_dim), kShape, {}).origin, KernelOrigin::disk);
  for (const cache::EntryInfo& entry : cache::Store(cache(), cache::Store::Access::read_only).list())
    EXPECT_EQ(entry.damage, "");
  EXPECT_TRUE(fs::is_empty(cache() / "v1" / "tmp"));
}

TEST_F(Service, AHolderThatHangsIsNotWaitedForForever) {
  const pid_t holder = start_process_that_compiles_forever();
  Settings impatient = settings();
  impatient.lock_seconds = 0.05;
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(engine(impatient)->prepare(spec(), kShape, {}).origin, KernelOrigin::compiled);
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(50));
  end(holder);
  EXPECT_EQ(engine()->prepare(spec(), kShape, {}).origin, KernelOrigin::disk) << "and it was kept";
}

TEST_F(Service, AHolderThatDiesLetsTheNextGoOn) {
  const pid_t holder = start_process_that_compiles_forever();
  std::thread killer([holder] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    end(holder);
  });
  EXPECT_EQ(engine()->prepare(spec(), kShape, {}).origin, KernelOrigin::compiled);
  killer.join();
  EXPECT_EQ(compilations(), 1);
}

TEST_F(Service, CompilingSaysSoWithItsTimeAndHowToAvoidIt) {
  engine()->prepare(spec(), kShape, {});
  EXPECT_TRUE(log_.has("compiled fwd:bf16:d64 for sm_90a in ")) << log_.text();
  EXPECT_TRUE(log_.has("flashjit pack")) << log_.text();
}

TEST_F(Service, ADamagedKernelIsToldOfOnceAndReplaced) {
  engine()->prepare(spec(), kShape, {});
  for (const auto& item : fs::recursive_directory_iterator(cache()))
    if (item.path().filename() == "kernel.cubin") write_file_atomically(item.path(), "no longer it");
  log_.clear();
  EXPECT_EQ(engine()->prepare(spec(), kShape, {}).origin, KernelOrigin::compiled);
  const std::string text = log_.text();
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 2) << text;
  EXPECT_TRUE(log_.has("ignoring the cached kernel"));
  EXPECT_EQ(engine()->prepare(spec(), kShape, {}).origin, KernelOrigin::disk);
}

TEST_F(Service, ARelativeFolderIsOfTheFolderThatTheProcessWasIn) {
  const pid_t child = ::fork();
  if (child == 0) {
    fs::current_path(folder_);
    RuntimeOptions options;
    options.cache_dir = "relative";
    options.nvrtc = test::built(FLASHJIT_FAKE_NVRTC);
    options.log = [](std::string_view) {};
    const auto runtime = engine(resolve_settings(options, read_environment()));
    fs::current_path("/");
    runtime->prepare(spec(), kShape, {});
    ::_exit(fs::exists(folder_ / "relative" / "v1") ? 0 : 1);
  }
  EXPECT_TRUE(ended_well(child));
}

// tools/docs/programs.md says how much stack a caller needs.
TEST_F(Service, TheDeepestProgramNeedsTheStackThatThePageSays) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers widen frames";
#endif
  std::string program = "score";
  for (int i = 0; i < 190; ++i) program = "tanh(" + program + ")";
  const std::function<void()> body = [&] {
    for (const char* pass : {"fwd", "bwd"})
      engine()->prepare(parse_spec(fmt::format("{}:bf16:d64:score{{{}}}", pass, program)), kShape, {});
  };
  const auto run = [](void* of) -> void* { return (*static_cast<const std::function<void()>*>(of))(), of; };
  ::pthread_attr_t attributes;
  ::pthread_attr_init(&attributes);
  ASSERT_EQ(::pthread_attr_setstacksize(&attributes, 256 << 10), 0);
  ::pthread_t thread{};
  ASSERT_EQ(::pthread_create(&thread, &attributes, run, const_cast<std::function<void()>*>(&body)), 0);
  ::pthread_join(thread, nullptr);
  ::pthread_attr_destroy(&attributes);
}

TEST_F(Service, BothPassesCompileSideBySide) {
  const Variable together("FAKE_NVRTC_MEET", "2");
  const auto runtime = engine();
  const auto [forward, backward] = runtime->prepare_both(spec(), kShape);
  EXPECT_EQ(forward.spec.pass, Pass::forward);
  EXPECT_EQ(backward.spec.pass, Pass::backward);
  for (const KernelReport& report : {forward, backward}) EXPECT_EQ(report.origin, KernelOrigin::compiled);
  EXPECT_EQ(compilations(), 2);
  for (const KernelReport& report : runtime->prepare_both(spec(), kShape))
    EXPECT_EQ(report.origin, KernelOrigin::memory);
  EXPECT_EQ(compilations(), 2);
}

TEST_F(Service, WhatFailsInEitherPassIsThrown) {
  const Variable failing("FAKE_NVRTC_FAIL", "1");
  EXPECT_THROW(engine()->prepare_both(spec(), kShape), Error);
  EXPECT_THROW(engine()->prepare_both(spec(7), kShape), Error);
}

TEST_F(Service, AFolderThatIsDeletedWhileInUseIsMadeAgain) {
  const auto runtime = engine();
  runtime->prepare(spec(64), kShape, {});
  fs::remove_all(cache());
  runtime->forward(spec(64), forward_args(64), nullptr);
  runtime->prepare(spec(128), kShape, {});
  EXPECT_EQ(engine()->prepare(spec(128), kShape, {}).origin, KernelOrigin::disk);
}

TEST_F(Service, AFolderThatIsDeletedOverAndOverHurtsNobody) {
  std::atomic<bool> done = false;
  std::thread vandal([&] {
    std::error_code ignored;
    while (!done) fs::remove_all(cache(), ignored);
  });
  for (int round = 0; round < 30; ++round)
    for (const int d : {32, 64}) EXPECT_NO_THROW(engine()->forward(spec(d), forward_args(d), nullptr));
  done = true;
  vandal.join();
  EXPECT_EQ(fake().launches.size(), 60u);
}

TEST_F(Service, APathThatIsTooLongKeepsKernelsInMemory) {
  Settings deep = settings();
  for (int i = 0; i < 60; ++i) deep.cache_dir += "/" + std::string(100, 'd');
  const auto runtime = engine(deep);
  EXPECT_EQ(runtime->prepare(spec(), kShape, {}).origin, KernelOrigin::compiled);
  EXPECT_EQ(runtime->prepare(spec(), kShape, {}).origin, KernelOrigin::memory);
  EXPECT_TRUE(log_.has("memory only"));

  deep.cache_dir = cache().string();
  while (deep.cache_dir.size() < 3000) deep.cache_dir += "/" + std::string(200, 'd');
  engine(deep)->prepare(spec(), kShape, {});
  EXPECT_EQ(engine(deep)->prepare(spec(), kShape, {}).origin, KernelOrigin::disk) << "long is not too long";
}

TEST_F(Service, TheCacheStaysBelowItsLimit) {
  Settings small = settings();
  small.cache_limit = 40000;
  const auto runtime = engine(small);
  std::uintmax_t most = 0;
  for (int length = 1; length <= 2; ++length)
    for (int d = 8; d <= 128; d += 8) {
      runtime->prepare(spec(d), kShape, {});
      std::uintmax_t bytes = 0;
      for (const auto& file : fs::recursive_directory_iterator(cache()))
        if (file.is_regular_file()) bytes += file.file_size();
      most = std::max(most, bytes);
    }
  EXPECT_LE(most, small.cache_limit);
  EXPECT_GT(most, small.cache_limit / 2);
  EXPECT_TRUE(log_.has("reached its limit of 40000 bytes")) << log_.text();
  EXPECT_EQ(engine(small)->prepare(spec(128), kShape, {}).origin, KernelOrigin::disk) << "the latest stays";
  EXPECT_EQ(engine(small)->prepare(spec(8), kShape, {}).origin, KernelOrigin::compiled) << "the oldest went";
}

TEST_F(Service, ThreadsOnManyDevicesShareOneKernel) {
  constexpr int kDevices = 4, kCalls = 50;
  const auto runtime = engine();
  std::vector<std::thread> threads;
  std::atomic<int> failures = 0;
  for (int t = 0; t < 2 * kDevices; ++t)
    threads.emplace_back([&, t] {
      FakeDriver::own_device = t % kDevices;
      try {
        for (int call = 0; call < kCalls; ++call) runtime->forward(spec(), forward_args(), nullptr);
      } catch (...) {
        ++failures;
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failures, 0);
  EXPECT_EQ(compilations(), 1);
  EXPECT_EQ(fake().libraries_loaded, 1);
  EXPECT_EQ(fake().launches.size(), static_cast<std::size_t>(2 * kDevices * kCalls));
  EXPECT_EQ(fake().opt_ins.size(), static_cast<std::size_t>(kDevices));
}

TEST_F(Service, AForkedChildMayUseTheRuntimeAndMakeItsOwn) {
  const auto runtime = engine();
  runtime->forward(spec(64), forward_args(64), nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    runtime->forward(spec(64), forward_args(64), nullptr);
    runtime->forward(spec(96), forward_args(96), nullptr);
    engine()->forward(spec(128), forward_args(128), nullptr);
    ::_exit(fake().launches.size() == 4 ? 0 : 1);
  }
  EXPECT_TRUE(ended_well(child));
  EXPECT_EQ(runtime->prepare(spec(96), kShape, {}).origin, KernelOrigin::disk) << "the child's";
}

/// As a real driver answers in a child that was forked after it had been used.
TEST_F(Service, AChildInWhichCudaDoesNotWorkIsToldWhy) {
  const auto told = [](const std::function<void()>& call, ErrorCode code) {
    try {
      call();
    } catch (const Error& error) {
      return error.code() == code && error.message().find("forked after CUDA was used") != std::string::npos;
    }
    return false;
  };
  const auto runtime = engine();
  runtime->forward(spec(), forward_args(), nullptr);
  fake().launch_result = CUDA_ERROR_NOT_INITIALIZED;
  EXPECT_TRUE(told([&] { runtime->forward(spec(), forward_args(), nullptr); }, ErrorCode::cuda));
  test::fake_cuda().reset();
  test::fake_cuda().init_result = CUDA_ERROR_NOT_INITIALIZED;
  EXPECT_TRUE(told([] { device::Driver::open(test::built(FLASHJIT_FAKE_CUDA)); }, ErrorCode::no_driver));
  test::fake_cuda().reset();
}

TEST_F(Service, AContextMayGoAndComeAgain) {
  const auto runtime = engine();
  runtime->forward(spec(), forward_args(), nullptr);
  fake().has_context = false;
  EXPECT_THROW(runtime->forward(spec(), forward_args(), nullptr), Error);
  fake().has_context = true;
  runtime->forward(spec(), forward_args(), nullptr);
  EXPECT_EQ(fake().launches.size(), 2u);
  EXPECT_EQ(fake().libraries_loaded, 1) << "a library belongs to no context";
}

TEST_F(Service, ADeviceThatFailedIsReportedAtEveryCall) {
  const auto runtime = engine();
  runtime->forward(spec(), forward_args(), nullptr);
  fake().launch_result = CUDA_ERROR_ILLEGAL_ADDRESS;
  for (int i = 0; i < 2; ++i) {
    try {
      runtime->forward(spec(), forward_args(), nullptr);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::cuda);
    }
  }
}

TEST_F(Service, ADebugModeHasKernelsOfItsOwn) {
  Environment environment;
  EXPECT_FALSE(resolve_settings({}, environment).check_waits);
  EXPECT_TRUE(resolve_settings({.check_waits = true}, environment).check_waits);
  environment.check_waits = true;
  EXPECT_TRUE(resolve_settings({}, environment).check_waits);
  EXPECT_FALSE(resolve_settings({.check_waits = false}, environment).check_waits);

  Settings checked = settings();
  checked.check_waits = true;
  const std::string plain_key = engine()->prepare(spec(), kShape, {}).key;
  EXPECT_EQ(engine()->prepare(spec(), kShape, {}).key, plain_key);
  EXPECT_NE(engine(checked)->prepare(spec(), kShape, {}).key, plain_key);
  EXPECT_EQ(compilations(), 2) << "the cache gave one mode's kernel to the other";
}

TEST_F(Service, AForkedChildEndsWithoutTheThreadThatTunes) {
  Settings tuning = settings();
  tuning.tune_in_background = true;
  fake().ctx_result = CUDA_ERROR_INVALID_VALUE;  // it ends its job soon, and waits
  auto runtime = engine(tuning);
  runtime->forward(spec(), forward_args(), nullptr);
  ASSERT_TRUE(log_.hears("cannot tune"));
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);  // ends a child that waits for ever
    runtime->forward(spec(), forward_args(64, {1, 2, 2, 100, 100}), nullptr);
    runtime.reset();
    ::_exit(0);
  }
  EXPECT_TRUE(ended_well(child));
}

TEST_F(Service, BackgroundTuningIsNeverOnTheCallersStreamAndKeepsToTheFamily) {
  const Variable libcuda("FLASHJIT_LIBCUDA", test::built(FLASHJIT_FAKE_CUDA));
  FakeDriver& gpu = test::fake_cuda();
  gpu.reset();
  const device::PrimaryContext context(device::Driver::open(test::built(FLASHJIT_FAKE_CUDA)));
  const device::StreamOwner callers(context.driver());
  Settings tuning = settings();
  tuning.tune_in_background = true;
  Engine runtime(tuning, context.driver());

  for (const Pass pass : {Pass::forward, Pass::backward}) {
    KernelSpec tuned = spec();
    tuned.pass = pass;
    tuned = tuned.normalized();
    const TileConfig before = runtime.prepare(tuned, kShape, {}).config;
    const std::size_t workspace = runtime.workspace_bytes(tuned, kShape);
    const std::string done = "tuned " + to_string(tuned);
    for (int i = 0; i < 60000 && !log_.has(done) && !log_.has("cannot tune"); ++i) {
      runtime.forward(spec(), forward_args(), callers.get());
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    ASSERT_TRUE(log_.has(done)) << log_.text();
    const KernelReport after = runtime.prepare(tuned, kShape, {});
    EXPECT_EQ(after.config_source, ConfigSource::tuned);
    EXPECT_EQ(after.config.family, before.family);
    EXPECT_LE(runtime.workspace_bytes(tuned, kShape), workspace);

    plan::TuningRecords records;
    records.load(cache::Store(cache(), cache::Store::Access::read_only).records_folder());
    const plan::TuningRecord* record = records.find(tuned, kShape, runtime.device()).record;
    ASSERT_TRUE(record);
    EXPECT_EQ(record->best, after.config);
    for (const plan::Timing& timing : record->timings) {
      EXPECT_EQ(timing.config.family, before.family) << to_string(timing.config);
      const auto plan = plan::make_plan(tuned, kShape, runtime.device(), {}, timing.config);
      EXPECT_LE(plan.workspace.bytes, workspace) << to_string(timing.config);
    }
  }

  const std::lock_guard lock(gpu.mutex);
  int of_calls = 0, of_tuning = 0;
  for (const FakeDriver::Launch& launch : gpu.launches) {
    const bool by_caller = launch.thread == std::this_thread::get_id();
    ++(by_caller ? of_calls : of_tuning);
    ASSERT_EQ(launch.stream == callers.get(), by_caller);
    ASSERT_NE(launch.stream, nullptr) << "which waits for all others";
  }
  EXPECT_GT(of_calls, 0);
  EXPECT_GT(of_tuning, 100);
}

/// A graph that this thread captures, in the mode that forbids most to other threads.
class Capture {
 public:
  Capture(const device::Driver& driver, CUstream stream) : driver_(driver), stream_(stream) {
    driver_.check(driver_.stream_begin_capture(stream_, CU_STREAM_CAPTURE_MODE_GLOBAL),
                  "cuStreamBeginCapture");
  }
  CUresult end() {
    CUgraph graph = nullptr;
    return driver_.stream_end_capture(stream_, &graph);
  }

 private:
  const device::Driver& driver_;
  CUstream stream_;
};

TEST_F(Service, WhatAThreadLoadsSpoilsNoCaptureOfAnother) {
  const auto driver = FakeDriver::driver();
  Capture capture(*driver, nullptr);
  std::thread([&] {
    const auto runtime = engine();
    runtime->prepare_both(spec(), kShape);
    runtime->forward(spec(), forward_args(), nullptr);
  }).join();  // unloads, too
  EXPECT_EQ(fake().libraries_unloaded, fake().libraries_loaded);
  EXPECT_EQ(capture.end(), CUDA_SUCCESS);
  std::thread([] { EXPECT_EQ(FakeDriver::capture_mode, CU_STREAM_CAPTURE_MODE_GLOBAL); }).join();
  engine()->prepare(spec(), kShape, {});
  EXPECT_EQ(FakeDriver::capture_mode, CU_STREAM_CAPTURE_MODE_GLOBAL) << "as the caller had it";
}

TEST_F(Service, TuningInTheBackgroundSpoilsNoCapture) {
  const Variable libcuda("FLASHJIT_LIBCUDA", test::built(FLASHJIT_FAKE_CUDA));
  test::fake_cuda().reset();
  const device::PrimaryContext context(device::Driver::open(test::built(FLASHJIT_FAKE_CUDA)));
  const device::StreamOwner callers(context.driver());
  Settings tuning = settings();
  tuning.tune_in_background = true;
  Engine runtime(tuning, context.driver());
  int captures = 0;
  for (; !log_.has("tuned ") && !log_.has("cannot tune") && captures < 1000000; ++captures) {
    if (captures == 0) runtime.forward(spec(), forward_args(), callers.get());
    Capture capture(*context.driver(), callers.get());
    runtime.forward(spec(), forward_args(), callers.get());
    ASSERT_EQ(capture.end(), CUDA_SUCCESS) << captures;
  }
  EXPECT_TRUE(log_.has("tuned ")) << log_.text();
  EXPECT_GT(captures, 10);
}

TEST_F(Service, TuningInTheBackgroundEndsWithoutTheShapesThatWait) {
  const Variable libcuda("FLASHJIT_LIBCUDA", test::built(FLASHJIT_FAKE_CUDA));
  test::fake_cuda().reset();
  const device::PrimaryContext context(device::Driver::open(test::built(FLASHJIT_FAKE_CUDA)));
  Settings tuning = settings();
  tuning.tune_in_background = true;
  auto runtime = std::make_unique<Engine>(tuning, context.driver());
  const Variable slow("FAKE_NVRTC_MS", "250");
  for (int i = 0; i < 12; ++i) runtime->prepare(spec(), {1, 2, 2, 128, 1024 + 128 * i}, {});
  const auto next_stream = [] {
    const std::lock_guard lock(test::fake_cuda().mutex);
    return test::fake_cuda().next_stream;
  };
  const std::uintptr_t before = next_stream();
  runtime.reset();
  EXPECT_LE(next_stream(), before + 1) << "each shape that is tuned has a stream of its own";
}

TEST_F(Service, ARuntimeThatWasNeverTunedTakesWhatShips) {
  const plan::TuningRecord& shipped = plan::shipped_records().front();
  const KernelReport report = engine()->prepare(shipped.spec, shipped.shape, {});
  EXPECT_EQ(report.config, shipped.best);
  EXPECT_EQ(report.config_source, ConfigSource::tuned_elsewhere)
      << "this GPU is not the one it was measured on";
  AttentionShape unlike = shipped.shape;
  unlike.seqlen_q /= 8;
  EXPECT_EQ(engine()->prepare(shipped.spec, unlike, {}).config_source, ConfigSource::heuristic);
}

TEST_F(Service, NoMemoryToLoadIsSaidAndNotWorkedAround) {
  engine()->prepare(spec(), kShape, {});
  fake().load_result = CUDA_ERROR_OUT_OF_MEMORY;
  const auto runtime = engine();
  try {
    runtime->prepare(spec(), kShape, {});
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::cuda) << error.message();
    EXPECT_NE(error.message().find("cuLibraryLoadData"), std::string::npos) << error.message();
  }
  EXPECT_EQ(compilations(), 1) << "to compile it again would not help";
  fake().load_result = CUDA_SUCCESS;
  EXPECT_EQ(runtime->prepare(spec(), kShape, {}).origin, KernelOrigin::disk);
}

TEST_F(Service, RandomCallsWhileTheCacheIsWipedAreAllServed) {
  constexpr int kThreads = 4, kCalls = 150;
  std::atomic<bool> done = false;
  std::atomic<int> failures = 0;
  std::thread wiper([&] {
    cache::Store store(cache(), cache::Store::Access::read_write);
    for (int i = 0; !done; ++i) {
      if (i % 3 == 0) store.clear(true);
      if (i % 3 == 1) store.prune(2000);
      if (i % 3 == 2) store.repair();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<unsigned>(t));
      auto runtime = engine();
      for (int call = 0; call < kCalls; ++call) {
        if (random() % 8 == 0) runtime = engine();
        const int d = 8 + 8 * static_cast<int>(random() % 8);
        const auto up_to = [&](unsigned most) { return static_cast<std::int64_t>(1 + random() % most); };
        const AttentionShape shape{up_to(3), 2, 1, up_to(500), up_to(500)};
        try {
          runtime->forward(spec(d), forward_args(d, shape), nullptr);
        } catch (...) {
          ++failures;
        }
      }
    });
  for (std::thread& thread : threads) thread.join();
  done = true;
  wiper.join();
  EXPECT_EQ(failures, 0) << log_.text();
  EXPECT_EQ(fake().launches.size(), static_cast<std::size_t>(kThreads * kCalls));
}

/// The C interface of a library that was opened at run time.
struct Opened {
  void* handle = ::dlopen(test::built(FLASHJIT_LIBRARY).c_str(), RTLD_NOW | RTLD_LOCAL);

  template <class Function>
  Function* get(const char* name) const {
    return reinterpret_cast<Function*>(::dlsym(handle, name));
  }
};

bool is_mapped(const std::string& file) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);)
    if (line.find(file) != line.npos) return true;
  return false;
}

/// Opens the library, prepares a kernel, errs in another thread, and in this one if asked, and closes it.
void use_and_unload(const std::string& cache_dir, bool err_here = false) {
  const Opened library;
  ASSERT_TRUE(library.handle) << ::dlerror();
  flashjit_options options{};
  options.struct_size = sizeof options;
  options.cache_dir = cache_dir.c_str();
  const std::string nvrtc = test::built(FLASHJIT_FAKE_NVRTC);
  options.nvrtc = nvrtc.c_str();
  options.log = [](void*, const char*) {};
  flashjit_runtime* runtime = nullptr;
  ASSERT_EQ(library.get<decltype(flashjit_runtime_create)>("flashjit_runtime_create")(&options, &runtime), 0);
  const auto spec_create = library.get<decltype(flashjit_spec_create)>("flashjit_spec_create");
  flashjit_spec* spec = nullptr;
  ASSERT_EQ(spec_create("bf16:d64", &spec), FLASHJIT_OK);
  const flashjit_shape shape{1, 2, 2, 128, 128};
  std::vector<std::string> told;
  const auto receive = [](void* user, const flashjit_kernel_report* report) {
    auto& texts = *static_cast<std::vector<std::string>*>(user);
    texts = {report->spec, report->config, report->config_source, report->origin, report->key};
    for (std::size_t i = 0; i < report->entry_count; ++i) {
      texts.emplace_back(report->entries[i].entry);
      EXPECT_GT(report->entries[i].threads, 0);
    }
    EXPECT_GE(report->compile_ms, 0);
  };
  EXPECT_EQ(library.get<decltype(flashjit_prepare)>("flashjit_prepare")(runtime, FLASHJIT_FORWARD, spec,
                                                                        &shape, nullptr, receive, &told),
            FLASHJIT_OK);
  ASSERT_GT(told.size(), 5u);
  EXPECT_EQ(told[0], "fwd:bf16:d64");
  EXPECT_EQ(to_string(parse_config(told[1])), told[1]);
  EXPECT_EQ(told[2], "heuristic");
  EXPECT_TRUE(told[3] == "compiled" || told[3] == "disk") << told[3];
  EXPECT_FALSE(told[4].empty());
  const auto err = [&] {
    flashjit_spec* none = nullptr;
    EXPECT_EQ(spec_create("nonsense", &none), FLASHJIT_INVALID_ARGUMENT);
  };
  std::thread(err).join();
  if (err_here) err();
  library.get<decltype(flashjit_spec_destroy)>("flashjit_spec_destroy")(spec);
  library.get<decltype(flashjit_runtime_destroy)>("flashjit_runtime_destroy")(runtime);
  EXPECT_EQ(::dlclose(library.handle), 0);
}

TEST_F(Service, TheLibraryCanBeUnloadedAndLeavesNothingBehind) {
  test::fake_cuda().reset();
  const Variable libcuda("FLASHJIT_LIBCUDA", test::built(FLASHJIT_FAKE_CUDA));
  const std::string file = fs::path(test::built(FLASHJIT_LIBRARY)).filename().string();
  // malloc and the loader fill pools of their own in the first rounds: 9 KB in 30 of them, 2 KB in the 370
  // after.
  for (int i = 0; i < 40; ++i) use_and_unload(cache().string());
  EXPECT_FALSE(is_mapped(file));
  const std::size_t before = ::mallinfo2().uordblks;
  for (int i = 0; i < 40; ++i) use_and_unload(cache().string());
  EXPECT_FALSE(is_mapped(file));
  // The smallest thing that we could forget has hundreds of bytes.
  EXPECT_LT(::mallinfo2().uordblks, before + 40 * 150) << "bytes; before it was " << before;
  // The last error's text is its thread's and goes with it, after the library is closed.
  std::thread([&] { use_and_unload(cache().string(), true); }).join();
  EXPECT_EQ(test::fake_cuda().libraries_loaded, test::fake_cuda().libraries_unloaded);
}

}  // namespace
}  // namespace flashjit
