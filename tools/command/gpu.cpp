#include "gpu.hpp"

#include <algorithm>
#include <array>
#include <limits>

#include "autotune/device_captures.hpp"
#include "call/q_rope.hpp"
#include "out_codes.hpp"
#include "reference/inputs.hpp"
#include "support/dtypes.hpp"
#include "support/environment.hpp"
#include "support/swizzled_scales.hpp"

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

  void clear() { buffer_.fill(0); }

  TensorView view() const { return TensorView::bhsd(buffer_.data(), size_[0], size_[1], size_[2], size_[3]); }
  float* floats() const { return static_cast<float*>(buffer_.data()); }
  /// A view as scales: the first dimension is that of sequences, or of pages.
  ConstScaleView scale_view(bool of_pages) const {
    const auto [first, heads, rows, one] = size_;
    const std::int64_t stride = heads * rows;
    if (of_pages) return {floats(), {1, first, heads, rows}, {0, stride, rows, 1}};
    return {floats(), {first, 1, heads, rows}, {stride, 0, rows, 1}};
  }
  std::vector<std::byte> bytes() const { return device::download<std::byte>(buffer_); }
  std::vector<double> values() const { return decode(dtype_, bytes()); }

 private:
  DType dtype_;
  Size size_;
  DeviceBuffer buffer_;
};

Workspace workspace_of(const DeviceBuffer& buffer) { return {buffer.data(), buffer.bytes()}; }

DeviceBuffer make_workspace(Runtime& runtime, const DriverHandle& driver, const KernelSpec& spec,
                            const AttentionShape& shape) {
  DeviceBuffer buffer(driver, runtime.workspace_bytes(spec, shape));
  buffer.fill(kPoison);
  return buffer;
}

/// The arguments of both passes besides their tensors, in device memory.
struct Extras {
  DeviceBuffer lengths, map, cu_seqlens_q, cu_seqlens_kv, sinks, indices, prefix_length, state_out, state_lse;
  DeviceCaptures captures;

  Extras(const DriverHandle& driver, const reference::Problem& problem)
      : lengths(device::upload(driver, problem.kv_lengths)),
        map(device::upload(driver, problem.block_map)),
        cu_seqlens_q(device::upload(driver, problem.cu_seqlens_q)),
        cu_seqlens_kv(device::upload(driver, problem.cu_seqlens_kv)),
        sinks(device::upload(driver, std::vector<float>(problem.sinks.begin(), problem.sinks.end()))),
        indices(device::upload(driver, problem.indices)),
        prefix_length(device::upload(driver, std::vector{problem.prefix_length})),
        state_out(device::upload(driver, encode(DType::fp32, problem.state_out))),
        state_lse(device::upload(driver, encode(DType::fp32, problem.state_lse))),
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
  const std::int64_t rows = problem.spec.kv.page_size;
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

/// Makes the tensors of a problem: packed sequences are rows of one batch entry, keys of a cache in slots or
/// pages.
class TensorMaker {
 public:
  TensorMaker(const DriverHandle& driver, const reference::Problem& problem)
      : driver_(driver), problem_(problem), table_(reference::shuffled_pages(pages(), problem.seed)) {
    const auto& [batch, heads_q, heads_kv, longest_q, longest_kv] = problem.shape;
    const KernelSpec& spec = problem.spec;
    batch_ = spec.varlen ? 1 : batch;
    batch_kv_ = spec.kv.is_cache() ? batch : batch_;
    rows_q_ = spec.varlen ? problem.cu_seqlens_q.back() : longest_q;
    rows_kv_ = spec.varlen && !spec.kv.is_cache() ? problem.cu_seqlens_kv.back() : longest_kv;
  }

  DeviceTensor like_q(DType type, std::int64_t dim) const {
    return DeviceTensor(driver_, type, {batch_, problem_.shape.heads_q, rows_q_, dim});
  }
  DeviceTensor like_q(DType type, std::int64_t dim, const std::vector<double>& values) const {
    return DeviceTensor(driver_, type, {batch_, problem_.shape.heads_q, rows_q_, dim}, values);
  }
  DeviceTensor like_kv(DType type, std::int64_t dim) const {
    return DeviceTensor(driver_, type, {batch_kv_, problem_.shape.heads_kv, rows_kv_, dim});
  }
  DeviceTensor like_lse(bool wanted = true) const {
    return DeviceTensor(driver_, DType::fp32, {batch_, problem_.shape.heads_q, wanted ? rows_q_ : 0, 1});
  }

  DeviceTensor out_block_scale() const {
    const KvFormat& format = problem_.spec.epilogue.out_format;
    if (!format.has_block_scales()) return like_q(DType::e4m3, 0);
    if (problem_.spec.epilogue.swizzled_scales)
      return DeviceTensor(driver_, DType::e4m3,
                          {1, 1, rows_of_scales(batch_ * rows_q_),
                           problem_.shape.heads_q * format.row(problem_.spec.v_dim()).scale_columns});
    return like_q(format.scale_type == KvFormat::Number::fp32 ? DType::fp32 : DType::e4m3,
                  format.row(problem_.spec.v_dim()).scale_columns);
  }

  DeviceTensor q() const {
    const auto& [batch, heads_q, heads_kv, longest_q, longest_kv] = problem_.shape;
    const std::int64_t dim = problem_.spec.head_dim;
    const std::int64_t rows_of_scale = heads_q / std::max<std::int64_t>(heads_kv, 1) * rows_q_;
    return like_q(problem_.spec.q_type(), dim,
                  codes_of(problem_, problem_.q, problem_.q_scale, false, rows_of_scale, dim));
  }
  /// K or V.
  DeviceTensor kv(const std::vector<double>& values, const std::vector<double>& scales,
                  std::int64_t dim) const {
    return in_cache(problem_.spec.kv_type(),
                    codes_of(problem_, values, scales, problem_.spec.kv.key_scales, rows_kv_, dim), dim);
  }
  DeviceTensor kv_scale(const std::vector<double>& scales) const {
    return problem_.spec.kv.key_scales ? in_cache(DType::fp32, scales, 1) : scale(scales);
  }
  DeviceTensor scale(const std::vector<double>& scales) const {
    return DeviceTensor(driver_, DType::fp32, {1, std::ssize(scales), 1, 1}, scales);
  }
  DeviceBuffer page_table() const { return device::upload(driver_, table_); }
  PageTableView view_of(const DeviceBuffer& page_table) const {
    if (!problem_.spec.kv.is_paged()) return {};
    return {static_cast<const std::int32_t*>(page_table.data()), problem_.shape.batch, pages_of_sequence()};
  }

 private:
  std::int64_t pages_of_sequence() const {
    const std::int64_t rows = problem_.spec.kv.page_size;
    return rows == 0 ? 0 : (problem_.shape.seqlen_kv + rows - 1) / rows;
  }
  std::int64_t pages() const { return problem_.shape.batch * pages_of_sequence(); }
  DeviceTensor in_cache(DType type, const std::vector<double>& in_order, std::int64_t dim) const {
    const std::int64_t heads = problem_.shape.heads_kv, rows = problem_.spec.kv.page_size;
    if (rows == 0) return DeviceTensor(driver_, type, {batch_kv_, heads, rows_kv_, dim}, in_order);
    return DeviceTensor(driver_, type, {pages(), heads, rows, dim},
                        in_pages(problem_, in_order, table_, pages_of_sequence(), dim));
  }

  const DriverHandle& driver_;
  const reference::Problem& problem_;
  std::vector<std::int32_t> table_;
  std::int64_t batch_, batch_kv_, rows_q_, rows_kv_;
};

/// A problem in device memory.
class ProblemOnGpu {
 public:
  ProblemOnGpu(Runtime& runtime, const device::PrimaryContext& gpu, const reference::Problem& problem)
      : runtime_(runtime),
        gpu_(gpu),
        problem_(problem),
        make_(gpu.driver(), problem),
        page_table_(make_.page_table()),
        q_(make_.q()),
        k_(make_.kv(problem.k, problem.k_scale, problem.spec.head_dim)),
        v_(make_.kv(problem.v, problem.v_scale, problem.spec.v_dim())),
        q_scale_(make_.scale(problem.q_scale)),
        k_scale_(make_.kv_scale(problem.k_scale)),
        v_scale_(make_.kv_scale(problem.v_scale)),
        out_(make_.like_q(problem.spec.stored_out().type, problem.spec.stored_out().columns)),
        out_scale_(device::upload(gpu.driver(), std::vector{kOutScale})),
        out_block_scale_(make_.out_block_scale()),
        before_mod_(make_.like_q(problem.spec.dtype,
                                 problem.spec.epilogue.out_mod.empty() ? 0 : problem.spec.v_dim())),
        lse_(make_.like_lse(!problem.spec.score.is_weight())),
        row_max_(make_.like_lse(problem.spec.epilogue.row_max)),
        extras_(gpu.driver(), problem),
        stream_(gpu.driver()) {}

  void forward(Results& results) {
    const KernelSpec spec{problem_.spec, Pass::forward};
    const bool cached = spec.kv.is_cache();
    const DeviceBuffer space = make_workspace(runtime_, gpu_.driver(), spec, problem_.shape);
    ForwardArgs args{.q = q_.view(), .k = k_.view(), .v = v_view(), .out = out_.view(), .lse = lse_.floats()};
    args.workspace = workspace_of(space);
    set_common(args, problem_, extras_);
    args.page_table = make_.view_of(page_table_);
    if (cached) args.max_seqlen_kv = problem_.shape.seqlen_kv;
    if (spec.kv.shared_prefix)
      args.prefix_length = static_cast<const std::int32_t*>(extras_.prefix_length.data());
    if (spec.has_scales()) {
      args.k_scale = k_scale_.scale_view(cached);
      args.v_scale = v_scale_.scale_view(cached);
    }
    if (spec.prologue.q_codes) args.q_scale = q_scale_.scale_view(false);
    split_q(spec, args);
    if (spec.epilogue.row_max) args.row_max = row_max_.floats();
    if (!spec.epilogue.out_mod.empty()) args.out_before_mod = before_mod_.view();
    if (spec.partial.running_state) {
      args.partial.state = {args.out, static_cast<const float*>(extras_.state_lse.data())};
      args.partial.state.out.data = extras_.state_out.data();
    }
    const KvFormat& format = spec.epilogue.out_format;
    if (format.has_argument()) args.out_scale = static_cast<const float*>(out_scale_.data());
    if (format.has_block_scales()) args.out_block_scale = out_block_scale_.view();
    gpu_.synchronize();  // the copies and fills are on another stream
    runtime_.forward(spec, args, stream_.get());
    stream_.synchronize();
    results.out = format.quantized() ? values_of_codes(spec, args.out.size[1], args.out.size[2], out_.bytes(),
                                                       out_block_scale_.bytes())
                                     : out_.values();
    results.lse = lse_.values();
    results.row_max = row_max_.values();
  }

  /// After forward().
  void backward(Results& results) {
    const KernelSpec& spec = problem_.spec;
    const std::int64_t d = spec.head_dim, d_v = spec.v_dim();
    const DeviceTensor dout = make_.like_q(spec.dtype, d_v, problem_.dout);
    DeviceTensor dq = make_.like_q(spec.grad_type(), d), dk = make_.like_kv(spec.grad_type(), d),
                 dv = make_.like_kv(spec.grad_type(), d_v);
    if (spec.partial.add_grads)
      for (DeviceTensor* gradient : {&dq, &dk, &dv}) gradient->clear();
    DeviceBuffer dsinks(gpu_.driver(), problem_.sinks.size() * sizeof(float));
    dsinks.fill(0);
    const DeviceBuffer space = make_workspace(runtime_, gpu_.driver(), spec, problem_.shape);
    BackwardArgs args{.q = q_.view(),
                      .k = k_.view(),
                      .v = v_view(),
                      .out = spec.epilogue.out_mod.empty() ? out_.view() : before_mod_.view(),
                      .lse = lse_.floats(),
                      .dout = dout.view(),
                      .dq = dq.view(),
                      .dk = dk.view(),
                      .dv = dv.view()};
    args.workspace = workspace_of(space);
    set_common(args, problem_, extras_);
    args.dsinks = static_cast<float*>(dsinks.data());
    gpu_.synchronize();
    runtime_.backward(spec, args, stream_.get());
    stream_.synchronize();
    results.dq = dq.values();
    results.dk = dk.values();
    results.dv = dv.values();
    const std::vector<float> sinks_grad = device::download<float>(dsinks);
    results.dsinks.assign(sinks_grad.begin(), sinks_grad.end());
    results.capture_grads = extras_.captures.grads();
  }

 private:
  ConstTensorView v_view() const {
    if (problem_.spec.kv.shared_kv) return ConstTensorView(k_.view()).first_columns(problem_.spec.v_dim());
    return v_.view();
  }

  Runtime& runtime_;
  const device::PrimaryContext& gpu_;
  const reference::Problem& problem_;
  TensorMaker make_;
  DeviceBuffer page_table_;
  DeviceTensor q_, k_, v_, q_scale_, k_scale_, v_scale_, out_;
  DeviceBuffer out_scale_;
  DeviceTensor out_block_scale_, before_mod_, lse_, row_max_;
  Extras extras_;
  device::StreamOwner stream_;
};

}  // namespace

RuntimeOptions runtime_options() {
  RuntimeOptions options;
  options.tune_in_background = false;  // what is measured or compared stays as it is
  options.log = warn;
  return options;
}

Results run_on_gpu(Runtime& runtime, const device::PrimaryContext& gpu, const reference::Problem& problem) {
  ProblemOnGpu on_gpu(runtime, gpu, problem);
  Results results;
  on_gpu.forward(results);
  if (problem.spec.pass == Pass::backward) on_gpu.backward(results);
  return results;
}

}  // namespace flashjit::command
