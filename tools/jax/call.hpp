// Buffers and attributes of a custom call as arguments of flashjit's C interface.
//
// A call says by names what its operands and results are, separated by spaces: `args` such as "q k v sinks
// c0", `results` such as "out lse workspace". Captures, and the gradients of captures, have the names of the
// spec's programs; "dc0" is the gradient of "c0", or where gradients have tangents made the tangent of that,
// as "dq" is; "c0_tangent" is c0's tangent, "before_mod" O before the spec's out_mod. "new_k_cache" is the
// cache after append(). Where XLA put a result is looked at, never assumed: inside loops it writes results
// into slices of larger arrays.
#pragma once

#include <dlfcn.h>

#include <xla/ffi/api/ffi.h>
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "flashjit/flashjit.h"
#include "library.hpp"

namespace flashjit_jax {

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

inline flashjit_element_type element_type(ffi::DataType type) {
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
    made.out_before_mod = tensor("before_mod");
    made.page_table = page_table();
    made.q_scale = scales("q_scale");
    made.k_scale = scales("k_scale");
    made.v_scale = scales("v_scale");
    made.k_block_scale = tensor("k_block_scale");
    made.v_block_scale = tensor("v_block_scale");
    made.out_scale = data<float>("out_scale");
    made.out_block_scale = tensor("out_block_scale");
    return made;
  }

  flashjit_backward_args backward() const {
    auto made = with_common<flashjit_backward_args>();
    if (find("before_mod")) made.out = tensor("before_mod");
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

  /// `backward` must live as long as the result.
  flashjit_backward_jvp_args backward_jvp(const flashjit_backward_args& backward) const {
    flashjit_backward_jvp_args made{};
    made.struct_size = sizeof made;
    made.backward = &backward;
    made.q_tangent = tensor("q_tangent");
    made.k_tangent = tensor("k_tangent");
    made.v_tangent = tensor("v_tangent");
    made.dout_tangent = tensor("dout_tangent");
    made.dlse_tangent = data<float>("dlse_tangent");
    made.sinks_tangent = data<float>("sinks_tangent");
    made.capture_tangents = capture_tangents_.data();
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
    made.k_block_scale = tensor("new_k_block_scale");
    made.v_block_scale = tensor("new_v_block_scale");
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

  /// The shape; the queries of an append are the new rows.
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
      capture_tangents_.push_back(data<float>(names_.back() + "_tangent"));
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
  std::vector<const float*> capture_tangents_;  ///< of each capture
};

}  // namespace flashjit_jax
