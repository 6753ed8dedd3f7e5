#include "gpu.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "autotune/device_captures.hpp"
#include "reference/inputs.hpp"
#include "support/dtypes.hpp"
#include "support/environment.hpp"

namespace flashjit::command {

using device::DeviceBuffer;
using DriverHandle = std::shared_ptr<const device::Driver>;

DriverHandle chosen_driver() { return device::Driver::open(read_environment().libcuda); }

namespace {

constexpr std::uint8_t kPoison = 0xff;  // every byte so: NaN in all element types

std::vector<std::byte> encode(DType dtype, const std::vector<double>& values) {
  std::vector<std::byte> bytes(values.size() * size_of(dtype));
  for (std::size_t i = 0; i < values.size(); ++i)
    dtype_info(dtype).encode(values[i], bytes.data() + i * size_of(dtype));
  return bytes;
}

std::vector<double> decode(DType dtype, const std::vector<std::byte>& bytes) {
  std::vector<double> values(bytes.size() / size_of(dtype));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = dtype_info(dtype).decode(bytes.data() + i * size_of(dtype));
  return values;
}

/// A contiguous tensor [batch, heads, length, dim] in device memory: NaN, or the given values.
class DeviceTensor {
 public:
  using Size = std::array<std::int64_t, 4>;

  DeviceTensor(const DriverHandle& driver, DType dtype, Size size)
      : dtype_(dtype),
        size_(size),
        buffer_(driver, static_cast<std::size_t>(size[0] * size[1] * size[2] * size[3] * size_of(dtype))) {
    buffer_.fill(kPoison);
  }
  DeviceTensor(const DriverHandle& driver, DType dtype, Size size, const std::vector<double>& values)
      : DeviceTensor(driver, dtype, size) {
    const std::vector<std::byte> bytes = encode(dtype, values);
    buffer_.upload(bytes.data(), bytes.size());
  }

  TensorView view() const { return TensorView::bhsd(buffer_.data(), size_[0], size_[1], size_[2], size_[3]); }
  float* floats() const { return static_cast<float*>(buffer_.data()); }
  /// Of scales: the first dimension is that of sequences, or of pages.
  ConstScaleView scale_view(bool of_pages) const {
    const auto [first, heads, rows, one] = size_;
    const std::int64_t stride = heads * rows;
    if (of_pages) return {floats(), {1, first, heads, rows}, {0, stride, rows, 1}};
    return {floats(), {first, 1, heads, rows}, {stride, 0, rows, 1}};
  }
  std::vector<double> values() const { return decode(dtype_, device::download<std::byte>(buffer_)); }

 private:
  DType dtype_;
  Size size_;
  DeviceBuffer buffer_;
};

Workspace workspace_of(const DeviceBuffer& buffer) { return {buffer.data(), buffer.bytes()}; }

DeviceBuffer make_workspace(Runtime& runtime, const DriverHandle& driver, const AttentionSpec& spec,
                            const AttentionShape& shape) {
  DeviceBuffer buffer(driver, runtime.workspace_bytes(spec, shape));
  buffer.fill(kPoison);
  return buffer;
}

/// The arguments of both passes besides their tensors, in device memory.
struct Extras {
  DeviceBuffer lengths, map, cu_seqlens_q, cu_seqlens_kv, sinks, indices, prefix_length;
  DeviceCaptures captures;

  Extras(const DriverHandle& driver, const reference::Problem& problem)
      : lengths(device::upload(driver, problem.kv_lengths)),
        map(device::upload(driver, problem.block_map)),
        cu_seqlens_q(device::upload(driver, problem.cu_seqlens_q)),
        cu_seqlens_kv(device::upload(driver, problem.cu_seqlens_kv)),
        sinks(device::upload(driver, std::vector<float>(problem.sinks.begin(), problem.sinks.end()))),
        indices(device::upload(driver, problem.indices)),
        prefix_length(device::upload(driver, std::vector{problem.prefix_length})),
        captures(driver, problem.spec, problem.captures) {}
};

template <class Args>
void set_common(Args& args, const reference::Problem& problem, const Extras& extras) {
  if (problem.softmax_scale) args.softmax_scale = static_cast<float>(*problem.softmax_scale);
  args.kv_lengths = static_cast<const std::int32_t*>(extras.lengths.data());
  if (const BlockSize block = problem.spec.block_map; problem.spec.has_block_map()) {
    const auto blocks = [](std::int64_t length, int size) { return (length + size - 1) / size; };
    args.block_map = {static_cast<const std::uint8_t*>(extras.map.data()),
                      {problem.map_batch, problem.map_heads, blocks(problem.shape.seqlen_q, block.q),
                       blocks(problem.shape.seqlen_kv, block.kv)}};
  }
  args.dropout_p = problem.dropout_p;
  args.seed = problem.seed;
  args.offset = problem.offset;
  args.sinks = static_cast<const float*>(extras.sinks.data());
  args.captures = extras.captures.view();
  if (problem.spec.indices) {
    const std::int64_t queries = args.q.size[2],
                       lists = problem.index_batch * queries * problem.shape.heads_kv;
    args.indices = IndicesView::contiguous(static_cast<const std::int32_t*>(extras.indices.data()),
                                           problem.index_batch, queries, problem.shape.heads_kv,
                                           lists == 0 ? 0 : std::ssize(problem.indices) / lists);
  }
  if (problem.spec.varlen) {
    args.cu_seqlens_q = static_cast<const std::int32_t*>(extras.cu_seqlens_q.data());
    if (!problem.cu_seqlens_kv.empty())
      args.cu_seqlens_kv = static_cast<const std::int32_t*>(extras.cu_seqlens_kv.data());
    args.batch_size = problem.shape.batch;
    args.max_seqlen_q = problem.shape.seqlen_q;
    args.max_seqlen_kv = problem.shape.seqlen_kv;
  }
}

/// K or V of the problem, whose keys are in order, as pages [pages, heads_kv, rows, dim] that `table` names.
std::vector<double> in_pages(const reference::Problem& problem, const std::vector<double>& in_order,
                             const std::vector<std::int32_t>& table, std::int64_t columns, std::int64_t dim) {
  const auto [batch, heads_q, heads, seqlen_q, keys] = problem.shape;
  const std::int64_t rows = problem.spec.pages;
  std::vector<double> pool(table.size() * heads * rows * dim, std::numeric_limits<double>::quiet_NaN());
  for (std::int64_t b = 0; b < batch; ++b)
    for (std::int64_t h = 0; h < heads; ++h)
      for (std::int64_t n = 0; n < problem.kv_lengths[b]; ++n)
        std::copy_n(&in_order[((b * heads + h) * keys + n) * dim], dim,
                    &pool[((table[b * columns + n / rows] * heads + h) * rows + n % rows) * dim]);
  return pool;
}

/// The codes of Q, K or V, whose values are these times their scales: of each row, or of `rows` each.
std::vector<double> codes_of(const reference::Problem& problem, const std::vector<double>& values,
                             const std::vector<double>& scales, bool by_row, std::int64_t rows,
                             std::int64_t dim) {
  std::vector<double> codes = values;
  if (scales.empty()) return codes;
  const std::int64_t heads = problem.shape.heads_kv;
  for (std::int64_t i = 0; i < std::ssize(codes); ++i)
    codes[i] /= scales[by_row ? i / dim : i / dim / rows % heads];
  return codes;
}

/// Milliseconds that the stream spends on what `work` puts there.
template <class Work>
double timed(const DriverHandle& driver, const device::StreamOwner& stream, Work work) {
  const device::Event start(driver), end(driver);
  start.record(stream.get());
  work();
  end.record(stream.get());
  stream.synchronize();
  return end.ms_since(start);
}

}  // namespace

RuntimeOptions runtime_options() {
  RuntimeOptions options;
  options.tune_in_background = false;  // what is measured or compared stays as it is
  options.log = warn;
  return options;
}

Results run_on_gpu(Runtime& runtime, const device::PrimaryContext& gpu, const reference::Problem& problem,
                   LaunchTimes* times) {
  const DriverHandle& driver = gpu.driver();
  const auto& [batch, hq, hkv, longest_q, longest_kv] = problem.shape;
  const bool packed = problem.spec.varlen;
  const std::int64_t b = packed ? 1 : batch;
  const std::int64_t sq = packed ? problem.cu_seqlens_q.back() : longest_q;
  const bool cached = problem.spec.has_cache();
  const std::int64_t skv = packed && !cached ? problem.cu_seqlens_kv.back() : longest_kv;
  const DType dtype = problem.spec.dtype;
  const std::int64_t d = problem.spec.head_dim, dv = problem.spec.v_dim();
  const bool backward = problem.spec.pass == Pass::backward;

  const std::int64_t rows = problem.spec.pages, columns = rows == 0 ? 0 : (longest_kv + rows - 1) / rows;
  const std::vector<std::int32_t> table = reference::shuffled_pages(batch * columns, problem.seed);
  const DeviceBuffer page_table = device::upload(driver, table);
  const auto in_cache = [&](DType type, const std::vector<double>& in_order, std::int64_t dim) {
    if (rows == 0) return DeviceTensor(driver, type, {cached ? batch : b, hkv, skv, dim}, in_order);
    return DeviceTensor(driver, type, {batch * columns, hkv, rows, dim},
                        in_pages(problem, in_order, table, columns, dim));
  };
  const auto of_kv = [&](const std::vector<double>& values, const std::vector<double>& scales,
                         std::int64_t dim) {
    return in_cache(problem.spec.kv_type(),
                    codes_of(problem, values, scales, problem.spec.key_scales, skv, dim), dim);
  };
  const auto of_scales = [&](const std::vector<double>& scales) {
    if (problem.spec.key_scales) return in_cache(DType::fp32, scales, 1);
    return DeviceTensor(driver, DType::fp32, {1, std::ssize(scales), 1, 1}, scales);
  };
  const DeviceTensor q(
      driver, problem.spec.q_type(), {b, hq, sq, d},
      codes_of(problem, problem.q, problem.q_scale, false, hq / std::max<std::int64_t>(hkv, 1) * sq, d)),
      k = of_kv(problem.k, problem.k_scale, d), v = of_kv(problem.v, problem.v_scale, dv);
  const DeviceTensor k_scale = of_scales(problem.k_scale), v_scale = of_scales(problem.v_scale);
  const DeviceTensor q_scale(driver, DType::fp32, {1, std::ssize(problem.q_scale), 1, 1}, problem.q_scale);
  const DeviceTensor out(driver, problem.spec.out_type(), {b, hq, sq, dv}),
      lse(driver, DType::fp32, {batch, hq, longest_q, 1}),
      row_max(driver, DType::fp32, {batch, hq, problem.spec.row_max ? longest_q : 0, 1});
  const Extras extras(driver, problem);
  const device::StreamOwner stream(driver);
  LaunchTimes spent;

  AttentionSpec spec = problem.spec;
  spec.pass = Pass::forward;
  const DeviceBuffer forward_space = make_workspace(runtime, driver, spec, problem.shape);
  const ConstTensorView v_view = spec.shared_kv ? ConstTensorView(k.view()).first_columns(dv) : v.view();
  ForwardArgs args{.q = q.view(), .k = k.view(), .v = v_view, .out = out.view(), .lse = lse.floats()};
  args.workspace = workspace_of(forward_space);
  set_common(args, problem, extras);
  if (rows != 0) args.page_table = {static_cast<const std::int32_t*>(page_table.data()), batch, columns};
  if (cached) args.max_seqlen_kv = longest_kv;
  if (spec.shared_prefix) args.prefix_length = static_cast<const std::int32_t*>(extras.prefix_length.data());
  if (problem.spec.has_scales()) {
    args.k_scale = k_scale.scale_view(cached);
    args.v_scale = v_scale.scale_view(cached);
  }
  if (problem.spec.q_codes) args.q_scale = q_scale.scale_view(false);
  if (spec.row_max) args.row_max = row_max.floats();
  gpu.synchronize();  // the copies and fills are on another stream
  spent.forward = timed(driver, stream, [&] { runtime.forward(spec, args, stream.get()); });
  Results results{out.values(), lse.values(), {}, {}, {}};
  results.row_max = row_max.values();

  if (backward) {
    spec.pass = Pass::backward;
    const DeviceTensor dout(driver, dtype, {b, hq, sq, dv}, problem.dout);
    const DType grad_type = spec.grad_type();
    const DeviceTensor dq(driver, grad_type, {b, hq, sq, d}), dk(driver, grad_type, {b, hkv, skv, d}),
        dv_tensor(driver, grad_type, {b, hkv, skv, dv});
    const DeviceBuffer backward_space = make_workspace(runtime, driver, spec, problem.shape);
    BackwardArgs gradients{.q = q.view(),
                           .k = k.view(),
                           .v = v_view,
                           .out = out.view(),
                           .lse = lse.floats(),
                           .dout = dout.view(),
                           .dq = dq.view(),
                           .dk = dk.view(),
                           .dv = dv_tensor.view()};
    gradients.workspace = workspace_of(backward_space);
    set_common(gradients, problem, extras);
    DeviceBuffer dsinks(driver, problem.sinks.size() * sizeof(float));
    dsinks.fill(0);
    gradients.dsinks = static_cast<float*>(dsinks.data());
    gpu.synchronize();
    spent.backward = timed(driver, stream, [&] { runtime.backward(spec, gradients, stream.get()); });
    results.dq = dq.values();
    results.dk = dk.values();
    results.dv = dv_tensor.values();
    const std::vector<float> sinks_grad = device::download<float>(dsinks);
    results.dsinks.assign(sinks_grad.begin(), sinks_grad.end());
    results.capture_grads = extras.captures.grads();
  }
  if (times) *times = spent;
  return results;
}

}  // namespace flashjit::command
