/// XLA's calls of attention: buffers and attributes of a custom call as arguments of flashjit's C interface.
///
/// A call says by names what its operands and results are, separated by spaces: `args` such as "q k v sinks
/// c0", `results` such as "out lse workspace". Captures, and the gradients of captures, have the names of the
/// spec's programs; "dc0" is the gradient of "c0", "c0_tangent" its tangent. "new_k_cache" is the cache after
/// append(). Where XLA put a result is looked at, never assumed: inside loops it writes results into slices
/// of larger arrays.

#include <dlfcn.h>

#include <xla/ffi/api/ffi.h>
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "flashjit/flashjit.h"

namespace {

namespace ffi = xla::ffi;

/// The library's functions, from the file that Python has opened, and what calls share.
class Library {
 public:
  /// Null, or what is wrong with the file.
  const char* open(const char* path, flashjit_runtime* shared) {
    void* file = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!file) return dlerror();
    const bool found =
        find(file, "flashjit_forward", forward) && find(file, "flashjit_backward", backward) &&
        find(file, "flashjit_reference_forward", reference_forward) &&
        find(file, "flashjit_reference_backward", reference_backward) && find(file, "flashjit_jvp", jvp) &&
        find(file, "flashjit_reference_jvp", reference_jvp) && find(file, "flashjit_append", append) &&
        find(file, "flashjit_reference_append", reference_append) &&
        find(file, "flashjit_prepare", prepare) && find(file, "flashjit_spec_create", spec_create) &&
        find(file, "flashjit_last_error_message", last_error_message);
    if (!found) return dlerror();
    runtime = shared;
    return nullptr;
  }

  /// Null, with an error to ask for, where the text is wrong.
  const flashjit_spec* spec(std::string_view text) {
    const std::lock_guard lock(mutex_);
    auto found = specs_.find(text);
    if (found != specs_.end()) return found->second;
    flashjit_spec* made = nullptr;
    const std::string key(text);
    if (spec_create(key.c_str(), &made) != FLASHJIT_OK) return nullptr;
    return specs_.emplace(key, made).first->second;
  }

  /// Whether the device has not prepared such a call yet.
  bool is_new(const std::string& call) {
    const std::lock_guard lock(mutex_);
    return !prepared_.contains(call);
  }
  void keep(std::string call) {
    const std::lock_guard lock(mutex_);
    prepared_.insert(std::move(call));
  }

  decltype(&flashjit_forward) forward = nullptr;
  decltype(&flashjit_backward) backward = nullptr;
  decltype(&flashjit_reference_forward) reference_forward = nullptr;
  decltype(&flashjit_reference_backward) reference_backward = nullptr;
  decltype(&flashjit_jvp) jvp = nullptr;
  decltype(&flashjit_reference_jvp) reference_jvp = nullptr;
  decltype(&flashjit_append) append = nullptr;
  decltype(&flashjit_reference_append) reference_append = nullptr;
  decltype(&flashjit_prepare) prepare = nullptr;
  decltype(&flashjit_spec_create) spec_create = nullptr;
  decltype(&flashjit_last_error_message) last_error_message = nullptr;
  flashjit_runtime* runtime = nullptr;

 private:
  template <class Function>
  static bool find(void* file, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(file, name));
    return function != nullptr;
  }

  std::mutex mutex_;
  std::map<std::string, flashjit_spec*, std::less<>> specs_;
  std::set<std::string> prepared_;
};

/// XLA gives a handler nothing that outlives a call.
Library& library() {
  static Library& shared = *new Library;  // never destroyed: executables may run to the last
  return shared;
}

/// Copies and clears memory on a stream, or on the host where there is none, by the driver that JAX has
/// loaded.
class Memory {
 public:
  explicit Memory(CUstream_st* stream, bool on_gpu) : stream_(stream), on_gpu_(on_gpu) {}

  bool copy(void* to, const void* from, std::size_t bytes) const {
    if (to == from || bytes == 0) return true;
    if (!on_gpu_) return std::memcpy(to, from, bytes);
    using Copy = int(std::uintptr_t, std::uintptr_t, std::size_t, CUstream_st*);
    static Copy* const function = reinterpret_cast<Copy*>(find("cuMemcpyDtoDAsync_v2"));
    return function && function(address(to), address(from), bytes, stream_) == 0;
  }
  bool clear(void* to, std::size_t bytes) const {
    if (bytes == 0) return true;
    if (!on_gpu_) return std::memset(to, 0, bytes);
    using Clear = int(std::uintptr_t, unsigned char, std::size_t, CUstream_st*);
    static Clear* const function = reinterpret_cast<Clear*>(find("cuMemsetD8Async"));
    return function && function(address(to), 0, bytes, stream_) == 0;
  }

 private:
  static std::uintptr_t address(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }
  static void* find(const char* name) {
    void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    return driver ? dlsym(driver, name) : nullptr;
  }

  CUstream_st* stream_;
  bool on_gpu_;
};

ffi::Error error_of(flashjit_status status) {
  if (status == FLASHJIT_OK) return ffi::Error::Success();
  const ffi::ErrorCode code = status == FLASHJIT_INVALID_ARGUMENT ? ffi::ErrorCode::kInvalidArgument
                              : status == FLASHJIT_UNSUPPORTED    ? ffi::ErrorCode::kUnimplemented
                              : status == FLASHJIT_INTERNAL       ? ffi::ErrorCode::kInternal
                                                                  : ffi::ErrorCode::kFailedPrecondition;
  return {code, std::string("flashjit: ") + library().last_error_message()};
}

flashjit_element_type element_type(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32:
      return FLASHJIT_ELEMENT_FP32;
    case ffi::DataType::F16:
      return FLASHJIT_ELEMENT_FP16;
    case ffi::DataType::BF16:
      return FLASHJIT_ELEMENT_BF16;
    case ffi::DataType::S32:
      return FLASHJIT_ELEMENT_INT32;
    case ffi::DataType::S64:
      return FLASHJIT_ELEMENT_INT64;
    case ffi::DataType::S16:
      return FLASHJIT_ELEMENT_INT16;
    case ffi::DataType::S8:
      return FLASHJIT_ELEMENT_INT8;
    case ffi::DataType::U8:
      return FLASHJIT_ELEMENT_UINT8;
    case ffi::DataType::PRED:
      return FLASHJIT_ELEMENT_BOOL;
    default:
      return FLASHJIT_ELEMENT_UNTOLD;
  }
}

/// The attributes of a call.
struct Attributes {
  std::string_view spec, layout, args, results;
  float scale, dropout;
  std::int64_t max_seqlen_q = 0, max_seqlen_kv = 0;  ///< of packed sequences
};

/// How append() turns rows, besides its tables.
struct Rotation {
  float theta;
  std::int64_t dims, interleaved;
};

/// The operands and results of one call, by name, and what each function makes of them.
class Call {
 public:
  Call(const Attributes& given, const ffi::RemainingArgs& args, const ffi::RemainingRets& rets)
      : given_(given), heads_first_(given.layout == "BHSD") {
    add(given.args, args);
    add(given.results, rets);
    find_captures();
  }

  flashjit_forward_args forward() const {
    auto made = with_common<flashjit_forward_args>();
    made.lse = data<float>("lse");
    made.page_table = page_table();
    made.q_scale = scales("q_scale");
    made.k_scale = scales("k_scale");
    made.v_scale = scales("v_scale");
    return made;
  }

  flashjit_backward_args backward() const {
    auto made = with_common<flashjit_backward_args>();
    made.lse = data<float>("lse");
    made.dlse = data<float>("dlse");
    made.dout = tensor("dout");
    made.dq = tensor("dq");
    made.dk = tensor("dk");
    made.dv = tensor("dv");
    made.dsinks = data<float>("dsinks");
    return made;
  }

  /// `forward` must live as long as the result.
  flashjit_jvp_args jvp(const flashjit_forward_args& forward) const {
    flashjit_jvp_args made{};
    made.struct_size = sizeof made;
    made.forward = &forward;
    made.q_tangent = tensor("q_tangent");
    made.k_tangent = tensor("k_tangent");
    made.v_tangent = tensor("v_tangent");
    made.out_tangent = tensor("out_tangent");
    made.lse_tangent = data<float>("lse_tangent");
    made.sinks_tangent = data<float>("sinks_tangent");
    return made;
  }

  flashjit_append_args append(const Rotation& rotation) const {
    flashjit_append_args made{};
    made.struct_size = sizeof made;
    made.k = tensor("k");
    made.v = tensor("v");
    made.k_cache = tensor("new_k_cache");
    made.v_cache = tensor("new_v_cache");
    made.kv_lengths = data<std::int32_t>("kv_lengths");
    made.page_table = page_table();
    made.k_scale = scales(find("new_k_scale") ? "new_k_scale" : "k_scale");
    made.v_scale = scales(find("new_v_scale") ? "new_v_scale" : "v_scale");
    made.q = tensor("q");
    made.q_out = tensor("q_out");
    made.rope.theta = rotation.theta;
    made.rope.dims = static_cast<std::int32_t>(rotation.dims);
    made.rope.interleaved = rotation.interleaved != 0;
    made.rope.positions = data<std::int32_t>("positions");
    if (const ffi::AnyBuffer* cos = find("cos")) {
      made.rope.cos = cos->untyped_data();
      made.rope.sin = data<void>("sin");
      made.rope.table_rows = cos->dimensions()[0];
      made.rope.type = element_type(cos->element_type());
      made.rope.dims = static_cast<std::int32_t>(2 * cos->dimensions()[1]);
    }
    return made;
  }

  /// Of an append, the new rows are the queries.
  flashjit_shape shape() const {
    const bool appends = find("k_cache") != nullptr;
    const flashjit_tensor q = tensor(find("q") ? "q" : "k"), k = tensor(appends ? "k_cache" : "k");
    const flashjit_page_table table = page_table();
    if (const std::int64_t sequences = packed_sequences())
      return {sequences, q.size[1], k.size[1], given_.max_seqlen_q, given_.max_seqlen_kv};
    const bool in_pages = table.data && find("page_table")->dimensions().size() == 2;
    return {q.size[0], q.size[1], k.size[1], q.size[2], k.size[2] * (in_pages ? table.columns : 1)};
  }

  std::string_view spec() const { return given_.spec; }

  /// Makes of results what calls add to or write parts of: zeros of gradients and of LSE's tangent, and
  /// copies of caches.
  ffi::Error begin_results(const Memory& memory) const {
    bool done = true;
    for (const Named& result : buffers_) {
      if (result.name == "dsinks" || result.name == "lse_tangent" || result.name.starts_with("dc"))
        done &= memory.clear(result.buffer.untyped_data(), result.buffer.size_bytes());
      else if (result.name.starts_with("new_"))
        done &= memory.copy(result.buffer.untyped_data(), data<void>(result.name.substr(4)),
                            result.buffer.size_bytes());
    }
    return done
               ? ffi::Error::Success()
               : ffi::Error(ffi::ErrorCode::kInternal, "flashjit: the driver did not copy or clear a result");
  }

  bool has_buffers() const { return !buffers_.empty(); }

 private:
  struct Named {
    std::string_view name;
    ffi::AnyBuffer buffer;
  };

  /// 0 where Q is not packed.
  std::int64_t packed_sequences() const {
    const ffi::AnyBuffer* starts = find("cu_seqlens_q");
    return starts ? starts->dimensions()[0] - 1 : 0;
  }

  static ffi::AnyBuffer buffer_of(ffi::AnyBuffer buffer) { return buffer; }
  static ffi::AnyBuffer buffer_of(ffi::Result<ffi::AnyBuffer> result) { return *result; }

  template <class Buffers>
  void add(std::string_view names, const Buffers& buffers) {
    for (std::size_t i = 0; !names.empty() && i < buffers.size(); ++i) {
      const std::size_t end = std::min(names.find(' '), names.size());
      const std::string_view name = names.substr(0, end);
      names.remove_prefix(std::min(end + 1, names.size()));
      if (auto buffer = buffers.template get<ffi::AnyBuffer>(i); buffer.has_value())
        buffers_.push_back({name, buffer_of(*buffer)});
    }
  }

  const ffi::AnyBuffer* find(std::string_view name) const {
    const auto found = std::find_if(buffers_.begin(), buffers_.end(),
                                    [name](const Named& named) { return named.name == name; });
    return found == buffers_.end() ? nullptr : &found->buffer;
  }

  template <class T>
  T* data(std::string_view name) const {
    const ffi::AnyBuffer* buffer = find(name);
    return buffer ? static_cast<T*>(buffer->untyped_data()) : nullptr;
  }

  /// Dense in XLA's order of dimensions, seen in flashjit's: batch, heads, length, dim.
  flashjit_tensor tensor(std::string_view name) const {
    const ffi::AnyBuffer* buffer = find(name);
    if (!buffer || buffer->dimensions().size() != 4) return {};
    const auto size = buffer->dimensions();
    flashjit_tensor made{buffer->untyped_data(),
                         {size[0], size[1], size[2], size[3]},
                         {size[1] * size[2] * size[3], size[2] * size[3], size[3], 1}};
    if (!heads_first_) {
      std::swap(made.size[1], made.size[2]);
      std::swap(made.stride[1], made.stride[2]);
    }
    return made;
  }

  /// Scales have four dimensions: sequences, pages, KV heads, rows.
  flashjit_scales scales(std::string_view name) const {
    const ffi::AnyBuffer* buffer = find(name);
    if (!buffer || buffer->dimensions().size() != 4) return {};
    const auto size = buffer->dimensions();
    return {static_cast<float*>(buffer->untyped_data()),
            {size[0], size[1], size[2], size[3]},
            {size[1] * size[2] * size[3], size[2] * size[3], size[3], 1}};
  }

  flashjit_page_table page_table() const {
    const ffi::AnyBuffer* table = find("page_table");
    if (!table) return {};
    const auto size = table->dimensions();
    return {static_cast<const std::int32_t*>(table->untyped_data()), size[0], size.size() == 2 ? size[1] : 1,
            0, nullptr};
  }

  /// A "c" and a number.
  static bool is_capture(std::string_view name) {
    return name.starts_with('c') && name.size() > 1 &&
           name.find_first_not_of("0123456789", 1) == std::string_view::npos;
  }

  /// What the spec's programs read.
  void find_captures() {
    names_.reserve(buffers_.size());  // captures point into it
    for (const Named& named : buffers_) {
      if (!is_capture(named.name)) continue;
      flashjit_capture capture{};
      capture.name = names_.emplace_back(named.name).c_str();
      capture.data = named.buffer.untyped_data();
      capture.grad = data<float>("d" + names_.back());
      if (!capture.grad) capture.grad = data<float>(names_.back() + "_tangent");
      capture.type = element_type(named.buffer.element_type());
      const auto size = named.buffer.dimensions();
      capture.rank = static_cast<std::int32_t>(size.size());
      std::int64_t step = 1;
      for (std::size_t i = std::min<std::size_t>(size.size(), FLASHJIT_MAX_CAPTURE_DIMS); i-- > 0;) {
        capture.size[i] = size[i];
        capture.stride[i] = step;
        step *= size[i];
      }
      captures_.push_back(capture);
    }
  }

  template <class Args>
  Args with_common() const {
    Args args{};
    args.struct_size = sizeof args;
    args.q = tensor("q");
    args.k = tensor("k");
    args.v = tensor("v");
    args.out = tensor("out");
    args.softmax_scale = &given_.scale;
    args.dropout_p = given_.dropout;
    args.rng_state = data<std::uint64_t>("rng");
    args.kv_lengths = data<std::int32_t>("kv_lengths");
    args.sinks = data<float>("sinks");
    args.cu_seqlens_q = data<std::int32_t>("cu_seqlens_q");
    args.cu_seqlens_kv = data<std::int32_t>("cu_seqlens_kv");
    args.batch_size = packed_sequences();
    args.max_seqlen_q = given_.max_seqlen_q;
    args.max_seqlen_kv = given_.max_seqlen_kv;
    args.zero_unused_rows = args.cu_seqlens_q != nullptr;
    lend_workspace(args);
    args.captures = captures_.data();
    args.capture_count = captures_.size();
    return args;
  }

  /// XLA aligns less than flashjit asks for, so that Python asks for more bytes than are needed.
  template <class Args>
  void lend_workspace(Args& args) const {
    void* memory = data<void>("workspace");
    std::size_t bytes = memory ? find("workspace")->size_bytes() : 0;
    if (bytes == 0 || !std::align(kAlignment, 1, memory, bytes)) return;
    args.workspace = memory;
    args.workspace_bytes = bytes;
  }

  static constexpr std::size_t kAlignment = 256;

  Attributes given_;
  bool heads_first_;
  std::vector<Named> buffers_;
  std::vector<std::string> names_;
  std::vector<flashjit_capture> captures_;
};

ffi::Error launch(flashjit_pass pass, const Call& call, CUstream_st* stream) {
  const flashjit_spec* spec = library().spec(call.spec());
  if (!spec) return error_of(FLASHJIT_INVALID_ARGUMENT);
  flashjit_runtime* runtime = library().runtime;
  if (pass == FLASHJIT_FORWARD) {
    const auto args = call.forward();
    return error_of(library().forward(runtime, spec, &args, stream));
  }
  if (ffi::Error error = call.begin_results(Memory(stream, true)); error.failure()) return error;
  if (pass == FLASHJIT_JVP) {
    const auto forward = call.forward();
    const auto args = call.jvp(forward);
    return error_of(library().jvp(runtime, spec, &args, stream));
  }
  const auto args = call.backward();
  return error_of(library().backward(runtime, spec, &args, stream));
}

ffi::Error compute(flashjit_pass pass, const Call& call) {
  const flashjit_spec* spec = library().spec(call.spec());
  if (!spec) return error_of(FLASHJIT_INVALID_ARGUMENT);
  if (pass == FLASHJIT_FORWARD) {
    const auto args = call.forward();
    return error_of(library().reference_forward(spec, &args));
  }
  if (ffi::Error error = call.begin_results(Memory(nullptr, false)); error.failure()) return error;
  if (pass == FLASHJIT_JVP) {
    const auto forward = call.forward();
    const auto args = call.jvp(forward);
    return error_of(library().reference_jvp(spec, &args));
  }
  const auto args = call.backward();
  return error_of(library().reference_backward(spec, &args));
}

/// Compiles and loads before a stream is captured into a CUDA graph, in which nothing may be loaded.
ffi::Error prepare(flashjit_pass pass, const Call& call, std::int32_t device) {
  if (!call.has_buffers()) return ffi::Error::Success();  // an XLA that gives none before it executes
  const flashjit_spec* spec = library().spec(call.spec());
  if (!spec) return error_of(FLASHJIT_INVALID_ARGUMENT);
  const flashjit_shape shape = call.shape();
  std::string key(call.spec());
  for (const std::int64_t part : {std::int64_t{device}, std::int64_t{pass}, shape.batch, shape.heads_q,
                                  shape.heads_kv, shape.seqlen_q, shape.seqlen_kv})
    key += ' ' + std::to_string(part);
  if (!library().is_new(key)) return ffi::Error::Success();
  const ffi::Error error = error_of(library().prepare(library().runtime, pass, spec, &shape, nullptr));
  if (error.success()) library().keep(std::move(key));
  return error;
}

ffi::Error append(bool launches, const Call& call, const Rotation& rotation, CUstream_st* stream) {
  const flashjit_spec* spec = library().spec(call.spec());
  if (!spec) return error_of(FLASHJIT_INVALID_ARGUMENT);
  if (ffi::Error error = call.begin_results(Memory(stream, launches)); error.failure()) return error;
  const auto args = call.append(rotation);
  return error_of(launches ? library().append(library().runtime, spec, &args, stream)
                           : library().reference_append(spec, &args));
}

using Text = std::string_view;

template <flashjit_pass pass>
ffi::Error on_gpu(CUstream_st* stream, ffi::RemainingArgs args, ffi::RemainingRets rets, Text spec,
                  Text layout, Text names, Text results, float scale, float dropout,
                  std::int64_t max_seqlen_q, std::int64_t max_seqlen_kv) {
  return launch(pass,
                Call({spec, layout, names, results, scale, dropout, max_seqlen_q, max_seqlen_kv}, args, rets),
                stream);
}

template <flashjit_pass pass>
ffi::Error before_gpu(std::int32_t device, ffi::RemainingArgs args, ffi::RemainingRets rets, Text spec,
                      Text layout, Text names, Text results, float scale, float dropout,
                      std::int64_t max_seqlen_q, std::int64_t max_seqlen_kv) {
  return prepare(
      pass, Call({spec, layout, names, results, scale, dropout, max_seqlen_q, max_seqlen_kv}, args, rets),
      device);
}

template <flashjit_pass pass>
ffi::Error on_cpu(ffi::RemainingArgs args, ffi::RemainingRets rets, Text spec, Text layout, Text names,
                  Text results, float scale, float dropout, std::int64_t max_seqlen_q,
                  std::int64_t max_seqlen_kv) {
  return compute(
      pass, Call({spec, layout, names, results, scale, dropout, max_seqlen_q, max_seqlen_kv}, args, rets));
}

ffi::Error append_on_gpu(CUstream_st* stream, ffi::RemainingArgs args, ffi::RemainingRets rets, Text spec,
                         Text layout, Text names, Text results, float theta, std::int64_t dims,
                         std::int64_t interleaved) {
  return append(true, Call({spec, layout, names, results, 1, 0}, args, rets), {theta, dims, interleaved},
                stream);
}

ffi::Error before_append(std::int32_t device, ffi::RemainingArgs args, ffi::RemainingRets rets, Text spec,
                         Text layout, Text names, Text results, float, std::int64_t, std::int64_t) {
  return prepare(FLASHJIT_APPEND, Call({spec, layout, names, results, 1, 0}, args, rets), device);
}

ffi::Error append_on_cpu(ffi::RemainingArgs args, ffi::RemainingRets rets, Text spec, Text layout, Text names,
                         Text results, float theta, std::int64_t dims, std::int64_t interleaved) {
  return append(false, Call({spec, layout, names, results, 1, 0}, args, rets), {theta, dims, interleaved},
                nullptr);
}

template <class Binding>
auto with_names(Binding&& binding) {
  return std::move(binding)
      .RemainingArgs()
      .RemainingRets()
      .template Attr<Text>("spec")
      .template Attr<Text>("layout")
      .template Attr<Text>("args")
      .template Attr<Text>("results");
}

template <class Binding>
auto with_rotation(Binding&& binding) {
  return with_names(std::move(binding))
      .template Attr<float>("theta")
      .template Attr<std::int64_t>("rope_dims")
      .template Attr<std::int64_t>("interleaved");
}

template <class Binding>
auto with_all(Binding&& binding) {
  return with_names(std::move(binding))
      .template Attr<float>("scale")
      .template Attr<float>("dropout")
      .template Attr<std::int64_t>("max_seqlen_q")
      .template Attr<std::int64_t>("max_seqlen_kv");
}

auto on_stream() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<CUstream_st*>>(); }
auto on_device() { return ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>().Ctx<ffi::DeviceOrdinal>(); }
auto on_host() { return ffi::Ffi::Bind(); }

}  // namespace

/// Null, or why the library at `path` cannot be used. Called once, before all handlers.
extern "C" const char* flashjit_jax_open(const char* path, flashjit_runtime* runtime) {
  return library().open(path, runtime);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(flashjit_jax_forward, on_gpu<FLASHJIT_FORWARD>, with_all(on_stream()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashjit_jax_backward, on_gpu<FLASHJIT_BACKWARD>, with_all(on_stream()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashjit_jax_tangent, on_gpu<FLASHJIT_JVP>, with_all(on_stream()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashjit_jax_append, append_on_gpu, with_rotation(on_stream()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashjit_jax_prepare_forward, before_gpu<FLASHJIT_FORWARD>,
                              with_all(on_device()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashjit_jax_prepare_backward, before_gpu<FLASHJIT_BACKWARD>,
                              with_all(on_device()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashjit_jax_prepare_tangent, before_gpu<FLASHJIT_JVP>, with_all(on_device()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashjit_jax_prepare_append, before_append, with_rotation(on_device()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashjit_jax_reference_forward, on_cpu<FLASHJIT_FORWARD>, with_all(on_host()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashjit_jax_reference_backward, on_cpu<FLASHJIT_BACKWARD>,
                              with_all(on_host()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashjit_jax_reference_tangent, on_cpu<FLASHJIT_JVP>, with_all(on_host()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashjit_jax_reference_append, append_on_cpu, with_rotation(on_host()));
