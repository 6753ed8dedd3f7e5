// What the tests of a device's and a process's life share: one problem, and processes of their own for what
// would spoil the device for other tests.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <initializer_list>
#include <random>
#include <vector>

#include "flashjit/attention_programs.hpp"
#include "tests/support/attention_case.hpp"

namespace flashjit::test {

/// Both passes of a problem in bf16, its inputs the same for the same sizes.
struct Problem {
  AttentionSpec spec;
  AttentionShape shape;

  /// The bytes of O, dQ, dK and dV from calls on `stream`.
  std::vector<std::uint8_t> run(Runtime& runtime, Stream stream) const {
    const AttentionShape& s = shape;
    const std::int64_t d = spec.head_dim;
    const device::DeviceBuffer q = input(s.batch * s.heads_q * s.seqlen_q * d, 1);
    const device::DeviceBuffer k = input(s.batch * s.heads_kv * s.seqlen_kv * d, 2);
    const device::DeviceBuffer v = input(s.batch * s.heads_kv * s.seqlen_kv * d, 3);
    const device::DeviceBuffer dout = input(s.batch * s.heads_q * s.seqlen_q * d, 4);
    const device::DeviceBuffer out = poisoned(q.bytes()), dq = poisoned(q.bytes()), dk = poisoned(k.bytes()),
                               dv = poisoned(v.bytes());
    const device::DeviceBuffer lse = poisoned(s.batch * s.heads_q * s.seqlen_q * sizeof(float));
    const std::size_t bytes = runtime.workspace_bytes(with_pass(spec, Pass::backward), s);
    const device::DeviceBuffer workspace = poisoned(bytes);
    auto* sums = static_cast<float*>(lse.data());
    gpu().context->synchronize();  // inputs and poison are on the default stream
    runtime.forward(spec,
                    {.q = of_q(q.data()),
                     .k = of_kv(k.data()),
                     .v = of_kv(v.data()),
                     .out = of_q(out.data()),
                     .lse = sums},
                    stream);
    runtime.backward(spec,
                     {.q = of_q(q.data()),
                      .k = of_kv(k.data()),
                      .v = of_kv(v.data()),
                      .out = of_q(out.data()),
                      .lse = sums,
                      .dout = of_q(dout.data()),
                      .dq = of_q(dq.data()),
                      .dk = of_kv(dk.data()),
                      .dv = of_kv(dv.data()),
                      .workspace = {workspace.data(), bytes}},
                     stream);
    gpu().driver()->check(gpu().driver()->stream_synchronize(stream), "cuStreamSynchronize");
    std::vector<std::uint8_t> all;
    for (const device::DeviceBuffer* result : {&out, &dq, &dk, &dv}) {
      const std::vector<std::uint8_t> part = device::download<std::uint8_t>(*result);
      all.insert(all.end(), part.begin(), part.end());
    }
    return all;
  }

  /// A forward pass in memory(): Q, K and V in one half, O in the other. Not for its results.
  ForwardArgs within(void* memory) const {
    return {.q = of_q(memory),
            .k = of_kv(memory),
            .v = of_kv(memory),
            .out = of_q(static_cast<std::byte*>(memory) + bytes_of_q())};
  }
  /// Enough for within(), where K and V are no larger than Q.
  device::DeviceBuffer memory() const { return device_bytes(2 * bytes_of_q()); }
  std::size_t bytes_of_q() const {
    return static_cast<std::size_t>(shape.batch * shape.heads_q * shape.seqlen_q) * spec.head_dim *
           size_of(spec.dtype);
  }
  TensorView of_q(void* data) const {
    return TensorView::bhsd(data, shape.batch, shape.heads_q, shape.seqlen_q, spec.head_dim);
  }
  TensorView of_kv(void* data) const {
    return TensorView::bhsd(data, shape.batch, shape.heads_kv, shape.seqlen_kv, spec.head_dim);
  }

  static device::DeviceBuffer input(std::int64_t count, unsigned seed) {
    std::mt19937 random(seed);
    std::vector<double> values(static_cast<std::size_t>(count));
    for (double& value : values) value = static_cast<double>(random() % 256) / 64 - 2;
    return to_device(DType::bf16, values);
  }
};

inline AttentionSpec spec_of(int head_dim, bool is_causal = true) {
  AttentionSpec spec{.dtype = DType::bf16, .head_dim = head_dim, .reproducible = {.deterministic = true}};
  if (is_causal) spec.mask = causal();
  return spec;
}

inline const Problem kProblem{spec_of(128), {2, 4, 2, 300, 260}};

/// A function that the library's table lacks because only tests need it.
template <class Function>
Function* driver_function(const char* name) {
  void* library = ::dlopen(gpu().driver()->path.c_str(), RTLD_NOW);
  return reinterpret_cast<Function*>(library ? ::dlsym(library, name) : nullptr);
}

class Lifetime : public GpuTest {
 protected:
  static RuntimeOptions in_memory() {
    return {.cache_dir = "", .log = [](std::string_view) {}};
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

}  // namespace flashjit::test
