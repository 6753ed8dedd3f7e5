// What happens to a device while a Runtime lives: streams of every kind, a context that is reset, a kernel
// that faults, no memory left, and many random calls. What would spoil the device for other tests runs in a
// process of its own.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <random>
#include <thread>

#include "cache/store.hpp"
#include "gpu_support.hpp"
#include "support/file.hpp"

namespace flashjit::gpu_test {
namespace {

namespace fs = std::filesystem;

/// One forward problem in bf16, its inputs the same for the same sizes.
struct Problem {
  AttentionSpec spec;
  AttentionShape shape;

  /// The bytes of O from a call on `stream`.
  std::vector<std::uint8_t> run(Runtime& runtime, Stream stream) const {
    const AttentionShape& s = shape;
    const std::int64_t d = spec.head_dim;
    const device::DeviceBuffer q = input(s.batch * s.heads_q * s.seqlen_q * d, 1);
    const device::DeviceBuffer k = input(s.batch * s.heads_kv * s.seqlen_kv * d, 2);
    const device::DeviceBuffer v = input(s.batch * s.heads_kv * s.seqlen_kv * d, 3);
    const device::DeviceBuffer out = poisoned(q.bytes());
    gpu().context->synchronize();  // inputs and poison are on the default stream
    runtime.forward(spec,
                    {.q = TensorView::bhsd(q.data(), s.batch, s.heads_q, s.seqlen_q, d),
                     .k = TensorView::bhsd(k.data(), s.batch, s.heads_kv, s.seqlen_kv, d),
                     .v = TensorView::bhsd(v.data(), s.batch, s.heads_kv, s.seqlen_kv, d),
                     .out = TensorView::bhsd(out.data(), s.batch, s.heads_q, s.seqlen_q, d)},
                    stream);
    gpu().driver()->check(gpu().driver()->stream_synchronize(stream), "cuStreamSynchronize");
    return device::download<std::uint8_t>(out);
  }

  static device::DeviceBuffer input(std::int64_t count, unsigned seed) {
    std::mt19937 random(seed);
    std::vector<double> values(static_cast<std::size_t>(count));
    for (double& value : values) value = static_cast<double>(random() % 256) / 64 - 2;
    return to_device(DType::bf16, values);
  }
};

AttentionSpec spec_of(int head_dim, bool is_causal = true) {
  AttentionSpec spec{.dtype = DType::bf16, .head_dim = head_dim};
  if (is_causal) spec.mask = causal();
  return spec;
}

const Problem kProblem{spec_of(128), {2, 4, 2, 300, 260}};

class Lifetime : public GpuTest {
 protected:
  static RuntimeOptions in_memory() {
    return {.cache_dir = "", .log = [](std::string_view) {}};
  }
  /// A function that the library's table lacks because only tests need it.
  template <class Function>
  static Function* driver_function(const char* name) {
    void* library = ::dlopen(gpu().driver()->path.c_str(), RTLD_NOW);
    return reinterpret_cast<Function*>(library ? ::dlsym(library, name) : nullptr);
  }
  static ErrorCode code_of(const std::function<void()>& call) {
    try {
      call();
    } catch (const Error& error) {
      std::fprintf(stderr, "%s\n", error.what());
      return error.code();
    }
    return ErrorCode{0};
  }
  /// `body` runs in a new process, which has a context of its own, and ends it with answer().
  static void expect_in_its_own_process(const std::function<void()>& body) {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    EXPECT_EXIT(body(), testing::ExitedWithCode(0), "") << "the exit code says which check failed, from 1";
  }
  /// Ends a process of its own: says which check failed by its exit code.
  [[noreturn]] static void answer(std::initializer_list<bool> checks) {
    const auto failed = std::find(checks.begin(), checks.end(), false);
    std::_Exit(failed == checks.end() ? 0 : 1 + static_cast<int>(failed - checks.begin()));
  }
};

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
    const AttentionShape& s = kProblem.shape;
    const auto nowhere = [&](std::int64_t heads, std::int64_t length) {
      return TensorView::bhsd(reinterpret_cast<void*>(0x10000), s.batch, heads, length, 128);
    };
    const ForwardArgs args{.q = nowhere(s.heads_q, s.seqlen_q),
                           .k = nowhere(s.heads_kv, s.seqlen_kv),
                           .v = nowhere(s.heads_kv, s.seqlen_kv),
                           .out = nowhere(s.heads_q, s.seqlen_q)};
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
    Runtime runtime(in_memory());
    std::vector<device::DeviceBuffer> all;
    for (std::size_t bytes = std::size_t{16} << 30; bytes >= 4096;) {
      try {
        all.push_back(device_bytes(bytes));
      } catch (const Error&) {
        bytes /= 2;
      }
    }
    // The driver may still have room of its own for a small kernel.
    const ErrorCode full = code_of([&] { runtime.prepare(spec_of(96), kProblem.shape); });
    all.clear();
    const bool passes = code_of([&] { runtime.prepare(spec_of(96), kProblem.shape); }) == ErrorCode{0};
    const bool works = code_of([&] {
                         Problem{spec_of(96), kProblem.shape}.run(runtime, nullptr);
                       }) == ErrorCode{0};
    answer({full == ErrorCode{0} || full == ErrorCode::cuda, passes, works});
  });
}

std::size_t free_device_bytes() {
  std::size_t free = 0, total = 0;
  gpu().driver()->check(gpu().driver()->mem_get_info(&free, &total), "cuMemGetInfo");
  return free;
}

/// Random specs, shapes, streams, threads and runtimes, while the cache is wiped. FLASHJIT_SOAK_CALLS sets
/// how many calls each of four threads makes.
TEST_F(Lifetime, RandomCallsAreRightAndMemoryStaysFlat) {
  const char* wanted_calls = std::getenv("FLASHJIT_SOAK_CALLS");
  const int calls = wanted_calls ? std::atoi(wanted_calls) : 100;
  const fs::path folder = fs::temp_directory_path() / ("flashjit-soak-" + unique_suffix());
  const RuntimeOptions options{.cache_dir = folder.string(), .log = [](std::string_view) {}};
  std::vector<Problem> problems;
  for (const int head_dim : {64, 128})
    for (const bool is_causal : {false, true})
      for (const std::int64_t length : {1, 77, 128, 515})
        problems.push_back({spec_of(head_dim, is_causal), {1 + length % 2, 4, 2, length, 1 + length / 2}});
  std::vector<std::vector<std::uint8_t>> results;
  {
    Runtime reference(options);
    for (const Problem& problem : problems) results.push_back(problem.run(reference, nullptr));
  }

  std::atomic<int> wrong = 0, failed = 0;
  const auto work = [&](unsigned seed, int count) {
    gpu().context->make_current();
    std::mt19937 random(seed);
    const device::StreamOwner own(gpu().driver());
    auto runtime = std::make_unique<Runtime>(options);
    for (int call = 0; call < count; ++call) {
      if (random() % 50 == 0) runtime = std::make_unique<Runtime>(options);
      if (random() % 40 == 0) cache::Store(folder, cache::Store::Access::read_write).clear(false);
      const std::size_t i = random() % problems.size();
      try {
        wrong += problems[i].run(*runtime, random() % 2 == 0 ? nullptr : own.get()) != results[i];
      } catch (const Error& error) {
        ++failed;
        ADD_FAILURE() << error.what();
      }
    }
  };
  const auto round = [&](int count) {
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < 4; ++t) threads.emplace_back(work, t, count);
    for (std::thread& thread : threads) thread.join();
    gpu().context->synchronize();
  };
  round(calls / 2);
  const std::size_t device_before = free_device_bytes(), host_before = ::mallinfo2().uordblks;
  round(calls - calls / 2);
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(failed, 0);
  // The driver keeps what it has taken in steps of 2 MiB.
  if (!shares_the_device()) {
    EXPECT_LE(device_before, free_device_bytes() + (std::size_t{16} << 20));
  }
  EXPECT_LE(::mallinfo2().uordblks, host_before + (std::size_t{16} << 20));
  fs::remove_all(folder);
}

}  // namespace
}  // namespace flashjit::gpu_test
