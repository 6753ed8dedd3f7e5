// Kernels at sizes where the CPU would take too long, against the naive reference kernels of
// templates/auxiliary/reference.cuh; and those, at small sizes, against the CPU.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>

#include "autotune/device_captures.hpp"
#include "call/arguments.hpp"
#include "call/parameters.hpp"
#include "compile/compiler.hpp"
#include "device/loaded_kernel.hpp"
#include "reference/inputs.hpp"
#include "reference/reference.hpp"
#include "tests/support/gpu_support.hpp"
#include "tests/support/reference_source.hpp"

namespace flashjit::test {
namespace {

using auxiliary::FillParams;
using auxiliary::kReferenceThreads;
using auxiliary::ReferenceParams;
using reference::Precision;

/// What gtest prints of a case, and the name of its test.
struct Case {
  std::string spec, shape;
  std::string config = {};  ///< empty: the planner's choice
  double dropout_p = 0;
  std::int64_t map_batch = 1, map_heads = 1;

  friend void PrintTo(const Case& c, std::ostream* out) {
    *out << c.spec << " " << c.shape << (c.config.empty() ? "" : " ") << c.config;
  }
};

/// The compiled reference kernels of one spec.
class ReferenceKernels {
 public:
  explicit ReferenceKernels(const KernelSpec& spec)
      : kernels_(gpu().driver(),
                 compile::Compiler::open(read_environment().nvrtc)
                     ->compile(reference_source(spec, gpu().info))
                     .cubin,
                 reference_entries()) {
    kernels_.make_ready(gpu().context->device());
  }

  template <class Params>
  void launch(ReferenceEntry entry, std::int64_t blocks, Params params) const {
    if (blocks == 0) return;
    std::array<void*, 1> parameters{&params};
    device::launch(*gpu().driver(), kernels_.kernel(entry), static_cast<unsigned>(blocks), kReferenceThreads,
                   0, nullptr, parameters);
    gpu().context->synchronize();
  }

 private:
  device::LoadedKernel kernels_;
};

enum class RowOrder { bhsd, bshd };

/// Device memory of one tensor [batch, heads, length, dim] and its view.
struct Tensor {
  device::DeviceBuffer memory;
  TensorView view;

  Tensor(DType dtype, RowOrder layout, std::int64_t b, std::int64_t h, std::int64_t s, std::int64_t d)
      : memory(poisoned(b * h * s * d * size_of(dtype))),
        view(layout == RowOrder::bhsd ? TensorView::bhsd(memory.data(), b, h, s, d)
                                      : TensorView::bshd(memory.data(), b, s, h, d)) {}

  std::int64_t count() const { return view.size[0] * view.size[1] * view.size[2] * view.size[3]; }
};

/// Rows [begin, begin + count) of every head, as [batch, heads, count, dim].
std::vector<double> rows_of(DType dtype, const Tensor& tensor, std::int64_t begin, std::int64_t count) {
  const auto [batch, heads, length, dim] = tensor.view.size;
  const std::size_t row_bytes = dim * size_of(dtype);
  std::vector<std::uint8_t> bytes(batch * heads * count * row_bytes);
  std::uint8_t* to = bytes.data();
  // One copy a row would be slow for whole tensors: there the head is one piece.
  const std::int64_t piece = tensor.view.stride[2] == dim ? count : 1;
  for (std::int64_t b = 0; b < batch; ++b) {
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t row = begin; row < begin + count; row += piece, to += piece * row_bytes) {
        const std::int64_t element =
            b * tensor.view.stride[0] + h * tensor.view.stride[1] + row * tensor.view.stride[2];
        gpu().driver()->check(gpu().driver()->memcpy_dtoh(
                                  to, tensor.memory.address() + element * size_of(dtype), piece * row_bytes),
                              "cuMemcpyDtoH");
      }
    }
  }
  return decode(dtype, bytes);
}

std::vector<double> rows_of(DType dtype, const Tensor& tensor) {
  return rows_of(dtype, tensor, 0, tensor.view.size[2]);
}

/// Packed rows [heads, rows, dim] as [batch, heads, longest, dim]; zeros past each sequence's end.
std::vector<double> unpacked(const std::vector<double>& packed, const std::vector<std::int32_t>& offsets,
                             std::int64_t heads, std::int64_t longest) {
  const std::int64_t batch = std::ssize(offsets) - 1, rows = offsets.back();
  if (packed.empty()) return {};
  const std::int64_t dim = std::ssize(packed) / (heads * rows);
  std::vector<double> values(batch * heads * longest * dim);
  for (std::int64_t b = 0; b < batch; ++b)
    for (std::int64_t h = 0; h < heads; ++h)
      std::copy(packed.begin() + (h * rows + offsets[b]) * dim,
                packed.begin() + (h * rows + offsets[b + 1]) * dim,
                values.begin() + (b * heads + h) * longest * dim);
  return values;
}

/// Queries and keys whose results are compared.
struct Window {
  std::int64_t q_begin, q_count, kv_begin, kv_count;
};

/// Results in [batch, heads, rows of the window, dim]; of rows that no packed sequence has, zeros.
struct Results {
  std::vector<double> out, lse, dq, dk, dv;
  std::vector<double> dsinks = {};
  reference::CaptureGrads captures = {};
  std::vector<double> dsink_rows = {};  ///< of a reference: [batch, heads, rows of the window]
};

/// The inputs of a case, random and on the device, and room for the results of the real kernels.
class Problem {
 public:
  Problem(const Case& given, RowOrder layout)
      : spec(parse_spec(given.spec).normalized()),
        shape(parse_shape(given.shape)),
        offsets_q_(offsets(shape.seqlen_q, 1)),
        offsets_kv_(offsets(shape.seqlen_kv, 2)),
        kernels_({spec}),
        q(queries(layout, spec.head_dim)),
        k(keys(layout, spec.head_dim)),
        v(keys(layout, spec.v_dim())),
        out(queries(layout, spec.v_dim())),
        dout(queries(layout, spec.v_dim())),
        dq(queries(layout, spec.head_dim)),
        dk(keys(layout, spec.head_dim)),
        dv(keys(layout, spec.v_dim())),
        lse(poisoned(shape.heads_q * (spec.varlen ? offsets_q_.back() : shape.batch * shape.seqlen_q) *
                     sizeof(float))) {
    unsigned seed = 1;
    for (const Tensor* input : {&q, &k, &v, &dout}) {
      kernels_.launch(kFill, 4096, FillParams{input->memory.data(), input->count(), seed++});
    }
    make_lengths();
    make_map(given);
    make_sinks();
    captures_ = reference::plausible_captures(spec, shape, 1);
    device_captures_ = on_device_captures();
    make_args(given);
  }

  /// Forward and backward by the Runtime; `config` is used for both passes when it is given.
  void run(const std::string& config) {
    Runtime runtime({.cache_dir = ""});
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      dsinks_.fill(0);
      device_captures_.zero_grads();
      if (!config.empty()) runtime.prepare(spec, shape, pass, parse_config(config));
      const device::DeviceBuffer workspace = device_bytes(runtime.workspace_bytes(spec, shape, pass));
      forward_args.workspace = backward_args.workspace = {workspace.data(), workspace.bytes()};
      if (pass == Pass::forward) {
        runtime.forward(spec, forward_args, nullptr);
      } else {
        runtime.backward(spec, backward_args, nullptr);
      }
      gpu().context->synchronize();
    }
    forward_args.workspace = backward_args.workspace = {};
  }

  /// What run() left.
  Results results(const Window& window) const {
    const auto queries = [&](const Tensor& tensor) {
      if (spec.varlen)
        return unpacked(rows_of(spec.dtype, tensor), offsets_q_, shape.heads_q, shape.seqlen_q);
      return rows_of(spec.dtype, tensor, window.q_begin, window.q_count);
    };
    const auto keys = [&](const Tensor& tensor) {
      if (spec.varlen)
        return unpacked(rows_of(spec.dtype, tensor), offsets_kv_, shape.heads_kv, shape.seqlen_kv);
      return rows_of(spec.dtype, tensor, window.kv_begin, window.kv_count);
    };
    Results results{queries(out), {}, queries(dq), keys(dk), keys(dv)};
    const std::vector<float> rows = device::download<float>(lse);
    for (std::int64_t head = 0; !spec.varlen && head < shape.batch * shape.heads_q; ++head) {
      const auto first = rows.begin() + head * shape.seqlen_q + window.q_begin;
      results.lse.insert(results.lse.end(), first, first + window.q_count);
    }
    if (spec.varlen)
      results.lse = unpacked({rows.begin(), rows.end()}, offsets_q_, shape.heads_q, shape.seqlen_q);
    results.dsinks = from_device(DType::fp32, dsinks_);
    results.captures = device_captures_.grads();
    return results;
  }

  /// The reference kernels' results. Only queries in the window add to the sums over queries.
  Results reference(const Window& window, Precision precision) const {
    const std::int64_t q_rows = shape.batch * shape.heads_q * window.q_count;
    const std::int64_t kv_rows = shape.batch * shape.heads_kv * window.kv_count;
    const auto doubles = [](std::int64_t count) { return device_bytes(count * sizeof(double)); };
    device::DeviceBuffer out = doubles(q_rows * spec.v_dim()), lse = doubles(q_rows);
    device::DeviceBuffer dq = doubles(q_rows * spec.head_dim);
    device::DeviceBuffer dk = doubles(kv_rows * spec.head_dim), dv = doubles(kv_rows * spec.v_dim());
    device::DeviceBuffer dsink_rows = doubles(spec.sinks ? q_rows : 0);
    for (device::DeviceBuffer* sum : {&out, &lse, &dq, &dk, &dv, &dsink_rows}) sum->fill(0);
    const DeviceCaptures captures = on_device_captures();
    BackwardArgs args = backward_args;
    args.captures = captures.view();
    const auto pointer = [](const device::DeviceBuffer& buffer) {
      return static_cast<double*>(buffer.data());
    };
    plan::ExecutionPlan plan;
    plan.spec = plan::AnalysedSpec(KernelSpec{spec, Pass::backward});
    plan.shape = shape;
    const ReferenceParams params{.base = make_params(plan, args),
                                 .q_begin = static_cast<int>(window.q_begin),
                                 .q_count = static_cast<int>(window.q_count),
                                 .kv_begin = static_cast<int>(window.kv_begin),
                                 .kv_count = static_cast<int>(window.kv_count),
                                 .out = pointer(out),
                                 .lse = pointer(lse),
                                 .dq = pointer(dq),
                                 .dk = pointer(dk),
                                 .dv = pointer(dv),
                                 .dsink_rows = pointer(dsink_rows)};
    const bool exact = precision == Precision::exact;
    kernels_.launch(exact ? kForwardExact : kForwardRounded, q_rows, params);
    kernels_.launch(exact ? kBackwardExact : kBackwardRounded, q_rows, params);
    Results results{device::download<double>(out),
                    device::download<double>(lse),
                    device::download<double>(dq),
                    device::download<double>(dk),
                    device::download<double>(dv),
                    std::vector<double>(spec.sinks ? shape.heads_q : 0),
                    captures.grads(),
                    device::download<double>(dsink_rows)};
    for (std::size_t row = 0; row < results.dsink_rows.size(); ++row)
      results.dsinks[row / window.q_count % shape.heads_q] += results.dsink_rows[row];
    if (!exact) round(results);
    return results;
  }

  /// The same problem for the CPU.
  reference::Problem on_cpu() const {
    return {.spec = spec,
            .shape = shape,
            .q = rows_of(spec.dtype, q),
            .k = rows_of(spec.dtype, k),
            .v = rows_of(spec.dtype, v),
            .dout = rows_of(spec.dtype, dout),
            .kv_lengths = lengths_,
            .block_map = map_,
            .map_batch = backward_args.block_map.data ? backward_args.block_map.size[0] : 1,
            .map_heads = backward_args.block_map.data ? backward_args.block_map.size[1] : 1,
            .dropout_p = backward_args.dropout_p,
            .seed = backward_args.seed,
            .offset = backward_args.offset,
            .cu_seqlens_q = offsets_q_,
            .cu_seqlens_kv = offsets_kv_,
            .sinks = sinks_,
            .captures = captures_};
  }

  /// The CPU's results, which are packed, in the shape of the others.
  Results from_cpu(const reference::Forward& forward, const reference::Backward& backward) const {
    Results results{forward.out, forward.lse,     backward.dq,      backward.dk,
                    backward.dv, backward.dsinks, backward.captures};
    if (!spec.varlen) return results;
    for (std::vector<double>* rows : {&results.out, &results.lse, &results.dq})
      *rows = unpacked(*rows, offsets_q_, shape.heads_q, shape.seqlen_q);
    for (std::vector<double>* rows : {&results.dk, &results.dv})
      *rows = unpacked(*rows, offsets_kv_, shape.heads_kv, shape.seqlen_kv);
    return results;
  }

  Window everything() const { return {0, shape.seqlen_q, 0, shape.seqlen_kv}; }

  AttentionSpec spec;
  AttentionShape shape;

 private:
  Tensor queries(RowOrder layout, std::int64_t dim) const {
    return tensor(layout, shape.heads_q, shape.seqlen_q, offsets_q_, dim);
  }
  Tensor keys(RowOrder layout, std::int64_t dim) const {
    return tensor(layout, shape.heads_kv, shape.seqlen_kv, offsets_kv_, dim);
  }
  Tensor tensor(RowOrder layout, std::int64_t heads, std::int64_t length,
                const std::vector<std::int32_t>& offsets, std::int64_t dim) const {
    if (spec.varlen) return {spec.dtype, layout, 1, heads, offsets.back(), dim};
    return {spec.dtype, layout, shape.batch, heads, length, dim};
  }

  std::vector<std::int32_t> offsets(std::int64_t longest, std::int64_t empty) const {
    return spec.varlen ? reference::random_offsets(shape.batch, longest, empty, 1)
                       : std::vector<std::int32_t>{};
  }

  DeviceCaptures on_device_captures() const { return {gpu().driver(), {spec, Pass::backward}, captures_}; }

  void make_sinks() {
    if (spec.sinks) sinks_ = reference::random_sinks(shape.heads_q, 1);
    device_sinks_ = to_device(DType::fp32, sinks_);
    dsinks_ = device_bytes(device_sinks_.bytes());
    dsinks_.fill(0);
    device_offsets_q_ = to_device(offsets_q_);
    device_offsets_kv_ = to_device(offsets_kv_);
  }

  void round(Results& results) const {
    for (std::vector<double>* sums : {&results.dk, &results.dv}) {
      for (double& value : *sums) value = reference::round_to(spec.dtype, value);
    }
  }

  /// All keys for the last batch entry, fewer for those before, none for the first of several.
  void make_lengths() {
    if (!spec.kv.is_padded()) return;
    for (std::int64_t b = 0; b < shape.batch; ++b) {
      const std::int64_t part = shape.batch == 1 ? 2 : b, parts = shape.batch == 1 ? 3 : shape.batch - 1;
      lengths_.push_back(static_cast<std::int32_t>(shape.seqlen_kv * part / parts));
    }
    device_lengths_ = to_device(lengths_);
  }

  /// A quarter of the blocks, with one empty block row and one empty block column.
  void make_map(const Case& given) {
    if (!spec.has_block_map()) return;
    const std::int64_t rows = (shape.seqlen_q + spec.block_map.q - 1) / spec.block_map.q;
    const std::int64_t columns = (shape.seqlen_kv + spec.block_map.kv - 1) / spec.block_map.kv;
    std::uint32_t state = 12345;
    for (std::int64_t i = 0; i < given.map_batch * given.map_heads * rows * columns; ++i) {
      state = state * 1664525u + 1013904223u;
      const bool empty = i / columns % rows == 1 || i % columns == 2;
      map_.push_back(!empty && state >> 30 == 0 ? 1 : 0);
    }
    device_map_ = to_device(map_);
    backward_args.block_map = {static_cast<const std::uint8_t*>(device_map_.data()),
                               {given.map_batch, given.map_heads, rows, columns}};
  }

  void make_args(const Case& given) {
    backward_args.q = q.view;
    backward_args.k = k.view;
    backward_args.v = v.view;
    backward_args.out = out.view;
    backward_args.lse = static_cast<const float*>(lse.data());
    backward_args.dout = dout.view;
    backward_args.dq = dq.view;
    backward_args.dk = dk.view;
    backward_args.dv = dv.view;
    backward_args.kv_lengths = static_cast<const std::int32_t*>(device_lengths_.data());
    backward_args.dropout_p = given.dropout_p;
    backward_args.seed = 0x0123456789abcdefull;
    backward_args.offset = 0xfedcba9876543210ull;
    backward_args.captures = device_captures_.view();
    backward_args.sinks = static_cast<const float*>(device_sinks_.data());
    backward_args.dsinks = static_cast<float*>(dsinks_.data());
    if (spec.varlen) {
      backward_args.cu_seqlens_q = static_cast<const std::int32_t*>(device_offsets_q_.data());
      backward_args.cu_seqlens_kv = static_cast<const std::int32_t*>(device_offsets_kv_.data());
      backward_args.batch_size = shape.batch;
      backward_args.max_seqlen_q = shape.seqlen_q;
      backward_args.max_seqlen_kv = shape.seqlen_kv;
    }
    forward_args = {.q = q.view,
                    .k = k.view,
                    .v = v.view,
                    .out = out.view,
                    .lse = static_cast<float*>(lse.data()),
                    .kv_lengths = backward_args.kv_lengths,
                    .block_map = backward_args.block_map,
                    .dropout_p = backward_args.dropout_p,
                    .seed = backward_args.seed,
                    .offset = backward_args.offset,
                    .captures = backward_args.captures,
                    .cu_seqlens_q = backward_args.cu_seqlens_q,
                    .cu_seqlens_kv = backward_args.cu_seqlens_kv,
                    .batch_size = backward_args.batch_size,
                    .max_seqlen_q = backward_args.max_seqlen_q,
                    .max_seqlen_kv = backward_args.max_seqlen_kv,
                    .sinks = backward_args.sinks};
  }

  std::vector<std::int32_t> offsets_q_, offsets_kv_;  // of packed sequences
  ReferenceKernels kernels_;
  Tensor q, k, v, out, dout, dq, dk, dv;
  device::DeviceBuffer lse;
  std::vector<std::int32_t> lengths_;
  std::vector<std::uint8_t> map_;
  device::DeviceBuffer device_lengths_, device_map_;
  device::DeviceBuffer device_offsets_q_, device_offsets_kv_, device_sinks_, dsinks_;
  std::vector<double> sinks_;
  std::vector<reference::Captured> captures_;
  DeviceCaptures device_captures_;
  ForwardArgs forward_args;
  BackwardArgs backward_args;
};

void expect_within(const char* what, const std::vector<double>& got, const std::vector<double>& exact,
                   const std::vector<double>& rounded, double factor) {
  const reference::Verdict verdict = reference::judge(got, exact, rounded, factor);
  EXPECT_LE(verdict.error, verdict.limit) << what;
}

double largest(const std::vector<double>& values) {
  double largest = 0;
  for (const double value : values) largest = std::max(largest, std::fabs(value));
  return largest;
}

constexpr double kForwardFactor = 2, kGradientFactor = 3, kLseLimit = 1e-3;

void expect_forward(const Results& got, const Results& exact, const Results& rounded) {
  expect_within("O", got.out, exact.out, rounded.out, kForwardFactor);
  EXPECT_LE(reference::max_abs_error(got.lse, exact.lse), kLseLimit) << "LSE";
}

/// The reference kernels against the CPU.
class ReferenceKernelsTest : public GpuTestWith<Case> {};

TEST_P(ReferenceKernelsTest, AgreeWithTheCpu) {
  const Problem problem(GetParam(), RowOrder::bshd);
  const Results exact = problem.reference(problem.everything(), Precision::exact);
  const Results rounded = problem.reference(problem.everything(), Precision::rounded);
  const reference::Problem cpu = problem.on_cpu();
  const Results on_cpu = problem.from_cpu(reference::forward(cpu), reference::backward(cpu));
  const Results on_cpu_rounded = problem.from_cpu(reference::forward(cpu, Precision::rounded),
                                                  reference::backward(cpu, Precision::rounded));

  // The kernels get softmax_scale and 1 / (1 - p) in fp32: that is all that may differ.
  constexpr double kLimit = 2e-5;
  const auto compare = [&](const char* what, const std::vector<double>& gpu_exact,
                           const std::vector<double>& gpu_rounded, const std::vector<double>& cpu_exact,
                           const std::vector<double>& cpu_rounded) {
    EXPECT_LE(reference::max_abs_error(gpu_exact, cpu_exact), kLimit) << what;
    // The yardsticks must be equally long, within the luck of single roundings.
    const double gpu_error = reference::max_abs_error(gpu_rounded, cpu_exact);
    const double cpu_error = reference::max_abs_error(cpu_rounded, cpu_exact);
    EXPECT_LE(gpu_error, 1.5 * cpu_error + kLimit) << what;
    EXPECT_LE(cpu_error, 1.5 * gpu_error + kLimit) << what;
  };
  EXPECT_LE(reference::max_abs_error(exact.lse, on_cpu.lse), kLimit);
  compare("O", exact.out, rounded.out, on_cpu.out, on_cpu_rounded.out);
  compare("dQ", exact.dq, rounded.dq, on_cpu.dq, on_cpu_rounded.dq);
  compare("dK", exact.dk, rounded.dk, on_cpu.dk, on_cpu_rounded.dk);
  compare("dV", exact.dv, rounded.dv, on_cpu.dv, on_cpu_rounded.dv);
  // Sums of many terms in few values: their yardstick is luck.
  EXPECT_LE(reference::max_abs_error(exact.dsinks, on_cpu.dsinks), kLimit);
  ASSERT_EQ(exact.captures.size(), on_cpu.captures.size());
  for (std::size_t i = 0; i < exact.captures.size(); ++i)
    EXPECT_LE(reference::max_abs_error(exact.captures[i], on_cpu.captures[i]),
              kLimit + 1e-5 * largest(on_cpu.captures[i]));
}

INSTANTIATE_TEST_SUITE_P(Small, ReferenceKernelsTest,
                         testing::Values(Case{"bf16:d64", "b2:hq4:hkv2:sq70:skv50"},
                                         Case{"fp32:d40x72:causal", "b1:hq2:hkv1:sq33:skv65"},
                                         Case{"fp16:d256:causal_top_left", "b1:hq2:hkv2:sq65:skv33"},
                                         Case{.spec = "bf16:d136x24:causal:dropout:kvlen:map48x80",
                                              .shape = "b3:hq4:hkv2:sq130:skv200",
                                              .dropout_p = 0.3,
                                              .map_batch = 3,
                                              .map_heads = 4},
                                         Case{.spec = "fp32:d8:dropout:kvlen:map16x16",
                                              .shape = "b2:hq2:hkv1:sq100:skv60",
                                              .dropout_p = 0.1},
                                         Case{"bf16:d64:kvlen", "b1:hq1:hkv1:sq1:skv1"},
                                         Case{"bf16:d64:causal:varlen:sinks", "b4:hq4:hkv2:sq70:skv90"},
                                         Case{.spec = "fp32:d40x72:map32x16:varlen:dropout",
                                              .shape = "b3:hq2:hkv1:sq50:skv60",
                                              .dropout_p = 0.2},
                                         Case{"fp16:d64:causal:sinks", "b2:hq4:hkv4:sq60:skv40"}));

/// The Runtime against the reference kernels, at lengths that no tile divides.
class LargeTest : public GpuTestWith<Case> {};

TEST_P(LargeTest, AgreesWithTheReferenceKernels) {
  Problem problem(GetParam(), RowOrder::bhsd);
  problem.run(GetParam().config);
  const Window window = problem.everything();
  const Results got = problem.results(window);
  const Results exact = problem.reference(window, Precision::exact);
  const Results rounded = problem.reference(window, Precision::rounded);
  expect_forward(got, exact, rounded);
  expect_within("dQ", got.dq, exact.dq, rounded.dq, kGradientFactor);
  expect_within("dK", got.dk, exact.dk, rounded.dk, kGradientFactor);
  expect_within("dV", got.dv, exact.dv, rounded.dv, kGradientFactor);
  const auto [error, limit] =
      reference::judge_dsinks(problem.shape, got.dsinks, {exact.dsinks, exact.dsink_rows},
                              {rounded.dsinks, rounded.dsink_rows}, kGradientFactor);
  EXPECT_LE(error, limit) << "dsinks";
  ASSERT_EQ(got.captures.size(), exact.captures.size());
  for (std::size_t i = 0; i < got.captures.size(); ++i)
    expect_within("a captured tensor's gradient", got.captures[i], exact.captures[i], rounded.captures[i],
                  kGradientFactor);
}

INSTANTIATE_TEST_SUITE_P(
    Ragged, LargeTest,
    testing::Values(
        Case{"bf16:d128:causal", "b1:hq4:hkv4:sq4133:skv4097"},
        Case{"fp16:d64", "b2:hq2:hkv2:sq4097:skv4133"},
        Case{"bf16:d64:causal:det", "b1:hq6:hkv2:sq3001:skv5003"},
        Case{.spec = "bf16:d128:causal:map128x64", .shape = "b1:hq4:hkv2:sq4133:skv4097", .map_heads = 4},
        Case{.spec = "fp16:d64:map48x80:det", .shape = "b2:hq2:hkv1:sq2999:skv4097", .map_batch = 2},
        Case{.spec = "bf16:d128:dropout:kvlen", .shape = "b3:hq2:hkv2:sq2049:skv2047", .dropout_p = 0.2},
        Case{"bf16:d192x128:causal", "b1:hq16:hkv4:sq4133:skv4229"},
        Case{"fp32:d64:causal", "b1:hq2:hkv1:sq2049:skv2177"},
        Case{"bf16:d256:causal_top_left", "b1:hq2:hkv1:sq2177:skv2049"},
        // Rounds of tiles that end within a head's.
        Case{"bf16:d128:causal", "b3:hq24:hkv12:sq601:skv601"},
        Case{"fp16:d64:causal", "b4:hq48:hkv48:sq890:skv890"},
        Case{"bf16:d64:mask{q >= kv && q - kv < 300}", "b2:hq32:hkv32:sq1150:skv1150"},
        Case{"bf16:d128:causal:varlen", "b5:hq4:hkv2:sq4133:skv4133"},
        Case{"fp16:d64:varlen:sinks:det", "b7:hq2:hkv1:sq1999:skv2177"},
        Case{"fp32:d64:causal:varlen:sinks", "b3:hq2:hkv2:sq1025:skv1333"},
        Case{"bf16:d128:causal:sinks", "b1:hq4:hkv4:sq2049:skv3001"},
        Case{.spec = "bf16:d192x128:causal_top_left:dropout:kvlen:map64x64",
             .shape = "b2:hq4:hkv2:sq2049:skv2177",
             .config = "simt:br64:bc64:w8",
             .dropout_p = 0.1,
             .map_batch = 2}));

/// Tensors of more than 2^31 elements: a 32-bit offset anywhere puts the last rows elsewhere.
class OffsetTest : public GpuTest {
 protected:
  static bool memory_is_short(std::size_t needed) {
    std::size_t free = 0, total = 0;
    gpu().driver()->check(gpu().driver()->mem_get_info(&free, &total), "cuMemGetInfo");
    return free < needed;
  }
  static constexpr std::size_t kNeeded = std::size_t{40} << 30;
};

TEST_F(OffsetTest, QueriesBeyondTwoToThe31) {
  if (memory_is_short(kNeeded)) GTEST_SKIP() << "needs " << kNeeded << " bytes of free device memory";
  Problem problem({"bf16:d128", "b1:hq64:hkv64:sq262300:skv80"}, RowOrder::bshd);
  problem.run({});
  const Window window{262300 - 3, 3, 0, 0};
  const Results got = problem.results(window);
  const Results exact = problem.reference(window, Precision::exact);
  const Results rounded = problem.reference(window, Precision::rounded);
  expect_forward(got, exact, rounded);
  expect_within("dQ", got.dq, exact.dq, rounded.dq, kGradientFactor);
}

TEST_F(OffsetTest, KeysBeyondTwoToThe31) {
  if (memory_is_short(kNeeded)) GTEST_SKIP() << "needs " << kNeeded << " bytes of free device memory";
  Problem problem({"bf16:d128", "b1:hq64:hkv64:sq5:skv262300"}, RowOrder::bshd);
  problem.run({});
  const Window window{0, 5, 262300 - 3, 3};
  const Results got = problem.results(window);
  const Results exact = problem.reference(window, Precision::exact);
  const Results rounded = problem.reference(window, Precision::rounded);
  expect_forward(got, exact, rounded);
  expect_within("dQ", got.dq, exact.dq, rounded.dq, kGradientFactor);
  expect_within("dK", got.dk, exact.dk, rounded.dk, kGradientFactor);
  expect_within("dV", got.dv, exact.dv, rounded.dv, kGradientFactor);
}

}  // namespace
}  // namespace flashjit::test
