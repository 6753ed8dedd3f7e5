// What happens to a device while a Runtime lives: streams of every kind, a context that is reset, a kernel
// that faults, no memory left, and many random calls. What would spoil the device for other tests runs in a
// process of its own.
#include <gtest/gtest.h>
#include <malloc.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <thread>

#include "cache/store.hpp"
#include "flashjit/attention_programs.hpp"
#include "support/file.hpp"
#include "tests/support/attention_case.hpp"
#include "tests/support/lifetime.hpp"

namespace flashjit::test {
namespace {

namespace fs = std::filesystem;

TEST_F(Lifetime, StreamsOfEveryKindGiveTheSameBits) {
  Runtime runtime(in_memory());
  const std::vector<std::uint8_t> wanted = kProblem.run(runtime, nullptr);
  const device::StreamOwner own(gpu().driver());
  for (const Stream stream : {own.get(), CU_STREAM_LEGACY, CU_STREAM_PER_THREAD})
    EXPECT_EQ(kProblem.run(runtime, stream), wanted);
  std::thread([&] {
    gpu().context->make_current();
    EXPECT_EQ(kProblem.run(runtime, CU_STREAM_PER_THREAD), wanted) << "of another thread";
  }).join();
}

void use_a_context_that_was_reset(CUresult (*reset)(CUdevice), RuntimeOptions options) {
  Runtime runtime(std::move(options));
  const std::vector<std::uint8_t> before = kProblem.run(runtime, nullptr);
  const bool is_reset = reset(gpu().context->device()) == CUDA_SUCCESS;
  try {  // Before there is a context again: whether that is an error is the driver's to say.
    runtime.prepare(spec_of(64), kProblem.shape);
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  const device::PrimaryContext anew(gpu().driver());
  anew.make_current();
  bool same = false;
  try {
    same = kProblem.run(runtime, nullptr) == before;
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  // A Runtime that is made after the reset, in any case.
  Runtime fresh({.cache_dir = "", .log = [](std::string_view) {}});
  const bool fresh_works = kProblem.run(fresh, nullptr) == before;
  std::_Exit(!is_reset ? 1 : !fresh_works ? 2 : !same ? 3 : 0);
}

TEST_F(Lifetime, AContextThatIsResetAndMadeAnewServesTheSameRuntime) {
  const auto reset = driver_function<CUresult(CUdevice)>("cuDevicePrimaryCtxReset_v2");
  ASSERT_TRUE(reset);
  expect_in_its_own_process([&] { use_a_context_that_was_reset(reset, in_memory()); });
}

TEST_F(Lifetime, AFaultOfTheDeviceIsReportedByEveryLaterCall) {
  expect_in_its_own_process([] {
    Runtime runtime(in_memory());
    kProblem.run(runtime, nullptr);
    const ForwardArgs args = kProblem.within(reinterpret_cast<void*>(0x10000));  // nowhere
    // Pointers are asked about at a shape's first call alone: this one launches.
    code_of([&] { runtime.forward(kProblem.spec, args, nullptr); });
    const bool faulted = code_of([] { gpu().context->synchronize(); }) == ErrorCode::cuda;
    const bool reported = code_of([&] { kProblem.run(runtime, nullptr); }) == ErrorCode::cuda;
    const bool again = code_of([&] { kProblem.run(runtime, nullptr); }) == ErrorCode::cuda;
    answer({faulted, reported, again});
  });
}

/// Shards of the tests run side by side on one device: then its memory is not this process's own.
bool shares_the_device() { return std::getenv("GTEST_TOTAL_SHARDS") != nullptr; }

TEST_F(Lifetime, NoMemoryForAKernelIsAnErrorAndPasses) {
  if (shares_the_device()) GTEST_SKIP() << "takes all memory of the device, which other shards use";
  expect_in_its_own_process([] {
    const fs::path folder = fs::temp_directory_path() / ("flashjit-full-" + unique_suffix());
    const RuntimeOptions options{.cache_dir = folder.string(), .log = [](std::string_view) {}};
    const Problem problem{spec_of(96), kProblem.shape};
    problem.run(*std::make_unique<Runtime>(options), nullptr);  // compiled, and on disk
    std::vector<device::DeviceBuffer> all;
    for (std::size_t bytes = std::size_t{16} << 30; bytes >= 4096;) {
      try {
        all.push_back(device_bytes(bytes));
      } catch (const Error&) {
        bytes /= 2;
      }
    }
    // The driver has some room of its own: each Runtime loads the kernel once more, until one cannot.
    std::vector<std::unique_ptr<Runtime>> runtimes;
    ErrorCode full{0};
    while (full == ErrorCode{0} && runtimes.size() < 1000) {
      runtimes.push_back(std::make_unique<Runtime>(options));
      full = code_of([&] { runtimes.back()->prepare(problem.spec, problem.shape); });
    }
    all.clear();
    const bool works = code_of([&] { problem.run(*runtimes.back(), nullptr); }) == ErrorCode{0};
    fs::remove_all(folder);
    answer({full == ErrorCode::cuda, works});
  });
}

/// What the soak calls: both types, causal or not, a score program, a mask with lists of tiles, a block map,
/// packed variable lengths; each at lengths that are whole tiles and not.
std::vector<AttentionCase> soak_cases() {
  const std::vector<AttentionSpec> specs{
      {.dtype = DType::bf16, .head_dim = 64},
      {.dtype = DType::fp16, .head_dim = 128, .mask = causal()},
      {.dtype = DType::bf16, .head_dim = 128, .mask = causal(), .reproducible = {.deterministic = true}},
      {.dtype = DType::fp16, .head_dim = 64, .score = programs::alibi()},
      {.dtype = DType::bf16, .head_dim = 64, .mask = programs::documents(1)},
      {.dtype = DType::fp16, .head_dim = 64, .block_map = {64, 64}},
      {.dtype = DType::bf16, .head_dim = 128, .mask = causal(), .varlen = true}};
  std::vector<AttentionCase> cases;
  for (const AttentionSpec& spec : specs)
    for (const std::int64_t length : {77, 128, 300})
      cases.push_back({.spec = spec,
                       .shape = {2, 4, 2, length, 1 + length / 2},
                       .family = Family::sm90,
                       .seed = static_cast<unsigned>(cases.size())});
  return cases;
}

/// One problem in one thread: every result is held against the reference, and O, which no kernel adds up in
/// any order, against the bits of the first.
class SoakProblem {
 public:
  explicit SoakProblem(const AttentionCase& test) : test_(test), run_(test) {}

  void forward(Runtime& runtime, Stream stream) {
    run_.use(stream);
    run_.check_forward(runtime, config(Pass::forward));
    std::vector<double> out = run_.out();
    // As bits, because rows of no sequence are NaN.
    if (first_.empty()) first_ = encode(DType::fp32, out);
    EXPECT_EQ(encode(DType::fp32, out) == first_, true) << name_of(test_) << ": other bits than at first";
  }
  /// forward() has run.
  void backward(Runtime& runtime, Stream stream) {
    run_.use(stream);
    run_.check_backward(runtime, config(Pass::backward));
  }

 private:
  TileConfig config(Pass pass) const { return config_of(test_, pass); }

  AttentionCase test_;
  AttentionRun run_;
  std::vector<std::uint8_t> first_;
};

/// One thread's share of the soak.
class SoakThread {
 public:
  SoakThread(unsigned seed, RuntimeOptions options)
      : random_(seed), options_(std::move(options)), own_(gpu().driver()) {
    for (const AttentionCase& test : soak_cases()) problems_.push_back(std::make_unique<SoakProblem>(test));
  }
  /// That many problems at random, half of them with their backward pass. Returns the calls made, fewer when
  /// one was wrong.
  int make(int count) {
    gpu().context->make_current();
    auto runtime = std::make_unique<Runtime>(options_);
    int calls = 0;
    for (int i = 0; i < count && !testing::Test::HasFailure(); ++i) {
      if (random_() % 50 == 0) runtime = std::make_unique<Runtime>(options_);
      if (random_() % 200 == 0)
        cache::Store(options_.cache_dir.value(), cache::Store::Access::read_write).clear(false);
      SoakProblem& problem = *problems_[random_() % problems_.size()];
      const Stream stream = random_() % 2 == 0 ? nullptr : own_.get();
      const bool with_backward = random_() % 2 == 0;
      try {
        problem.forward(*runtime, stream);
        if (with_backward) problem.backward(*runtime, stream);
      } catch (const Error& error) {
        ADD_FAILURE() << error.what();
      }
      calls += 1 + with_backward;
    }
    return calls;
  }

 private:
  std::mt19937 random_;
  RuntimeOptions options_;
  device::StreamOwner own_;
  std::vector<std::unique_ptr<SoakProblem>> problems_;
};

/// Bytes that are in use, of the device by everybody and of the host by this process.
struct MemoryInUse {
  std::size_t device = 0, host = 0;
  static MemoryInUse now() {
    std::size_t free = 0, total = 0;
    gpu().driver()->check(gpu().driver()->mem_get_info(&free, &total), "cuMemGetInfo");
    return {total - free, ::mallinfo2().uordblks};
  }
};

/// Random specs, passes, streams, threads and runtimes, while the cache is wiped. FLASHJIT_SOAK_CALLS sets
/// how many problems each of four threads takes.
TEST_F(Lifetime, RandomCallsAreRightAndMemoryStaysFlat) {
  const char* wanted = std::getenv("FLASHJIT_SOAK_CALLS");
  const int count = wanted ? std::atoi(wanted) : 100;
  const fs::path folder = fs::temp_directory_path() / ("flashjit-soak-" + unique_suffix());
  const RuntimeOptions options{.cache_dir = folder.string(), .log = [](std::string_view) {}};
  const auto begin = std::chrono::steady_clock::now();
  std::vector<std::unique_ptr<SoakThread>> workers;
  for (unsigned t = 0; t < 4; ++t) workers.push_back(std::make_unique<SoakThread>(t, options));

  std::atomic<int> calls = 0;
  const auto round = [&](int problems) {
    std::vector<std::thread> threads;
    for (const auto& worker : workers) threads.emplace_back([&] { calls += worker->make(problems); });
    for (std::thread& thread : threads) thread.join();
    gpu().context->synchronize();
    return MemoryInUse::now();
  };
  const MemoryInUse half = round(count / 2), whole = round(count - count / 2);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::printf(
      "soak: %d calls in %.0f s; MiB in use at half time and at the end: device %zu and %zu, "
      "host %zu and %zu\n",
      calls.load(), seconds, half.device >> 20, whole.device >> 20, half.host >> 20, whole.host >> 20);
  // The driver keeps what it has taken in steps of 2 MiB.
  constexpr std::size_t kSteps = std::size_t{16} << 20;
  if (!shares_the_device()) {
    EXPECT_LE(whole.device, half.device + kSteps);
  }
  EXPECT_LE(whole.host, half.host + kSteps);
  workers.clear();
  fs::remove_all(folder);
}

}  // namespace
}  // namespace flashjit::test
