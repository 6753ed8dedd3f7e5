// What a call costs on the host: Runtime::forward in steady state beside a bare cuLaunchKernelEx of the same
// kernel with the same parameters. The difference is flashjit's own cost a call. As a table, which
// python_host.py takes into its own: --benchmark_out=host_costs.csv --benchmark_out_format=csv
#include <benchmark/benchmark.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>

#include "call/arguments.hpp"
#include "call/parameters.hpp"
#include "compile/compiler.hpp"
#include "device/device_info.hpp"
#include "device/loaded_kernel.hpp"
#include "device/resources.hpp"
#include "device/tensor_maps.hpp"
#include "flashjit/flashjit.h"
#include "flashjit/flashjit.hpp"
#include "plan/params_layout.hpp"
#include "plan/plan.hpp"
#include "render/render.hpp"
#include "support/environment.hpp"
#include "support/file.hpp"

namespace {

using namespace flashjit;

/// A shape whose kernel is over in a few microseconds, so that the host and not the queue is measured.
constexpr AttentionShape kShape{1, 1, 1, 64, 64};
constexpr int kLaunchesBeforeWait = 256;  // the driver's queue holds about a thousand

AttentionSpec make_spec() { return {.dtype = DType::bf16, .head_dim = 64, .mask = causal()}; }

/// Device, kernel and tensors that every benchmark uses.
class Bench {
 public:
  Bench()
      : context_(device::Driver::open(read_environment().libcuda)),
        info_(device::query_device(driver(), context_.device())),
        plan_(plan::make_plan({make_spec()}, kShape, info_, {})),
        tensors_(context_.driver(), 4 * kTensorBytes),
        stream_(context_.driver()) {
    tensors_.fill(0);
    const KernelSource source =
        render::render(plan_.spec, plan_.config, info_, render::TemplateSet::embedded());
    const CompiledKernel compiled = compile::Compiler::open(read_environment().nvrtc)->compile(source);
    kernel_.emplace(context_.driver(), compiled.cubin, plan_.entries);
    kernel_->make_ready(context_.device());
  }

  const device::Driver& driver() const { return *context_.driver(); }
  CUstream stream() const { return stream_.get(); }
  const plan::ExecutionPlan& plan() const { return plan_; }
  const device::LoadedKernel& kernel() const { return *kernel_; }

  ForwardArgs args() const {
    const auto view = [&](int index) {
      return TensorView::bhsd(static_cast<char*>(tensors_.data()) + index * kTensorBytes, kShape.batch,
                              kShape.heads_q, kShape.seqlen_q, 64, DType::bf16);
    };
    return {.q = view(0), .k = view(1), .v = view(2), .out = view(3)};
  }

  void wait() const { stream_.synchronize(); }

  /// Keeps the launch queue from filling, outside of the measured time.
  void after_launch(benchmark::State& state, int& launched) const {
    if (++launched % kLaunchesBeforeWait != 0) return;
    state.PauseTiming();
    wait();
    state.ResumeTiming();
  }

 private:
  static constexpr std::size_t kTensorBytes = std::size_t{64} * 64 * 2;
  device::PrimaryContext context_;
  DeviceInfo info_;
  plan::ExecutionPlan plan_;
  device::DeviceBuffer tensors_;
  device::StreamOwner stream_;
  std::optional<device::LoadedKernel> kernel_;
};

void bare_launch(benchmark::State& state, const Bench& bench) {
  const ForwardArgs args = bench.args();
  const Params params = make_params(bench.plan(), args);
  const plan::PackedParams packed(plan::params_layout(bench.plan()), params);
  device::TensorMaps maps{};
  if (const auto& boxes = bench.plan().tensor_boxes)
    maps =
        device::make_tensor_maps(bench.driver(), *boxes, bench.plan().spec.dtype, bench.plan().spec.kv_type(),
                                 args.q, {}, args.k, args.v, args.out, "out", params.captures);
  std::array<void*, 2> parameters{const_cast<void*>(packed.data()), &maps};
  int launched = 0;
  for (auto _ : state) {
    for (const plan::Launch& launch : bench.plan().launches) {
      const plan::Entry& entry = bench.plan().entries[launch.entry];
      device::launch(bench.driver(), bench.kernel().kernel(launch.entry),
                     static_cast<unsigned>(launch.blocks), entry.threads, entry.shared_bytes, bench.stream(),
                     parameters, launch.early);
    }
    bench.after_launch(state, launched);
  }
}

void steady_calls(benchmark::State& state, const Bench& bench, const AttentionSpec& spec,
                  const ForwardArgs& args) {
  Runtime runtime;
  runtime.forward(spec, args, bench.stream());
  int launched = 0;
  for (auto _ : state) {
    runtime.forward(spec, args, bench.stream());
    bench.after_launch(state, launched);
  }
  bench.wait();  // the kernel unloads with its Runtime
}

void runtime_forward(benchmark::State& state, const Bench& bench) {
  steady_calls(state, bench, make_spec(), bench.args());
}

/// A score program that reads a captured tensor, which is looked up by name and checked in every call.
void runtime_forward_with_capture(benchmark::State& state, const Bench& bench) {
  AttentionSpec spec = make_spec();
  spec.score = ScoreProgram("slopes: fp32 1d; score + slopes[h] * to_float(kv - q)");
  ForwardArgs args = bench.args();
  const std::array captures = {Capture::tensor("slopes", args.q.data, {kShape.heads_q})};  // zeros
  args.captures = captures;
  steady_calls(state, bench, spec, args);
}

void c_forward(benchmark::State& state, const Bench& bench) {
  flashjit_runtime* runtime = nullptr;
  flashjit_spec* spec = nullptr;
  const ForwardArgs args = bench.args();
  const auto tensor = [](const ConstTensorView& view) {
    flashjit_tensor tensor{const_cast<void*>(view.data), {}, {}};
    std::copy(view.size.begin(), view.size.end(), tensor.size);
    std::copy(view.stride.begin(), view.stride.end(), tensor.stride);
    return tensor;
  };
  flashjit_forward_args c{};
  c.struct_size = sizeof c;
  c.q = tensor(args.q);
  c.k = tensor(args.k);
  c.v = tensor(args.v);
  c.out = tensor(args.out);
  if (flashjit_runtime_create(nullptr, &runtime) != FLASHJIT_OK ||
      flashjit_spec_create("bf16:d64:causal", &spec) != FLASHJIT_OK ||
      flashjit_forward(runtime, spec, &c, bench.stream()) != FLASHJIT_OK)
    state.SkipWithError(flashjit_last_error_message());
  int launched = 0;
  for (auto _ : state) {
    flashjit_forward(runtime, spec, &c, bench.stream());
    bench.after_launch(state, launched);
  }
  bench.wait();
  flashjit_spec_destroy(spec);
  flashjit_runtime_destroy(runtime);
}

/// From nothing in memory to a launch, with the kernel in the disk cache: a new Runtime each time.
void disk_to_first_launch(benchmark::State& state, const Bench& bench) {
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / ("flashjit-bench-" + unique_suffix());
  const RuntimeOptions options{.cache_dir = folder.string(), .log = [](std::string_view) {}};
  const AttentionSpec spec = make_spec();
  const ForwardArgs args = bench.args();
  Runtime(options).prepare(spec, kShape);
  for (auto _ : state) {
    auto runtime = std::make_unique<Runtime>(options);
    runtime->forward(spec, args, bench.stream());
    state.PauseTiming();
    bench.wait();
    runtime.reset();
    state.ResumeTiming();
  }
  std::filesystem::remove_all(folder);
}

/// Without its launches: checks and parameters, which need no GPU's answer.
void arguments_alone(benchmark::State& state, const Bench& bench) {
  const AttentionSpec spec = make_spec();
  const ForwardArgs args = bench.args();
  for (auto _ : state) {
    check_arguments(spec, args);
    benchmark::DoNotOptimize(make_params(bench.plan(), args));
  }
}

/// What a call without a spec costs more.
void spec_of_arguments(benchmark::State& state, const Bench& bench) {
  const AttentionSpec options{.mask = causal()};
  const ForwardArgs args = bench.args();
  for (auto _ : state) benchmark::DoNotOptimize(spec_of(args, options));
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  try {
    const Bench bench;
    const auto add = [&](const char* name, auto* body) {
      benchmark::RegisterBenchmark(name, [body, &bench](benchmark::State& state) { body(state, bench); });
    };
    add("bare_cuLaunchKernelEx", bare_launch);
    add("Runtime::forward", runtime_forward);
    add("Runtime::forward, captured tensor", runtime_forward_with_capture);
    add("flashjit_forward", c_forward);
    add("disk_to_first_launch", disk_to_first_launch);
    add("check_arguments_and_make_params", arguments_alone);
    add("spec_of", spec_of_arguments);
    benchmark::RunSpecifiedBenchmarks();
    benchmark::Shutdown();
    return EXIT_SUCCESS;
  } catch (const Error& error) {
    std::fprintf(stderr, "host_costs: %s: %s\n", to_string(error.code()).c_str(), error.what());
    return EXIT_FAILURE;
  }
}
