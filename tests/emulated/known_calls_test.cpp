// Calls of the C interface that differ in their memory alone: each reads and writes its own, also those that
// are launched as an earlier one was.
#include <random>
#include <string>
#include <vector>

#include "tests/support/c_abi_support.hpp"
#include "tests/support/gpu_support.hpp"

namespace flashjit::test {
namespace {

class KnownCallsOnGpu : public GpuTest {};

struct Tensor {
  Tensor(std::int64_t batch, std::int64_t heads, std::int64_t rows, unsigned seed)
      : size{batch, heads, rows, kDim} {
    std::mt19937 generator(seed);
    std::normal_distribution<double> normal;
    std::vector<double> values(static_cast<std::size_t>(batch * heads * rows * kDim));
    for (double& value : values) value = normal(generator);
    memory = to_device(DType::bf16, values);
  }

  TensorView view() const { return TensorView::bhsd(memory.data(), size[0], size[1], size[2], kDim); }
  flashjit_tensor c() const {
    const TensorView of = view();
    flashjit_tensor made{of.data, {}, {}};
    std::copy(of.size.begin(), of.size.end(), made.size);
    std::copy(of.stride.begin(), of.stride.end(), made.stride);
    return made;
  }
  /// The bytes, and poison in their place.
  std::vector<std::uint8_t> take() {
    const auto bytes = device::download<std::uint8_t>(memory);
    memory.fill(0xff);
    return bytes;
  }

  static constexpr std::int64_t kDim = 64;
  std::int64_t size[4];
  device::DeviceBuffer memory;
};

/// A problem in memory of its own, with values of its own.
struct Problem {
  Problem(const AttentionShape& s, unsigned seed)
      : q(s.batch, s.heads_q, s.seqlen_q, seed),
        k(s.batch, s.heads_kv, s.seqlen_kv, seed + 1),
        v(s.batch, s.heads_kv, s.seqlen_kv, seed + 2),
        dout(s.batch, s.heads_q, s.seqlen_q, seed + 3),
        out(s.batch, s.heads_q, s.seqlen_q, seed),
        dq(s.batch, s.heads_q, s.seqlen_q, seed),
        dk(s.batch, s.heads_kv, s.seqlen_kv, seed),
        dv(s.batch, s.heads_kv, s.seqlen_kv, seed),
        lse(poisoned(static_cast<std::size_t>(s.batch * s.heads_q * s.seqlen_q) * 4)) {}

  void make_workspace(Runtime& runtime, const KernelSpec& spec, const AttentionShape& shape) {
    workspace = device_bytes(std::max<std::size_t>(runtime.workspace_bytes(spec, shape, spec.pass), 256));
  }
  float* rows() const { return static_cast<float*>(lse.data()); }

  Tensor q, k, v, dout, out, dq, dk, dv;
  device::DeviceBuffer lse, workspace;
};

TEST_F(KnownCallsOnGpu, ReadAndWriteTheirOwnMemory) {
  flashjit_options options{};
  options.struct_size = sizeof options;
  const RuntimePtr runtime = make_runtime(options);
  Runtime plain;
  for (const auto& [text, shape] :
       {std::pair<const char*, AttentionShape>{"bf16:d64:causal", {1, 2, 1, 96, 96}},
        {"bf16:d64", {1, 2, 1, 4, 2100}}}) {
    const SpecPtr spec = make_spec(text);
    std::vector<Problem> problems;  // all live, so that each lies elsewhere
    for (unsigned i = 0; i < 4; ++i) {
      SCOPED_TRACE(std::string(text) + ", call " + std::to_string(i));
      Problem& p = problems.emplace_back(shape, 10 * i);
      p.make_workspace(plain, parse_spec(text), shape);
      const Workspace workspace{p.workspace.data(), p.workspace.bytes()};
      plain.forward(parse_spec(text),
                    {.q = p.q.view(),
                     .k = p.k.view(),
                     .v = p.v.view(),
                     .out = p.out.view(),
                     .lse = p.rows(),
                     .workspace = workspace},
                    nullptr);
      gpu().context->synchronize();
      const auto out = p.out.take(), lse = device::download<std::uint8_t>(p.lse);
      p.lse.fill(0xff);
      flashjit_forward_args args{};
      args.struct_size = sizeof args;
      args.q = p.q.c(), args.k = p.k.c(), args.v = p.v.c(), args.out = p.out.c(), args.lse = p.rows();
      args.workspace = workspace.data, args.workspace_bytes = workspace.bytes;
      ASSERT_EQ(flashjit_forward(runtime.get(), spec.get(), &args, nullptr), FLASHJIT_OK)
          << flashjit_last_error_message();
      gpu().context->synchronize();
      EXPECT_EQ(device::download<std::uint8_t>(p.lse), lse);
      EXPECT_EQ(p.out.take(), out);
    }
  }
}

TEST_F(KnownCallsOnGpu, BackwardPassesToo) {
  flashjit_options options{};
  options.struct_size = sizeof options;
  const RuntimePtr runtime = make_runtime(options);
  Runtime plain;
  const AttentionShape shape{1, 2, 1, 80, 80};
  const SpecPtr spec = make_spec("bf16:d64:det");
  const KernelSpec forward = parse_spec("bf16:d64:det");
  std::vector<Problem> problems;
  for (unsigned i = 0; i < 4; ++i) {
    SCOPED_TRACE(i);
    Problem& p = problems.emplace_back(shape, 10 * i);
    p.make_workspace(plain, {forward, Pass::backward}, shape);
    const Workspace workspace{p.workspace.data(), p.workspace.bytes()};
    plain.forward(forward,
                  {.q = p.q.view(), .k = p.k.view(), .v = p.v.view(), .out = p.out.view(), .lse = p.rows()},
                  nullptr);
    plain.backward(forward,
                   {.q = p.q.view(),
                    .k = p.k.view(),
                    .v = p.v.view(),
                    .out = p.out.view(),
                    .lse = p.rows(),
                    .dout = p.dout.view(),
                    .dq = p.dq.view(),
                    .dk = p.dk.view(),
                    .dv = p.dv.view(),
                    .workspace = workspace},
                   nullptr);
    gpu().context->synchronize();
    const auto dq = p.dq.take(), dk = p.dk.take(), dv = p.dv.take();
    flashjit_backward_args args{};
    args.struct_size = sizeof args;
    args.q = p.q.c(), args.k = p.k.c(), args.v = p.v.c(), args.out = p.out.c(), args.dout = p.dout.c();
    args.dq = p.dq.c(), args.dk = p.dk.c(), args.dv = p.dv.c(), args.lse = p.rows();
    args.workspace = workspace.data, args.workspace_bytes = workspace.bytes;
    ASSERT_EQ(flashjit_backward(runtime.get(), spec.get(), &args, nullptr), FLASHJIT_OK)
        << flashjit_last_error_message();
    gpu().context->synchronize();
    EXPECT_EQ(p.dq.take(), dq);
    EXPECT_EQ(p.dk.take(), dk);
    EXPECT_EQ(p.dv.take(), dv);
  }
}

}  // namespace
}  // namespace flashjit::test
