#include "autotune/device_meter.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <numeric>
#include <random>

#include "autotune/device_captures.hpp"
#include "autotune/gate.hpp"
#include "call/out_codes.hpp"
#include "call/q_rope.hpp"
#include "compile/compiler.hpp"
#include "device/device_info.hpp"
#include "plan/plan.hpp"
#include "reference/inputs.hpp"
#include "support/dtypes.hpp"
#include "support/environment.hpp"
#include "support/swizzled_scales.hpp"
#include "support/text.hpp"

namespace flashjit::autotune {
namespace {

using device::DeviceBuffer;

constexpr std::size_t kPatternElements = std::size_t{1} << 20;
constexpr std::size_t kPatternStep =
    7919;  // elements from one tensor's start in the pattern to the next one's
constexpr std::size_t kMostSets = 64;
constexpr double kMemoryShare = 0.8;  // of the free memory, for inputs
// The clock is judged from bursts of launches. It is steady when two halves of kSteadyMs, within which a
// power limit acts, or of as many bursts as there may be, take times that differ by less than kSteady.
constexpr double kBurstMs = 10, kSteadyMs = 200, kSteady = 0.005;
constexpr double kEventMs = 0.001;  // no smaller differences are seen
constexpr std::size_t kLaunchesInBurst = 256, kFewestBursts = 4, kMostBursts = 20;
constexpr int kLongestWarmUp = 5;             // times these bursts
constexpr std::size_t kLaunchesInQueue = 32;  // far below where the driver's queue would block the host

/// Normally distributed elements of the type, a little more than kPatternElements of them.
std::vector<char> random_pattern(DType dtype) {
  const std::size_t count = kPatternElements + 16 * kPatternStep;
  std::vector<char> bytes(count * size_of(dtype));
  std::mt19937 generator(42);
  std::normal_distribution<float> normal;
  for (std::size_t i = 0; i < count; ++i) {
    dtype_info(dtype).encode(normal(generator), &bytes[i * size_of(dtype)]);
  }
  return bytes;
}

/// Rows of a page of K and V, and pages of a sequence: one, where there are no pages.
std::int64_t page_rows(const Problem& p) {
  return p.spec.kv.is_paged() ? p.spec.kv.page_size : std::max<std::int64_t>(p.shape.seqlen_kv, 1);
}
std::int64_t pages_of_sequence(const Problem& p) {
  return (p.shape.seqlen_kv + page_rows(p) - 1) / page_rows(p);
}

/// The sizes of a problem's tensors, in bytes.
struct Sizes {
  std::size_t q, k, v, o, lse;
  std::size_t scales = 0;        ///< of K, and of V: floats
  std::size_t block_scales = 0;  ///< of K, or of V, as their formats have them apart
  std::size_t out_scales = 0;    ///< of blocks of O
  std::size_t state = 0;         ///< a running one's O

  explicit Sizes(const Problem& p) {
    const AttentionShape& shape = p.shape;
    const auto bytes = [&](std::int64_t heads, std::int64_t length, int dim, DType type) {
      return static_cast<std::size_t>(shape.batch * heads * length) * dim * size_of(type);
    };
    q = bytes(shape.heads_q, shape.seqlen_q, p.spec.head_dim, p.spec.q_type());
    const std::int64_t keys = pages_of_sequence(p) * page_rows(p);
    const StoredKvRow of_k = p.spec.stored_k(), of_v = p.spec.stored_v();
    k = bytes(shape.heads_kv, keys, of_k.columns, of_k.type);
    v = bytes(shape.heads_kv, keys, of_v.columns, of_v.type);
    const StoredKvRow of_out = p.spec.stored_out();
    o = bytes(shape.heads_q, shape.seqlen_q, of_out.columns, of_out.type);
    if (const KvFormat& format = p.spec.epilogue.out_format; format.has_block_scales())
      out_scales = sizeof(float) * static_cast<std::size_t>(rows_of_scales(shape.batch * shape.seqlen_q)) *
                   shape.heads_q * format.row(p.spec.v_dim()).scale_columns;
    if (p.spec.kv.k_format.has_argument() || p.spec.kv.v_format.has_argument())
      scales = static_cast<std::size_t>(p.spec.kv.key_scales ? shape.batch * shape.heads_kv * keys : 1);
    for (const auto& [format, dim] :
         {std::pair(&p.spec.kv.k_format, p.spec.head_dim), std::pair(&p.spec.kv.v_format, p.spec.v_dim())})
      if (format->has_block_scales())
        block_scales = std::max(block_scales, static_cast<std::size_t>(shape.batch * shape.heads_kv * keys) *
                                                  format->row(dim).scale_columns * sizeof(float));
    if (p.spec.partial.running_state)
      state = bytes(shape.heads_q, shape.seqlen_q, p.spec.v_dim(), DType::fp32);
    lse = static_cast<std::size_t>(shape.batch * shape.heads_q * shape.seqlen_q) * sizeof(float);
  }
  /// Bytes of tensors, gradients and tangents.
  std::size_t set(Pass pass) const {
    const int times = pass == Pass::forward ? 1 : pass == Pass::backward_jvp ? 3 : 2;
    return (q + k + v + o) * times + state + lse;
  }
};

/// One call's tensors.
struct TensorSet {
  DeviceBuffer q, k, v, out, lse, dout, dq, dk, dv, state;  ///< state: O, in fp32, of other keys
  DeviceBuffer q_tangent, k_tangent, v_tangent;
  DeviceBuffer out_tangent;  ///< of O, or in the backward_jvp pass of dO
};

/// The tensors of a problem, in enough sets that a launch does not find its input in the L2 cache.
class Inputs {
 public:
  Inputs(const device::Context& context, const DeviceInfo& device, const Problem& problem,
         const MeterOptions& options, CUstream stream)
      : driver_(context.driver()), problem_(problem), sizes_(problem), stream_(stream) {
    const bool backward = gives_gradients(problem_.spec.pass);
    const std::vector<char> pattern = random_pattern(problem_.spec.dtype);
    const std::vector<char> kv_pattern = random_pattern(problem_.spec.kv_type());
    const std::size_t count =
        set_count(sizes_.set(problem_.spec.pass), static_cast<std::size_t>(device.l2_bytes));
    for (std::size_t i = 0; i < count; ++i) sets_.push_back(make_set(pattern, kv_pattern, backward));
    if (problem_.spec.kv.is_paged())
      page_table_ = device::upload(
          driver_, reference::shuffled_pages(problem_.shape.batch * pages_of_sequence(problem_), kInputSeed),
          stream_);
    if (problem_.spec.kv.has_lengths()) {
      kv_lengths_ =
          device::upload(driver_,
                         std::vector<std::int32_t>(static_cast<std::size_t>(problem_.shape.batch),
                                                   static_cast<std::int32_t>(problem_.shape.seqlen_kv)),
                         stream_);
    }
    if (problem_.spec.kv.shared_prefix)
      prefix_length_ =
          device::upload(driver_, std::vector{reference::plausible_prefix(problem_.shape)}, stream_);
    map_ = plausible_map(problem_.spec, problem_.shape, options.map_density);
    map_blocks_ = device::upload(driver_, map_.blocks, stream_);
    if (problem_.spec.varlen) {
      cu_seqlens_q_ = device::upload(driver_, equal_offsets(problem_.shape.seqlen_q), stream_);
      cu_seqlens_kv_ = device::upload(driver_, equal_offsets(problem_.shape.seqlen_kv), stream_);
    }
    if (problem_.spec.sinks) {
      const std::vector<double> sinks = reference::random_sinks(problem_.shape.heads_q, kInputSeed);
      sinks_ = device::upload(driver_, std::vector<float>(sinks.begin(), sinks.end()), stream_);
      dsinks_ = DeviceBuffer(driver_, sinks_.bytes(), stream_);
      dsinks_.fill(0);
    }
    if (problem_.spec.indices) {
      const AttentionShape& shape = problem_.shape;
      const std::int64_t top_k = reference::plausible_top_k(shape.seqlen_kv);
      indices_ =
          device::upload(driver_,
                         reference::neighbouring_indices(shape.batch * shape.seqlen_q * shape.heads_kv, top_k,
                                                         shape.seqlen_kv, top_k / 10, kInputSeed),
                         stream_);
    }
    scales_ = device::upload(driver_, std::vector<float>(sizes_.scales, 1.0f), stream_);
    out_scale_ = device::upload(driver_, std::vector{1.0f}, stream_);
    out_block_scales_ = DeviceBuffer(driver_, sizes_.out_scales, stream_);
    if (sizes_.block_scales > 0) {
      block_scales_ = DeviceBuffer(driver_, sizes_.block_scales, stream_);
      block_scales_.fill(0);
    }
    captures_ =
        DeviceCaptures(driver_, problem_.spec,
                       reference::plausible_captures(problem_.spec, problem_.shape, kInputSeed), stream_);
    if (backward) run_forward(device, options.runtime);
  }

  const Problem& problem() const { return problem_; }
  std::size_t sets() const { return sets_.size(); }

  void ensure_workspace(std::size_t bytes) {
    if (bytes > workspace_.bytes()) workspace_ = DeviceBuffer(driver_, bytes);
  }

  void launch(Runtime& runtime, std::size_t set) {
    const TensorSet& tensors = sets_[set];
    switch (problem_.spec.pass) {
      case Pass::backward:
        return runtime.backward(problem_.spec, backward_args(tensors), stream_);
      case Pass::jvp:
        return runtime.jvp(problem_.spec, jvp_args(tensors), stream_);
      case Pass::backward_jvp:
        return runtime.backward_jvp(problem_.spec, backward_jvp_args(tensors), stream_);
      default:
        return runtime.forward(problem_.spec, forward_args(tensors), stream_);
    }
  }

 private:
  std::size_t set_count(std::size_t set_bytes, std::size_t l2_bytes) const {
    std::size_t free = 0, total = 0;
    driver_->check(driver_->mem_get_info(&free, &total), "cuMemGetInfo");
    const auto usable = static_cast<std::size_t>(kMemoryShare * static_cast<double>(free));
    if (set_bytes > usable) {
      throw Error(
          ErrorCode::unsupported,
          fmt::format("{} at {} needs {} MiB for one set of tensors and {} MiB of device memory are free; "
                      "choose a smaller shape or free memory",
                      to_string(problem_.spec), to_string(problem_.shape), set_bytes >> 20, free >> 20));
    }
    if (set_bytes == 0) return 1;
    return std::clamp<std::size_t>(std::min(2 * l2_bytes / set_bytes + 1, usable / set_bytes), 1, kMostSets);
  }

  TensorSet make_set(const std::vector<char>& pattern, const std::vector<char>& kv_pattern,
                     bool backward) const {
    int tensor = 0;
    const auto random_of = [&](std::size_t bytes, const std::vector<char>& from, DType type) {
      DeviceBuffer buffer(driver_, bytes, stream_);
      fill(buffer, from, static_cast<std::size_t>(size_of(type)), tensor++);
      return buffer;
    };
    const auto random = [&](std::size_t bytes) { return random_of(bytes, pattern, problem_.spec.dtype); };
    const auto random_kv = [&](std::size_t bytes) {
      return random_of(bytes, kv_pattern, problem_.spec.kv_type());
    };
    TensorSet set{problem_.spec.prologue.q_codes ? random_kv(sizes_.q) : random(sizes_.q),
                  random_kv(sizes_.k),
                  random_kv(sizes_.v),
                  DeviceBuffer(driver_, sizes_.o),
                  DeviceBuffer(driver_, sizes_.lse),
                  {},
                  {},
                  {},
                  {},
                  {},
                  {},
                  {},
                  {},
                  {}};
    if (const Pass pass = problem_.spec.pass; pass == Pass::jvp || pass == Pass::backward_jvp) {
      set.q_tangent = random(sizes_.q);
      set.k_tangent = random(sizes_.k);
      set.v_tangent = random(sizes_.v);
      set.out_tangent = random(sizes_.o);
    }
    if (problem_.spec.partial.running_state && !backward) {
      set.state = DeviceBuffer(driver_, sizes_.state);
      set.state.fill(0), set.lse.fill(0);
    }
    if (backward) {
      const std::size_t larger = size_of(problem_.spec.grad_type()) / size_of(problem_.spec.dtype);
      set.dout = random(sizes_.o);
      set.dq = DeviceBuffer(driver_, sizes_.q * larger);
      set.dk = DeviceBuffer(driver_, sizes_.k * larger);
      set.dv = DeviceBuffer(driver_, sizes_.v * larger);
    }
    return set;
  }

  /// Uploads the pattern once and lets the device repeat it.
  void fill(DeviceBuffer& buffer, const std::vector<char>& pattern, std::size_t element, int tensor) const {
    const std::size_t period = std::min(buffer.bytes(), kPatternElements * element);
    buffer.upload(pattern.data() + tensor * kPatternStep * element, period);
    for (std::size_t done = period; done < buffer.bytes();) {
      const std::size_t bytes = std::min(done, buffer.bytes() - done);
      driver_->check(driver_->memcpy_dtod_async(buffer.address() + done, buffer.address(), bytes, stream_),
                     "cuMemcpyDtoDAsync");
      done += bytes;
    }
  }

  /// The backward pass needs O and LSE that belong to its inputs.
  void run_forward(const DeviceInfo& device, const RuntimeOptions& options) {
    const KernelSpec spec = KernelSpec{problem_.spec, Pass::forward}.normalized();
    Runtime runtime(options);
    const plan::ExecutionPlan plan = plan::make_plan(spec, problem_.shape, device, {});
    ensure_workspace(plan.workspace.bytes);
    runtime.prepare(spec, problem_.shape, plan.config);
    for (const TensorSet& set : sets_) runtime.forward(spec, forward_args(set), stream_);
    driver_->check(driver_->stream_synchronize(stream_), "the forward pass before a backward pass");
  }

  /// With varlen every sequence has the full length.
  std::vector<std::int32_t> equal_offsets(std::int64_t length) const {
    std::vector<std::int32_t> offsets;
    for (std::int64_t b = 0; b <= problem_.shape.batch; ++b)
      offsets.push_back(static_cast<std::int32_t>(b * length));
    return offsets;
  }

  TensorView rows(const DeviceBuffer& buffer, std::int64_t heads, std::int64_t length, int dim) const {
    const std::int64_t batch = problem_.shape.batch;
    if (problem_.spec.varlen) return TensorView::bhsd(buffer.data(), 1, heads, batch * length, dim);
    return TensorView::bhsd(buffer.data(), batch, heads, length, dim);
  }
  TensorView rows_of_q(const DeviceBuffer& buffer, int dim) const {
    return rows(buffer, problem_.shape.heads_q, problem_.shape.seqlen_q, dim);
  }
  TensorView rows_of_kv(const DeviceBuffer& buffer, int dim) const {
    const AttentionShape& shape = problem_.shape;
    if (problem_.spec.kv.is_paged())
      return TensorView::bshd(buffer.data(), shape.batch * pages_of_sequence(problem_),
                              problem_.spec.kv.page_size, shape.heads_kv, dim);
    if (problem_.spec.kv.is_cache())
      return TensorView::bhsd(buffer.data(), shape.batch, shape.heads_kv, shape.seqlen_kv, dim);
    return rows(buffer, problem_.shape.heads_kv, problem_.shape.seqlen_kv, dim);
  }

  /// Scales of blocks that are apart, of `rows`; zeros.
  TensorView block_scale_view(const KvFormat& format, int dim, const ConstTensorView& rows) const {
    if (!format.has_block_scales()) return {};
    const std::int64_t keys = std::max(format.keys, 1);
    return TensorView::bhsd(block_scales_.data(), rows.size[0], rows.size[1],
                            (rows.size[2] + keys - 1) / keys, format.row(dim).scale_columns);
  }

  /// One for all, or each row of K's.
  ConstScaleView scale_view(const ConstTensorView& k) const {
    const auto* data = static_cast<const float*>(scales_.data());
    if (!problem_.spec.kv.key_scales) return ConstScaleView::of_tensor(data);
    const auto [batch, heads, rows, dim] = k.size;
    if (problem_.spec.kv.is_cache()) return ConstScaleView::of_keys(data, batch, heads, rows);
    return {data, {batch, 1, heads, rows}, {heads * rows, 0, rows, 1}};
  }

  /// What both passes take alike.
  template <class Args>
  Args common_args(const TensorSet& set) const {
    const KernelSpec& spec = problem_.spec;
    Args args;
    args.q = rows_of_q(set.q, spec.head_dim);
    const int of_k = spec.stored_k().columns, of_v = spec.stored_v().columns;
    args.k = rows_of_kv(set.k, of_k);
    args.v = spec.kv.shared_kv ? args.k.first_columns(of_v) : rows_of_kv(set.v, of_v);
    args.out = rows_of_q(set.out, spec.stored_out().columns);
    if (!spec.score.is_weight()) args.lse = static_cast<float*>(set.lse.data());
    args.kv_lengths = static_cast<const std::int32_t*>(kv_lengths_.data());
    if (spec.has_block_map()) {
      args.block_map = {static_cast<const std::uint8_t*>(map_blocks_.data()),
                        {1, 1, map_.rows, map_.columns}};
    }
    if (spec.dropout) args.dropout_p = kDefaultDropout;
    args.workspace = {workspace_.data(), workspace_.bytes()};
    args.captures = captures_.view();
    args.sinks = static_cast<const float*>(sinks_.data());
    if (spec.indices)
      args.indices = IndicesView::contiguous(static_cast<const std::int32_t*>(indices_.data()),
                                             args.q.size[0], args.q.size[2], args.k.size[1],
                                             reference::plausible_top_k(problem_.shape.seqlen_kv));
    if (spec.varlen) {
      args.cu_seqlens_q = static_cast<const std::int32_t*>(cu_seqlens_q_.data());
      if (!spec.kv.is_cache()) args.cu_seqlens_kv = static_cast<const std::int32_t*>(cu_seqlens_kv_.data());
      args.batch_size = problem_.shape.batch;
      args.max_seqlen_q = problem_.shape.seqlen_q;
      args.max_seqlen_kv = problem_.shape.seqlen_kv;
    }
    return args;
  }
  ForwardArgs forward_args(const TensorSet& set) const {
    auto args = common_args<ForwardArgs>(set);
    if (problem_.spec.kv.is_paged())
      args.page_table = {static_cast<const std::int32_t*>(page_table_.data()), problem_.shape.batch,
                         pages_of_sequence(problem_)};
    if (problem_.spec.kv.shared_prefix)
      args.prefix_length = static_cast<const std::int32_t*>(prefix_length_.data());
    if (problem_.spec.partial.running_state)
      args.partial.state = {rows_of_q(set.state, problem_.spec.v_dim()),
                            static_cast<const float*>(set.lse.data())};
    if (problem_.spec.kv.k_format.has_argument()) args.k_scale = scale_view(args.k);
    if (problem_.spec.kv.v_format.has_argument()) args.v_scale = scale_view(args.k);
    const KvLayout& kv = problem_.spec.kv;
    args.k_block_scale = block_scale_view(kv.k_format, problem_.spec.head_dim, args.k);
    if (!kv.shared_kv) args.v_block_scale = block_scale_view(kv.v_format, problem_.spec.v_dim(), args.v);
    const KvFormat& out_format = problem_.spec.epilogue.out_format;
    if (out_format.has_argument()) args.out_scale = static_cast<const float*>(out_scale_.data());
    if (problem_.spec.epilogue.swizzled_scales)
      args.out_block_scale = swizzled_scales_of(problem_.spec, args.out, out_block_scales_.data());
    else if (out_format.has_block_scales())
      args.out_block_scale =
          rows_of_q(out_block_scales_, out_format.row(problem_.spec.v_dim()).scale_columns);
    if (problem_.spec.prologue.q_codes)
      args.q_scale = ConstScaleView::of_tensor(static_cast<const float*>(scales_.data()));
    split_q(problem_.spec, args);
    return args;
  }
  BackwardArgs backward_args(const TensorSet& set) const {
    auto args = common_args<BackwardArgs>(set);
    args.dout = rows_of_q(set.dout, problem_.spec.v_dim());
    args.dq = rows_of_q(set.dq, problem_.spec.head_dim);
    args.dk = rows_of_kv(set.dk, problem_.spec.head_dim);
    args.dv = rows_of_kv(set.dv, problem_.spec.v_dim());
    args.dsinks = static_cast<float*>(dsinks_.data());
    return args;
  }
  template <class Args>
  void add_tangents(Args& args, const TensorSet& set) const {
    args.q_tangent = rows_of_q(set.q_tangent, problem_.spec.head_dim);
    args.k_tangent = rows_of_kv(set.k_tangent, problem_.spec.head_dim);
    args.v_tangent = rows_of_kv(set.v_tangent, problem_.spec.v_dim());
  }
  JvpArgs jvp_args(const TensorSet& set) const {
    JvpArgs args;
    static_cast<ForwardArgs&>(args) = forward_args(set);
    add_tangents(args, set);
    args.out_tangent = rows_of_q(set.out_tangent, problem_.spec.v_dim());
    return args;
  }
  BackwardJvpArgs backward_jvp_args(const TensorSet& set) const {
    BackwardJvpArgs args;
    static_cast<BackwardArgs&>(args) = backward_args(set);
    add_tangents(args, set);
    args.capture_tangents = captures_.tangents();
    args.dout_tangent = rows_of_q(set.out_tangent, problem_.spec.v_dim());
    return args;
  }

  std::shared_ptr<const device::Driver> driver_;
  Problem problem_;
  Sizes sizes_;
  CUstream stream_;
  std::vector<TensorSet> sets_;
  DeviceBuffer kv_lengths_, page_table_, map_blocks_, workspace_, cu_seqlens_q_, cu_seqlens_kv_, sinks_,
      dsinks_, scales_, block_scales_, out_scale_, out_block_scales_, indices_, prefix_length_;
  DeviceCaptures captures_;
  BlockPattern map_;
};

struct EventPair {
  device::Event start, stop;
  explicit EventPair(const std::shared_ptr<const device::Driver>& driver) : start(driver), stop(driver) {}
};

}  // namespace

RuntimeOptions candidate_options() {
  return {.cache_dir = "",
          .packs = {},
          .jit = JitMode::on,
          .template_dir = {},
          .tune_in_background = false,
          .log = [](std::string_view) {}};
}

Setting read_setting(const device::Context& context, const RuntimeOptions& options) {
  const device::Driver& driver = *context.driver();
  return {device::query_device(driver, context.device()), cuda_version_text(driver.version),
          compile::Compiler::open(options.nvrtc.value_or(read_environment().nvrtc))->tag(),
          std::string(library_version())};
}

struct DeviceMeter::Impl {
  const device::Context& context;
  const device::Driver& driver;
  DeviceInfo device;
  MeterOptions options;
  device::StreamOwner stream;
  device::Sensors sensors;
  std::deque<EventPair> events;
  std::optional<Inputs> inputs;
  struct Steady {
    TileConfig reference;
    double ms;
  };
  std::optional<Steady> steady;  ///< a launch of the inputs' problem under clocks that had settled

  // One Runtime a candidate: a Runtime holds one configuration a problem.
  std::mutex mutex;
  KernelSpec spec;
  std::map<std::string, std::shared_ptr<Runtime>> runtimes;  // for `spec`, by the configuration's text

  Impl(const device::Context& c, MeterOptions o)
      : context(c),
        driver(*c.driver()),
        device(device::query_device(driver, c.device())),
        options(std::move(o)),
        stream(c.driver()),
        sensors(device::pci_bus_id(driver, c.device())) {
    for (std::size_t i = 0; i < kLaunchesInQueue; ++i) events.emplace_back(c.driver());
  }

  /// The candidate's Runtime, made when it is not there. Runtimes of another spec go: a suite may be long.
  std::shared_ptr<Runtime> runtime(const Problem& problem, const TileConfig& config) {
    const std::lock_guard lock(mutex);
    if (spec != problem.spec) {
      runtimes.clear();
      spec = problem.spec;
    }
    std::shared_ptr<Runtime>& slot = runtimes[to_string(config)];
    if (!slot) slot = std::make_shared<Runtime>(options.runtime);
    return slot;
  }

  Inputs& inputs_of(const Problem& problem) {
    if (!inputs || inputs->problem() != problem) {
      inputs.reset();  // before the next is made: both may not fit
      steady.reset();
      inputs.emplace(context, device, problem, options, stream.get());
    }
    return *inputs;
  }

  /// The time of each launch of a series, in ms. Every part of it waits behind a gate until it is queued.
  std::vector<double> time_series(Inputs& input, const std::vector<Runtime*>& series) {
    std::vector<double> ms;
    for (std::size_t from = 0; from < series.size(); from += kLaunchesInQueue) {
      const std::size_t to = std::min(from + kLaunchesInQueue, series.size());
      {
        const Gate gate(driver, stream.get());
        for (std::size_t i = from; i < to; ++i) {
          const EventPair& event = events[i - from];
          event.start.record(stream.get());
          input.launch(*series[i], i % input.sets());
          event.stop.record(stream.get());
        }
      }
      stream.synchronize();
      for (std::size_t i = from; i < to; ++i)
        ms.push_back(events[i - from].stop.ms_since(events[i - from].start));
    }
    return ms;
  }

  /// Runs the reference until its time stays the same, or is again the time at which it last stayed.
  /// A GPU that was idle runs a long problem faster than it can go on: its power limit lowers the clock.
  void warm_up(Inputs& input, const TileConfig& config, Runtime& reference) {
    const auto mean = [](auto from, auto to) {
      return std::accumulate(from, to, 0.0) / static_cast<double>(to - from);
    };
    const auto burst = [&](std::size_t launches) {
      const std::vector<double> ms = time_series(input, std::vector(launches, &reference));
      return mean(ms.begin(), ms.end());
    };
    const double first = std::max(burst(1), kEventMs);
    const auto launches = static_cast<std::size_t>(
        std::clamp<double>(kBurstMs / first, 1, static_cast<double>(kLaunchesInBurst)));
    const double bursts_ms = first * static_cast<double>(launches);
    const auto bursts =
        std::clamp(static_cast<std::size_t>(kSteadyMs / bursts_ms), kFewestBursts, kMostBursts);
    std::vector<double> ms;
    while (ms.size() < kLongestWarmUp * bursts) {
      ms.push_back(burst(launches));
      if (steady && steady->reference == config && ms.back() >= steady->ms * (1 - kSteady) - kEventMs) return;
      if (ms.size() < bursts) continue;
      const auto half = ms.end() - static_cast<std::ptrdiff_t>(bursts / 2);
      const double before = mean(half - static_cast<std::ptrdiff_t>(bursts / 2), half);
      const double after = mean(half, ms.end());
      if (std::abs(after - before) <= std::max(kSteady * after, kEventMs)) break;
    }
    steady = {config, mean(ms.end() - static_cast<std::ptrdiff_t>(bursts / 2), ms.end())};
  }

  Comparison compare(const Problem& problem, const TileConfig& reference,
                     std::span<const TileConfig> candidates, int rounds) {
    Inputs& input = inputs_of(problem);
    std::vector<std::shared_ptr<Runtime>> runtimes;
    const auto add = [&](const TileConfig& config) {
      input.ensure_workspace(
          plan::make_plan(problem.spec, problem.shape, device, {}, config).workspace.bytes);
      runtimes.push_back(runtime(problem, config));
    };
    add(reference);
    for (const TileConfig& candidate : candidates) add(candidate);
    for (const auto& each : runtimes) input.launch(*each, 0);  // its code is loaded
    warm_up(input, reference, *runtimes.front());
    std::vector<Runtime*> series;
    for (const std::size_t i : launch_order(candidates.size(), std::max(rounds, 1)))
      series.push_back(runtimes[i].get());
    return compare_times(time_series(input, series), candidates.size());
  }
};

DeviceMeter::DeviceMeter(const device::Context& context, MeterOptions options)
    : impl_(std::make_unique<Impl>(context, std::move(options))) {}
DeviceMeter::~DeviceMeter() = default;

KernelReport DeviceMeter::prepare(const Problem& problem, const TileConfig& config) {
  impl_->context.make_current_apart();
  return impl_->runtime(problem, config)->prepare(problem.spec, problem.shape, config);
}

device::GpuState DeviceMeter::state() { return impl_->sensors.read(); }

Comparison DeviceMeter::compare(const Problem& problem, const TileConfig& reference,
                                std::span<const TileConfig> candidates, int rounds) {
  impl_->context.make_current_apart();
  try {
    return impl_->compare(problem, reference, candidates, rounds);
  } catch (const Error& error) {
    // A refused launch is the candidate's fault; a context that does not answer is everyone's.
    const bool sound = impl_->driver.stream_synchronize(impl_->stream.get()) == CUDA_SUCCESS;
    if (error.code() != ErrorCode::cuda || !sound) throw;
    throw Error(ErrorCode::unsupported, error.message(), error.detail());
  }
}

}  // namespace flashjit::autotune
