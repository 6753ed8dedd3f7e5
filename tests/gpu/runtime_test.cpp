// The runtime on a real device: capture, threads, caches, packs, contexts, and bad input that launches
// nothing.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <list>
#include <random>
#include <thread>

#include "flashjit/can.hpp"
#include "flashjit/flashjit.h"
#include "support/file.hpp"
#include "tests/support/gpu_support.hpp"

namespace flashjit::test {
namespace {

namespace fs = std::filesystem;

const AttentionSpec kSpec{.dtype = DType::bf16, .head_dim = 64, .mask = causal()};
constexpr AttentionShape kShape{2, 4, 2, 200, 136};
constexpr std::int64_t kDim = 64;

std::vector<double> random_values(std::int64_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal;
  std::vector<double> values(count);
  for (double& value : values) value = normal(generator);
  return values;
}

/// Q, K, V and dO on the device, with poisoned places for all results of both passes.
struct Problem {
  explicit Problem(const AttentionShape& of = kShape)
      : shape(of),
        q(random_tensor(queries(), 1)),
        k(random_tensor(keys(), 2)),
        v(random_tensor(keys(), 3)),
        dout(random_tensor(queries(), 4)),
        out(poisoned(queries() * 2)),
        lse(poisoned(shape.batch * shape.heads_q * shape.seqlen_q * 4)),
        dq(poisoned(queries() * 2)),
        dk(poisoned(keys() * 2)),
        dv(poisoned(keys() * 2)) {}

  std::int64_t queries() const { return shape.batch * shape.heads_q * shape.seqlen_q * kDim; }
  std::int64_t keys() const { return shape.batch * shape.heads_kv * shape.seqlen_kv * kDim; }
  static device::DeviceBuffer random_tensor(std::int64_t count, unsigned seed) {
    return to_device(DType::bf16, random_values(count, seed));
  }
  TensorView of_queries(const device::DeviceBuffer& buffer) const {
    return TensorView::bhsd(buffer.data(), shape.batch, shape.heads_q, shape.seqlen_q, kDim);
  }
  TensorView of_keys(const device::DeviceBuffer& buffer) const {
    return TensorView::bhsd(buffer.data(), shape.batch, shape.heads_kv, shape.seqlen_kv, kDim);
  }

  ForwardArgs forward() const {
    return {.q = of_queries(q),
            .k = of_keys(k),
            .v = of_keys(v),
            .out = of_queries(out),
            .lse = static_cast<float*>(lse.data())};
  }
  BackwardArgs backward() const {
    return {.q = of_queries(q),
            .k = of_keys(k),
            .v = of_keys(v),
            .out = of_queries(out),
            .lse = static_cast<const float*>(lse.data()),
            .dout = of_queries(dout),
            .dq = of_queries(dq),
            .dk = of_keys(dk),
            .dv = of_keys(dv),
            .workspace = {workspace.data(), workspace.bytes()}};
  }
  std::vector<std::uint8_t> result() const { return device::download<std::uint8_t>(out); }

  AttentionShape shape;
  device::DeviceBuffer q, k, v, dout, out, lse, dq, dk, dv, workspace;
};

std::vector<std::uint8_t> poison(const Problem& problem) {
  std::vector<std::uint8_t> bytes(problem.queries() * 2, 0xff);
  return bytes;
}

bool all_finite(DType dtype, const device::DeviceBuffer& buffer) {
  for (const double value : from_device(dtype, buffer))
    if (!std::isfinite(value)) return false;
  return true;
}

KernelSpec backward_spec(bool deterministic = false) {
  KernelSpec spec{kSpec, Pass::backward};
  spec.reproducible.deterministic = deterministic;
  return spec;
}

class RuntimeTest : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    folder_ = fs::temp_directory_path() / ("flashjit-runtime-" + unique_suffix());
    fs::create_directories(folder_);
  }
  void TearDown() override {
    if (!folder_.empty()) fs::remove_all(folder_);
  }

  std::string cache() const { return (folder_ / "cache").string(); }
  RuntimeOptions options() {
    return {.cache_dir = cache(), .jit = JitMode::on, .log = [this](std::string_view line) {
              log_ += std::string(line) + "\n";
            }};
  }
  static void synchronize() { gpu().context->synchronize(); }

  /// The bytes that a plain call of forward writes.
  std::vector<std::uint8_t> expected(Runtime& runtime) {
    const Problem problem;
    runtime.forward(kSpec, problem.forward(), nullptr);
    synchronize();
    EXPECT_TRUE(all_finite(DType::bf16, problem.out));
    return problem.result();
  }

  fs::path folder_;
  std::string log_;
};

template <class Call>
ErrorCode code_of(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.code();
  }
  return ErrorCode{0};
}

TEST_F(RuntimeTest, DeviceIsTheContexts) {
  Runtime runtime(options());
  EXPECT_EQ(runtime.device(), gpu().info);
  EXPECT_GE(runtime.device().compute_capability, 75);
  EXPECT_TRUE(can(kSpec, kShape, runtime.device()));
}

TEST_F(RuntimeTest, ForwardAndBackwardWriteEverything) {
  Runtime runtime(options());
  Problem problem;
  problem.workspace = poisoned(runtime.workspace_bytes(backward_spec(), kShape));
  runtime.forward(kSpec, problem.forward(), nullptr);
  runtime.backward(kSpec, problem.backward(), nullptr);
  synchronize();
  for (const auto* buffer : {&problem.out, &problem.dq, &problem.dk, &problem.dv})
    EXPECT_TRUE(all_finite(DType::bf16, *buffer));
  EXPECT_NE(log_.find("compiled fwd:bf16:d64:causal for " + gpu().info.arch), log_.npos) << log_;
}

/// Captures what `body` launches on a stream and runs the graph `times` times.
template <class Body>
void capture_and_run(Body&& body, int times) {
  const device::Driver& driver = *gpu().driver();
  const device::StreamOwner stream(gpu().driver());
  CUgraph graph = nullptr;
  CUgraphExec executable = nullptr;
  driver.check(driver.stream_begin_capture(stream.get(), CU_STREAM_CAPTURE_MODE_GLOBAL), "begin capture");
  body(stream.get());
  driver.check(driver.stream_end_capture(stream.get(), &graph), "end capture");
  driver.check(driver.graph_instantiate(&executable, graph, 0), "instantiate");
  for (int i = 0; i < times; ++i) driver.check(driver.graph_launch(executable, stream.get()), "launch graph");
  stream.synchronize();
  driver.graph_exec_destroy(executable);
  driver.graph_destroy(graph);
}

TEST_F(RuntimeTest, CallsAfterPrepareCanBeCaptured) {
  Runtime plain(options());
  const std::vector<std::uint8_t> wanted = expected(plain);

  Runtime runtime(options());
  runtime.prepare(kSpec, kShape);
  runtime.prepare(backward_spec(true), kShape);
  Problem problem;
  problem.workspace = poisoned(runtime.workspace_bytes(backward_spec(true), kShape));
  synchronize();  // the poison is on the default stream
  capture_and_run(
      [&](Stream stream) {
        runtime.forward(kSpec, problem.forward(), stream);
        runtime.backward(backward_spec(true), problem.backward(), stream);
        // A refused call does not spoil the capture.
        EXPECT_EQ(code_of([&] { runtime.forward(kSpec, {}, stream); }), ErrorCode::invalid_argument);
      },
      3);
  EXPECT_EQ(problem.result(), wanted);
  const auto first = device::download<std::uint8_t>(problem.dq);
  EXPECT_TRUE(all_finite(DType::bf16, problem.dq));

  runtime.backward(backward_spec(true), problem.backward(), nullptr);
  synchronize();
  EXPECT_EQ(device::download<std::uint8_t>(problem.dq), first) << "graph and plain call differ";
}

TEST_F(RuntimeTest, ACaptureWithoutPrepareIsRefusedAndNotSpoilt) {
  Runtime runtime(options());
  const Problem problem;
  const device::Driver& driver = *gpu().driver();
  const device::StreamOwner stream(gpu().driver());
  driver.check(driver.stream_begin_capture(stream.get(), CU_STREAM_CAPTURE_MODE_GLOBAL), "begin capture");
  EXPECT_EQ(code_of([&] { runtime.forward(kSpec, problem.forward(), stream.get()); }),
            ErrorCode::invalid_argument);
  CUgraph graph = nullptr;
  EXPECT_EQ(driver.stream_end_capture(stream.get(), &graph), CUDA_SUCCESS);
  if (graph) driver.graph_destroy(graph);
}

TEST_F(RuntimeTest, ManyThreadsShareOneRuntime) {
  constexpr int kThreads = 8, kCalls = 25;
  Runtime plain(options());
  const std::vector<std::uint8_t> wanted = expected(plain);

  RuntimeOptions in_memory = options();
  in_memory.cache_dir = "";
  log_.clear();
  Runtime runtime(in_memory);
  std::atomic<int> right = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i)
    threads.emplace_back([&] {
      gpu().context->make_current();
      const Problem problem;
      synchronize();  // uploads and poison are on the default stream
      const device::StreamOwner stream(gpu().driver());
      for (int call = 0; call < kCalls; ++call) runtime.forward(kSpec, problem.forward(), stream.get());
      stream.synchronize();
      right += problem.result() == wanted;
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, kThreads);
  // One line for one compile, however many asked.
  EXPECT_EQ(log_.find("compiled"), log_.rfind("compiled")) << log_;
  EXPECT_NE(log_.find("compiled"), log_.npos);
}

/// Blocks of the backward pass wait for others of the same launch: launches that share the device must not
/// wait for blocks that find no room.
TEST_F(RuntimeTest, BackwardPassesOfManyStreamsEnd) {
  constexpr AttentionShape kMany{8, 8, 8, 520, 520};  // more KV tiles than a device has multiprocessors
  constexpr int kStreams = 4, kCalls = 10;
  Runtime runtime(options());
  std::vector<Problem> problems;
  for (int i = 0; i <= kStreams; ++i) {
    Problem& problem = problems.emplace_back(kMany);
    problem.workspace = poisoned(runtime.workspace_bytes(backward_spec(true), kMany));
    runtime.forward(kSpec, problem.forward(), nullptr);
  }
  runtime.backward(backward_spec(true), problems[kStreams].backward(), nullptr);
  synchronize();
  std::list<device::StreamOwner> streams;
  for (int i = 0; i < kStreams; ++i) streams.emplace_back(gpu().driver());
  for (int call = 0; call < kCalls; ++call) {
    auto problem = problems.begin();
    for (const device::StreamOwner& stream : streams)
      runtime.backward(backward_spec(call + 1 == kCalls), (problem++)->backward(), stream.get());
  }
  synchronize();
  const auto dq = [&](int i) { return device::download<std::uint8_t>(problems[i].dq); };
  EXPECT_TRUE(all_finite(DType::bf16, problems[kStreams].dq));
  for (int i = 0; i < kStreams; ++i) EXPECT_EQ(dq(i), dq(kStreams)) << i;
}

TEST_F(RuntimeTest, ASecondRuntimeHitsTheDiskCache) {
  Runtime first(options());
  const KernelReport compiled = first.prepare(kSpec, kShape);
  EXPECT_EQ(compiled.origin, KernelOrigin::compiled);
  EXPECT_GT(compiled.compile_ms, 0);
  EXPECT_EQ(first.prepare(kSpec, kShape).origin, KernelOrigin::memory);

  Runtime second(options());
  const KernelReport loaded = second.prepare(kSpec, kShape);
  EXPECT_EQ(loaded.origin, KernelOrigin::disk);
  EXPECT_EQ(loaded.key, compiled.key);
  EXPECT_EQ(loaded.compile_ms, 0);
  ASSERT_FALSE(loaded.entries.empty());
  EXPECT_EQ(loaded.entries[0].registers, compiled.entries[0].registers);
  EXPECT_EQ(expected(second), expected(first));
}

TEST_F(RuntimeTest, WithJitOffAPackServesAndTheRestIsMissing) {
  Runtime maker(options());
  const std::vector<std::uint8_t> wanted = expected(maker);

  RuntimeOptions packed = options();
  packed.cache_dir = "";
  packed.packs = {cache()};  // a cache folder is a pack
  packed.jit = JitMode::off;
  Runtime runtime(packed);
  EXPECT_EQ(runtime.prepare(kSpec, kShape).origin, KernelOrigin::pack);
  EXPECT_EQ(expected(runtime), wanted);
  EXPECT_EQ(code_of([&] { runtime.prepare(backward_spec(), kShape); }), ErrorCode::kernel_missing);
}

TEST_F(RuntimeTest, ADamagedCacheEntryIsCompiledAnew) {
  Runtime first(options());
  const std::vector<std::uint8_t> wanted = expected(first);
  int damaged = 0;
  for (const auto& entry : fs::recursive_directory_iterator(cache()))
    if (entry.path().extension() == ".cubin") {
      fs::resize_file(entry.path(), entry.file_size() / 2);
      ++damaged;
    }
  ASSERT_GT(damaged, 0);
  Runtime second(options());
  EXPECT_EQ(second.prepare(kSpec, kShape).origin, KernelOrigin::compiled);
  EXPECT_EQ(expected(second), wanted);
  Runtime third(options());
  EXPECT_EQ(third.prepare(kSpec, kShape).origin, KernelOrigin::disk);
}

TEST_F(RuntimeTest, AnUnwritableCacheFallsBackToMemory) {
  RuntimeOptions nowhere = options();
  nowhere.cache_dir = "/proc/flashjit";
  Runtime runtime(nowhere);
  EXPECT_EQ(runtime.prepare(kSpec, kShape).origin, KernelOrigin::compiled);
  EXPECT_EQ(runtime.prepare(kSpec, kShape).origin, KernelOrigin::memory);
  EXPECT_NE(log_.find("/proc/flashjit"), log_.npos) << log_;
}

TEST_F(RuntimeTest, WithoutAContextNothingHappens) {
  Runtime runtime(options());
  const Problem problem;
  const device::Driver& driver = *gpu().driver();
  driver.check(driver.ctx_set_current(nullptr), "cuCtxSetCurrent");
  EXPECT_EQ(code_of([&] { runtime.forward(kSpec, problem.forward(), nullptr); }), ErrorCode::no_device);
  EXPECT_EQ(code_of([&] { runtime.prepare(kSpec, kShape); }), ErrorCode::no_device);
  gpu().context->make_current();
  EXPECT_EQ(problem.result(), poison(problem));
}

TEST_F(RuntimeTest, BadArgumentsLaunchNothing) {
  Runtime runtime(options());
  runtime.prepare(kSpec, kShape);
  const Problem problem;
  const auto refused = [&](auto&& change) {
    ForwardArgs args = problem.forward();
    change(args);
    return code_of([&] { runtime.forward(kSpec, args, nullptr); });
  };
  EXPECT_EQ(refused([](ForwardArgs& args) { args.k.data = nullptr; }), ErrorCode::invalid_argument);
  EXPECT_EQ(refused([](ForwardArgs& args) { args.v.size[2] += 1; }), ErrorCode::invalid_argument);
  EXPECT_EQ(refused([](ForwardArgs& args) { args.softmax_scale = -1.0f; }), ErrorCode::invalid_argument);
  EXPECT_EQ(refused([](ForwardArgs& args) { args.dropout_p = 0.5; }), ErrorCode::invalid_argument);
  EXPECT_EQ(refused([](ForwardArgs& args) { args.q.data = static_cast<const char*>(args.q.data) + 2; }),
            ErrorCode::invalid_argument);
  synchronize();
  EXPECT_EQ(problem.result(), poison(problem));
}

TEST_F(RuntimeTest, HostMemoryIsRefusedWhereTheDeviceCannotReadIt) {
  int pageable = 0;
  gpu().driver()->device_get_attribute(&pageable, CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS,
                                       gpu().context->device());
  if (pageable) GTEST_SKIP() << "this device reads all host memory";
  Runtime runtime(options());
  const Problem problem;
  alignas(16) static char host[1024];
  ForwardArgs args = problem.forward();
  args.q.data = host;
  EXPECT_EQ(code_of([&] { runtime.forward(kSpec, args, nullptr); }), ErrorCode::invalid_argument);
  synchronize();
  EXPECT_EQ(problem.result(), poison(problem));
}

TEST_F(RuntimeTest, TheCInterfaceGivesTheSameBits) {
  Runtime plain(options());
  const std::vector<std::uint8_t> wanted = expected(plain);
  const Problem problem;
  const auto tensor = [](const ConstTensorView& view) {
    flashjit_tensor made{const_cast<void*>(view.data), {}, {}};
    std::copy(view.size.begin(), view.size.end(), made.size);
    std::copy(view.stride.begin(), view.stride.end(), made.stride);
    return made;
  };
  const std::string folder = cache();
  flashjit_options c_options{};
  c_options.struct_size = sizeof c_options;
  c_options.cache_dir = folder.c_str();
  flashjit_runtime* runtime = nullptr;
  flashjit_spec* spec = nullptr;
  ASSERT_EQ(flashjit_runtime_create(&c_options, &runtime), FLASHJIT_OK) << flashjit_last_error_message();
  ASSERT_EQ(flashjit_spec_create("bf16:d64:causal", &spec), FLASHJIT_OK) << flashjit_last_error_message();
  const ForwardArgs args = problem.forward();
  flashjit_forward_args c{};
  c.struct_size = sizeof c;
  c.q = tensor(args.q);
  c.k = tensor(args.k);
  c.v = tensor(args.v);
  c.out = tensor(args.out);
  EXPECT_EQ(flashjit_forward(runtime, spec, &c, nullptr), FLASHJIT_OK) << flashjit_last_error_message();
  synchronize();
  EXPECT_EQ(problem.result(), wanted);
  flashjit_spec_destroy(spec);
  flashjit_runtime_destroy(runtime);
}

/// Calls go on while a thread tunes, a graph is captured meanwhile, and results stay right.
TEST_F(RuntimeTest, TuningInTheBackgroundSwitchesWithoutDisturbingCalls) {
  RuntimeOptions with_tuning = options();
  with_tuning.tune_in_background = true;
  std::mutex log_mutex;
  with_tuning.log = [&](std::string_view line) {
    const std::lock_guard lock(log_mutex);
    log_ += std::string(line) + "\n";
  };
  Runtime plain(options());
  const std::vector<double> wanted = decode(DType::bf16, expected(plain));

  Runtime runtime(with_tuning);
  Problem problem;
  synchronize();  // the stream below does not wait for the default one
  const device::StreamOwner stream(gpu().context->driver());
  const device::Driver& driver = *gpu().context->driver();
  runtime.forward(kSpec, problem.forward(), stream.get());
  // Global mode: an unsafe call of another thread would spoil the capture.
  CUgraph graph = nullptr;
  int captures = 0;
  const auto start = std::chrono::steady_clock::now();
  ConfigSource source = ConfigSource::heuristic;
  while (source != ConfigSource::tuned &&
         std::chrono::steady_clock::now() - start < std::chrono::seconds(90)) {
    driver.check(driver.stream_begin_capture(stream.get(), CU_STREAM_CAPTURE_MODE_GLOBAL), "begin");
    runtime.forward(kSpec, problem.forward(), stream.get());
    driver.check(driver.stream_end_capture(stream.get(), &graph), "end");
    driver.graph_destroy(graph);
    ++captures;
    runtime.forward(kSpec, problem.forward(), stream.get());
    stream.synchronize();
    source = runtime.prepare(kSpec, kShape).config_source;
  }
  EXPECT_EQ(source, ConfigSource::tuned) << log_;
  EXPECT_GT(captures, 1);
  EXPECT_NE(log_.find("in the background"), std::string::npos) << log_;
  problem.out.fill(0xff);
  synchronize();
  runtime.forward(kSpec, problem.forward(), stream.get());
  stream.synchronize();
  const std::vector<double> got = from_device(DType::bf16, problem.out);
  for (std::size_t i = 0; i < wanted.size(); ++i) ASSERT_NEAR(got[i], wanted[i], 0.03) << i;

  // The record is in the cache: the next Runtime takes it at once.
  EXPECT_EQ(Runtime(options()).prepare(kSpec, kShape).config_source, ConfigSource::tuned);
}

}  // namespace
}  // namespace flashjit::test
