#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "api/read_struct.hpp"
#include "flashjit/distributed.hpp"
#include "flashjit/flashjit.h"
#include "flashjit/flashjit.hpp"
#include "flashjit/reference.hpp"
#include "plan/spec_options.hpp"
#include "support/dtypes.hpp"
#include "support/refuse.hpp"
#include "templates/auxiliary/append_params.cuh"
#include "templates/common/params.cuh"

struct flashjit_runtime {
  flashjit::Runtime runtime;
};

struct flashjit_spec {
  flashjit::AttentionSpec spec;
};

struct flashjit_shared_attention {
  flashjit::SharedAttention shared;
};

struct flashjit_tile_lists {
  flashjit::TileLists lists;
};

namespace {

using flashjit::Error;
using flashjit::ErrorCode;

struct LastError {
  std::string message, detail;
};

/// Per thread, because C has no other place for a message. Null when the thread's objects are gone: an atexit
/// handler or a destructor may call the library even then, and gets the status alone.
LastError* last_error() noexcept {
  thread_local bool gone = false;  // has no destructor, so it can be read to the last
  struct Owned : LastError {
    ~Owned() { gone = true; }
  };
  if (gone) return nullptr;
  thread_local Owned error;
  return &error;
}

flashjit_status keep_error(ErrorCode code, const char* message, const char* detail) noexcept {
  if (LastError* last = last_error()) {
    try {
      last->message = message;
      last->detail = detail;
    } catch (...) {
      last->message.clear(), last->detail.clear();  // no memory for the message; there is still the status
    }
  }
  return static_cast<flashjit_status>(code);
}

/// Runs `body`; what it throws becomes a status and the last error.
template <class Body>
flashjit_status guarded(Body&& body) noexcept {
  try {
    body();
    return FLASHJIT_OK;
  } catch (const Error& error) {
    return keep_error(error.code(), error.message().c_str(), error.detail().c_str());
  } catch (const std::exception& error) {
    return keep_error(ErrorCode::internal, error.what(), "");
  } catch (...) {
    return keep_error(ErrorCode::internal, "an exception of an unknown type", "");
  }
}

template <class T>
T& required(T* pointer, const char* name, const char* advice) {
  if (!pointer) throw Error(ErrorCode::invalid_argument, fmt::format("{} is null: {}.", name, advice));
  return *pointer;
}

flashjit::Runtime& get(flashjit_runtime* runtime) {
  return required(runtime, "runtime", "make one with flashjit_runtime_create()").runtime;
}
const flashjit::AttentionSpec& get(const flashjit_spec* spec) {
  return required(spec, "spec", "make one with flashjit_spec_create()").spec;
}

flashjit::KernelSpec get(const flashjit_spec* spec, flashjit_pass pass) {
  if (pass >= FLASHJIT_FORWARD && pass <= FLASHJIT_JVP) return {get(spec), static_cast<flashjit::Pass>(pass)};
  throw Error(
      ErrorCode::invalid_argument,
      fmt::format("pass is {}: give FLASHJIT_FORWARD (0), FLASHJIT_BACKWARD (1), FLASHJIT_APPEND (2), "
                  "FLASHJIT_MERGE (3), FLASHJIT_QUANTIZE (4) or FLASHJIT_JVP (5).",
                  pass));
}

flashjit::AttentionShape get(const flashjit_shape* shape) {
  const auto& [batch, heads_q, heads_kv, seqlen_q, seqlen_kv] =
      required(shape, "shape", "give the sizes of the problem");
  return {batch, heads_q, heads_kv, seqlen_q, seqlen_kv};
}

flashjit::TensorView view(const flashjit_tensor& tensor) {
  return {tensor.data, std::to_array(tensor.size), std::to_array(tensor.stride)};
}

flashjit::PageTableView view(const flashjit_page_table& table) {
  return {table.data, table.sequences, table.columns, table.stride, table.starts};
}

flashjit::ScaleView view(const flashjit_scales& scales) {
  if (!scales.data) return {};
  flashjit::ScaleView out{scales.data, std::to_array(scales.size), std::to_array(scales.stride)};
  std::ranges::replace(out.size, 0, 1);  // as zeros are defaults
  return out;
}

flashjit::IndicesView view(const flashjit_indices& indices) {
  return {indices.data, std::to_array(indices.size), std::to_array(indices.stride)};
}

flashjit::DropoutPlace view(const flashjit_dropout_place& place) {
  return {.batch = place.batch,
          .head = place.head,
          .heads = place.heads,
          .q = place.q,
          .kv = place.kv,
          .q_step = place.q_step ? place.q_step : 1,
          .kv_step = place.kv_step ? place.kv_step : 1};
}

std::optional<float> optional(const float* value) { return value ? std::optional(*value) : std::nullopt; }

static_assert(FLASHJIT_MAX_CAPTURES == flashjit::kMaxCaptures + flashjit::kMaxScalars);
static_assert(FLASHJIT_ELEMENT_BOOL == 1 + static_cast<int>(flashjit::ElementType::boolean));

flashjit::Capture capture(const flashjit_capture& c) {
  using flashjit::ElementType;
  if (c.type < FLASHJIT_ELEMENT_UNTOLD || c.type > FLASHJIT_ELEMENT_BOOL)
    throw Error(ErrorCode::invalid_argument,
                fmt::format("the type of the capture {} is {}: give FLASHJIT_ELEMENT_UNTOLD (0) to "
                            "FLASHJIT_ELEMENT_BOOL (9).",
                            c.name, c.type));
  flashjit::Capture made{.name = c.name,
                         .data = c.data,
                         .grad = c.grad,
                         .rank = c.rank,
                         .size = std::to_array(c.size),
                         .stride = std::to_array(c.stride),
                         .scalar = c.scalar};
  if (c.type != FLASHJIT_ELEMENT_UNTOLD) made.type = static_cast<ElementType>(c.type - 1);
  return made;
}

/// Room for one call's captures, whose span the arguments hold.
using Captures = std::array<flashjit::Capture, FLASHJIT_MAX_CAPTURES>;

template <class CArgs>
std::span<const flashjit::Capture> captures(const CArgs& c, Captures& room) {
  if (c.capture_count > room.size())
    throw Error(ErrorCode::invalid_argument,
                fmt::format("capture_count is {}: programs declare at most {} tensors and {} scalars.",
                            c.capture_count, flashjit::kMaxCaptures, flashjit::kMaxScalars));
  if (c.capture_count > 0) required(c.captures, "captures", "give capture_count of them");
  for (std::size_t i = 0; i < c.capture_count; ++i) {
    required(c.captures[i].name, "the name of a capture", "give the name that the program declares");
    room[i] = capture(c.captures[i]);
  }
  return {room.data(), c.capture_count};
}

/// What both structs of arguments have besides their tensors.
template <class Args, class CArgs>
void set_common(Args& args, const CArgs& c, Captures& room) {
  args.softmax_scale = optional(c.softmax_scale);
  args.kv_lengths = c.kv_lengths;
  args.block_map = {c.block_map.data, std::to_array(c.block_map.size)};
  args.dropout_p = c.dropout_p;
  args.seed = c.seed;
  args.offset = c.offset;
  args.workspace = {c.workspace, c.workspace_bytes};
  args.captures = captures(c, room);
  args.cu_seqlens_q = c.cu_seqlens_q;
  args.cu_seqlens_kv = c.cu_seqlens_kv;
  args.batch_size = c.batch_size;
  args.max_seqlen_q = c.max_seqlen_q;
  args.max_seqlen_kv = c.max_seqlen_kv;
  args.sinks = c.sinks;
  args.lists = c.lists ? &c.lists->lists : nullptr;
  args.rng_state = c.rng_state;
  args.indices = view(c.indices);
  args.partial.dropout_place = view(c.dropout_place);
  args.partial.reserved_sms = c.reserved_sms;
  args.zero_unused_rows = c.zero_unused_rows != 0;
}

flashjit::RowStrides strides(const std::int64_t (&c)[3]) { return {c[0], c[1], c[2]}; }

flashjit::PartialState view(const flashjit_partial_state& c) {
  return {view(c.out), c.lse, strides(c.lse_stride)};
}

flashjit::ListArgs list_args(const flashjit_list_args& c, Captures& room) {
  return {.memory = {c.memory, c.memory_bytes},
          .kv_lengths = c.kv_lengths,
          .block_map = {c.block_map.data, std::to_array(c.block_map.size)},
          .captures = captures(c, room),
          .cu_seqlens_q = c.cu_seqlens_q,
          .cu_seqlens_kv = c.cu_seqlens_kv};
}

flashjit::ForwardArgs forward_args(const flashjit_forward_args& c, Captures& room) {
  flashjit::ForwardArgs args{
      .q = view(c.q), .k = view(c.k), .v = view(c.v), .out = view(c.out), .lse = c.lse};
  args.lse_strides = strides(c.lse_stride);
  set_common(args, c, room);
  args.page_table = view(c.page_table);
  args.row_max = c.row_max;
  args.k_scale = view(c.k_scale);
  args.v_scale = view(c.v_scale);
  args.q_scale = view(c.q_scale);
  args.prefix_length = c.prefix_length;
  args.partial.state = view(c.state);
  return args;
}

flashjit::BackwardArgs backward_args(const flashjit_backward_args& c, Captures& room) {
  flashjit::BackwardArgs args{.q = view(c.q),
                              .k = view(c.k),
                              .v = view(c.v),
                              .out = view(c.out),
                              .lse = c.lse,
                              .lse_strides = strides(c.lse_stride),
                              .dout = view(c.dout),
                              .dq = view(c.dq),
                              .dk = view(c.dk),
                              .dv = view(c.dv)};
  set_common(args, c, room);
  args.dsinks = c.dsinks;
  args.dlse = c.dlse;
  return args;
}

flashjit::JvpArgs jvp_args(const flashjit_jvp_args* given, Captures& room) {
  const auto c = flashjit::read_struct("flashjit_jvp_args", given);
  required(c.forward, "forward", "give the arguments of O");
  flashjit::JvpArgs args;
  static_cast<flashjit::ForwardArgs&>(args) =
      forward_args(flashjit::read_struct("flashjit_forward_args", c.forward), room);
  args.q_tangent = view(c.q_tangent);
  args.k_tangent = view(c.k_tangent);
  args.v_tangent = view(c.v_tangent);
  args.out_tangent = view(c.out_tangent);
  args.lse_tangent = c.lse_tangent;
  args.sinks_tangent = c.sinks_tangent;
  return args;
}

/// The type of a call's tensors; nothing where the caller leaves it untold.
std::optional<flashjit::DType> dtype(const char* name, flashjit_element_type type) {
  if (type == FLASHJIT_ELEMENT_UNTOLD) return {};
  for (const flashjit::DTypeInfo& info : flashjit::dtypes())
    if (info.element && type == 1 + static_cast<int>(*info.element)) return info.dtype;
  throw Error(ErrorCode::invalid_argument,
              fmt::format("{} is {}: give FLASHJIT_ELEMENT_FP32 (1), FLASHJIT_ELEMENT_FP16 (2), "
                          "FLASHJIT_ELEMENT_BF16 (3), or FLASHJIT_ELEMENT_UNTOLD (0) for the default.",
                          name, type));
}

flashjit::RopeView view(const flashjit_rope& rope) {
  return {.cos = rope.cos,
          .sin = rope.sin,
          .table_rows = rope.table_rows,
          .stride = rope.stride,
          .type = dtype("rope.type", rope.type).value_or(flashjit::DType::fp32),
          .theta = rope.theta,
          .dims = rope.dims,
          .interleaved = rope.interleaved != 0,
          .positions = rope.positions,
          .sections = {rope.sections[0], rope.sections[1], rope.sections[2]},
          .interleaved_sections = rope.interleaved_sections != 0};
}

flashjit::NormView view(const char* name, const flashjit_norm& norm) {
  flashjit::NormView view{norm.weight, dtype(name, norm.type).value_or(flashjit::DType::fp32)};
  if (norm.eps != 0) view.eps = norm.eps;
  return view;
}

flashjit::ElementType slots_type(flashjit_element_type type) {
  switch (type) {
    case FLASHJIT_ELEMENT_UNTOLD:
    case FLASHJIT_ELEMENT_INT64:
      return flashjit::ElementType::int64;
    case FLASHJIT_ELEMENT_INT32:
      return flashjit::ElementType::int32;
    default:
      throw Error(
          ErrorCode::invalid_argument,
          fmt::format("slots_type is {}: give FLASHJIT_ELEMENT_INT64, which 0 is too, or _INT32.", type));
  }
}

flashjit::AppendArgs append_args(const flashjit_append_args* given) {
  const auto c = flashjit::read_struct("flashjit_append_args", given);
  return {.k = view(c.k),
          .v = view(c.v),
          .k_cache = view(c.k_cache),
          .v_cache = view(c.v_cache),
          .kv_lengths = c.kv_lengths,
          .page_table = view(c.page_table),
          .q = view(c.q),
          .q_out = view(c.q_out),
          .rope = view(c.rope),
          .cu_seqlens_q = c.cu_seqlens_q,
          .batch_size = c.batch_size,
          .max_seqlen_kv = c.max_seqlen_kv,
          .k_scale = view(c.k_scale),
          .v_scale = view(c.v_scale),
          .slots = {c.slots, slots_type(c.slots_type)},
          .k_norm = view("k_norm.type", c.k_norm),
          .q_norm = view("q_norm.type", c.q_norm)};
}

/// Room for the states of a call, whose span the arguments hold.
using States = std::array<flashjit::PartialState, flashjit::kMaxPartialStates>;

flashjit::MergeArgs merge_args(const flashjit_merge_args* given, States& room) {
  const auto c = flashjit::read_struct("flashjit_merge_args", given);
  if (c.state_count == 0 || c.state_count > room.size())
    throw Error(ErrorCode::invalid_argument,
                fmt::format("state_count is {}: give 1 to {}, or merge the result with the rest.",
                            c.state_count, room.size()));
  required(c.states, "states", "give state_count of them");
  for (std::size_t i = 0; i < c.state_count; ++i) room[i] = view(c.states[i]);
  return {.states = {room.data(), c.state_count},
          .out = view(c.out),
          .lse = c.lse,
          .lse_strides = strides(c.lse_stride),
          .states_type = dtype("states_type", c.states_type),
          .out_type = dtype("out_type", c.out_type)};
}

flashjit::QuantizeArgs quantize_args(const flashjit_quantize_args* given) {
  const auto c = flashjit::read_struct("flashjit_quantize_args", given);
  return {.x = view(c.x),
          .codes = view(c.codes),
          .scale = view(c.scale),
          .hadamard = c.hadamard != 0,
          .rope = view(c.rope)};
}

flashjit::SharedAttention& get(flashjit_shared_attention* shared) {
  return required(shared, "shared", "make one with flashjit_shared_create()").shared;
}

/// Of a pass that a shared sequence has.
flashjit::Pass shared_pass(flashjit_pass pass) {
  if (pass == FLASHJIT_FORWARD || pass == FLASHJIT_BACKWARD) return static_cast<flashjit::Pass>(pass);
  throw Error(ErrorCode::invalid_argument,
              fmt::format("pass is {}: give FLASHJIT_FORWARD (0) or FLASHJIT_BACKWARD (1).", pass));
}

flashjit::SharedSequence shared_sequence(const flashjit_spec* spec, const flashjit_shared_sequence* given) {
  const auto c = flashjit::read_struct("flashjit_shared_sequence", given);
  if (c.scheme < FLASHJIT_RING || c.scheme > FLASHJIT_ULYSSES)
    throw Error(ErrorCode::invalid_argument,
                fmt::format("scheme is {}: give FLASHJIT_RING (0), FLASHJIT_ALL_GATHER (1) or "
                            "FLASHJIT_ULYSSES (2).",
                            c.scheme));
  if (c.layout != FLASHJIT_ZIGZAG && c.layout != FLASHJIT_CONTIGUOUS)
    throw Error(ErrorCode::invalid_argument,
                fmt::format("layout is {}: give FLASHJIT_ZIGZAG (0) or FLASHJIT_CONTIGUOUS (1).", c.layout));
  flashjit::SharedSequence sequence{.spec = get(spec),
                                    .batch = c.batch,
                                    .heads_q = c.heads_q,
                                    .heads_kv = c.heads_kv,
                                    .rows = c.rows,
                                    .scheme = static_cast<flashjit::SharingScheme>(c.scheme),
                                    .layout = c.layout == FLASHJIT_ZIGZAG ? flashjit::ShardLayout::zigzag
                                                                          : flashjit::ShardLayout::contiguous,
                                    .window = c.window,
                                    .reserved_sms = c.reserved_sms,
                                    .heads_communicator = c.heads_communicator};
  if (!c.documents && c.document_count > 0)
    throw Error(
        ErrorCode::invalid_argument,
        fmt::format("documents is null, but document_count is {}: give document_count + 1 numbers, or 0 "
                    "for none.",
                    c.document_count));
  if (c.documents) sequence.documents.assign(c.documents, c.documents + c.document_count + 1);
  return sequence;
}

/// What the arguments of both passes have alike.
template <class Args, class CArgs>
Args shared_args(const CArgs& c, Captures& room) {
  Args args{.q = c.q, .k = c.k, .v = c.v, .out = c.out, .lse = c.lse};
  args.softmax_scale = optional(c.softmax_scale);
  args.workspace = {c.workspace, c.workspace_bytes};
  args.dropout_p = c.dropout_p;
  args.seed = c.seed;
  args.offset = c.offset;
  args.captures = captures(c, room);
  args.sinks = c.sinks;
  return args;
}

std::optional<flashjit::JitMode> jit_mode(flashjit_jit jit) {
  switch (jit) {
    case FLASHJIT_JIT_DEFAULT:
      return std::nullopt;
    case FLASHJIT_JIT_ON:
      return flashjit::JitMode::on;
    case FLASHJIT_JIT_OFF:
      return flashjit::JitMode::off;
  }
  throw Error(
      ErrorCode::invalid_argument,
      fmt::format("jit is {}: give FLASHJIT_JIT_DEFAULT (0), FLASHJIT_JIT_ON (1) or FLASHJIT_JIT_OFF (2).",
                  jit));
}

std::optional<bool> switched(const char* name, flashjit_switch value) {
  switch (value) {
    case FLASHJIT_SWITCH_DEFAULT:
      return std::nullopt;
    case FLASHJIT_SWITCH_ON:
      return true;
    case FLASHJIT_SWITCH_OFF:
      return false;
  }
  throw Error(
      ErrorCode::invalid_argument,
      fmt::format("{} is {}: give FLASHJIT_SWITCH_DEFAULT (0), FLASHJIT_SWITCH_ON (1) or FLASHJIT_SWITCH_OFF "
                  "(2).",
                  name, value));
}

flashjit::RuntimeOptions runtime_options(const flashjit_options* given) {
  flashjit::RuntimeOptions options;
  if (!given) return options;
  const auto c = flashjit::read_struct("flashjit_options", given);
  if (c.cache_dir) options.cache_dir = c.cache_dir;
  if (c.pack_count > 0) required(c.packs, "packs", "give pack_count paths");
  for (std::size_t i = 0; i < c.pack_count; ++i)
    options.packs.emplace_back(&required(c.packs[i], "a path in packs", "give a folder"));
  options.jit = jit_mode(c.jit);
  if (c.template_dir) options.template_dir = c.template_dir;
  if (c.nvrtc) options.nvrtc = c.nvrtc;
  if (c.cache_limit != 0) options.cache_limit = c.cache_limit;
  options.tune_in_background = switched("tune_in_background", c.tune_in_background);
  options.compile_in_background = switched("compile_in_background", c.compile_in_background);
  if (c.log)
    options.log = [log = c.log, user = c.log_user](std::string_view line) {
      log(user, std::string(line).c_str());
    };
  return options;
}

template <ErrorCode code, flashjit_status status>
constexpr bool kSame = static_cast<flashjit_status>(code) == status;
static_assert(kSame<ErrorCode::invalid_argument, FLASHJIT_INVALID_ARGUMENT> &&
              kSame<ErrorCode::unsupported, FLASHJIT_UNSUPPORTED> &&
              kSame<ErrorCode::no_driver, FLASHJIT_NO_DRIVER> &&
              kSame<ErrorCode::no_device, FLASHJIT_NO_DEVICE> &&
              kSame<ErrorCode::no_compiler, FLASHJIT_NO_COMPILER> &&
              kSame<ErrorCode::compile_failed, FLASHJIT_COMPILE_FAILED> &&
              kSame<ErrorCode::kernel_missing, FLASHJIT_KERNEL_MISSING> &&
              kSame<ErrorCode::io, FLASHJIT_IO> && kSame<ErrorCode::cuda, FLASHJIT_CUDA> &&
              kSame<ErrorCode::internal, FLASHJIT_INTERNAL>);

}  // namespace

extern "C" {

const char* flashjit_version(void) noexcept { return FLASHJIT_VERSION; }

const char* flashjit_status_name(flashjit_status status) noexcept {
  switch (status) {
    case FLASHJIT_OK:
      return "ok";
    case FLASHJIT_INVALID_ARGUMENT:
      return "invalid_argument";
    case FLASHJIT_UNSUPPORTED:
      return "unsupported";
    case FLASHJIT_NO_DRIVER:
      return "no_driver";
    case FLASHJIT_NO_DEVICE:
      return "no_device";
    case FLASHJIT_NO_COMPILER:
      return "no_compiler";
    case FLASHJIT_COMPILE_FAILED:
      return "compile_failed";
    case FLASHJIT_KERNEL_MISSING:
      return "kernel_missing";
    case FLASHJIT_IO:
      return "io";
    case FLASHJIT_CUDA:
      return "cuda";
    case FLASHJIT_INTERNAL:
      return "internal";
    default:
      return "unknown";
  }
}

int32_t flashjit_spec_option(size_t index, const char** option, const char** argument) noexcept {
  if (index >= flashjit::plan::kSpecOptions.size()) return 0;
  // Texts of the program, which end with 0.
  if (option) *option = flashjit::plan::kSpecOptions[index].text.data();
  if (argument) *argument = flashjit::plan::kSpecOptions[index].argument.data();
  return 1;
}

flashjit_status flashjit_kv_row(const char* format, int32_t head_dim, int64_t* bytes, int32_t* alignment,
                                int32_t* has_scale) noexcept {
  return guarded([&] {
    const flashjit::KvFormat parsed =
        flashjit::parse_kv_format(&required(format, "format", "give a KV format such as \"nvfp4\""));
    if (has_scale) *has_scale = parsed.has_argument();
    if (head_dim == 0) return;
    if (head_dim < 0 || head_dim > flashjit::plan::kMaxHeadDim)
      flashjit::refuse("head_dim is {}; give 1 to {}, or 0 to check the format alone.", head_dim,
                       flashjit::plan::kMaxHeadDim);
    parsed.validate_row(head_dim);
    const flashjit::KvRow row = parsed.row(head_dim);
    if (bytes) *bytes = row.bytes;
    if (alignment) *alignment = row.alignment;
  });
}

int32_t flashjit_kv_format_name(size_t index, const char** name, const char** parts) noexcept {
  const auto& named = flashjit::named_kv_formats();
  if (index >= named.size()) return 0;
  // Texts of the program, which end with 0.
  if (name) *name = named[index].name.data();
  if (parts) *parts = named[index].parts.data();
  return 1;
}

const char* flashjit_last_error_message(void) noexcept {
  const LastError* last = last_error();
  return last ? last->message.c_str() : "";
}
const char* flashjit_last_error_detail(void) noexcept {
  const LastError* last = last_error();
  return last ? last->detail.c_str() : "";
}

flashjit_status flashjit_runtime_create(const flashjit_options* options,
                                        flashjit_runtime** runtime) noexcept {
  return guarded([&] {
    flashjit_runtime*& created = required(runtime, "runtime", "give the address of a flashjit_runtime*");
    created = nullptr;
    created = new flashjit_runtime{flashjit::Runtime(runtime_options(options))};
  });
}

void flashjit_runtime_destroy(flashjit_runtime* runtime) noexcept { delete runtime; }

flashjit_status flashjit_stop_tuning(flashjit_runtime* runtime) noexcept {
  return guarded([&] { get(runtime).stop_tuning(); });
}

flashjit_status flashjit_spec_create(const char* text, flashjit_spec** spec) noexcept {
  return guarded([&] {
    flashjit_spec*& created = required(spec, "spec", "give the address of a flashjit_spec*");
    created = nullptr;
    created = new flashjit_spec{
        flashjit::parse_spec(&required(text, "text", "give a spec such as \"bf16:d128:causal\""))};
  });
}

void flashjit_spec_destroy(flashjit_spec* spec) noexcept { delete spec; }

flashjit_status flashjit_forward(flashjit_runtime* runtime, const flashjit_spec* spec,
                                 const flashjit_forward_args* args, CUstream_st* stream) noexcept {
  return guarded([&] {
    Captures room;
    get(runtime).forward(get(spec), forward_args(flashjit::read_struct("flashjit_forward_args", args), room),
                         stream);
  });
}

flashjit_status flashjit_backward(flashjit_runtime* runtime, const flashjit_spec* spec,
                                  const flashjit_backward_args* args, CUstream_st* stream) noexcept {
  return guarded([&] {
    Captures room;
    get(runtime).backward(get(spec),
                          backward_args(flashjit::read_struct("flashjit_backward_args", args), room), stream);
  });
}

flashjit_status flashjit_jvp(flashjit_runtime* runtime, const flashjit_spec* spec,
                             const flashjit_jvp_args* args, CUstream_st* stream) noexcept {
  return guarded([&] {
    Captures room;
    get(runtime).jvp(get(spec), jvp_args(args, room), stream);
  });
}

flashjit_status flashjit_append(flashjit_runtime* runtime, const flashjit_spec* spec,
                                const flashjit_append_args* args, CUstream_st* stream) noexcept {
  return guarded([&] { get(runtime).append(get(spec), append_args(args), stream); });
}

flashjit_status flashjit_merge(flashjit_runtime* runtime, const flashjit_spec* spec,
                               const flashjit_merge_args* args, CUstream_st* stream) noexcept {
  return guarded([&] {
    States room;
    get(runtime).merge(get(spec), merge_args(args, room), stream);
  });
}

flashjit_status flashjit_quantize(flashjit_runtime* runtime, const flashjit_spec* spec,
                                  const flashjit_quantize_args* args, CUstream_st* stream) noexcept {
  return guarded([&] { get(runtime).quantize(get(spec), quantize_args(args), stream); });
}

flashjit_status flashjit_prepare(flashjit_runtime* runtime, flashjit_pass pass, const flashjit_spec* spec,
                                 const flashjit_shape* shape, const char* config) noexcept {
  return guarded([&] {
    const auto given = config ? std::optional(flashjit::parse_config(config)) : std::nullopt;
    get(runtime).prepare(get(spec, pass), get(shape), given);
  });
}

flashjit_status flashjit_prepare_both(flashjit_runtime* runtime, const flashjit_spec* spec,
                                      const flashjit_shape* shape) noexcept {
  return guarded([&] { get(runtime).prepare_both(get(spec), get(shape)); });
}

flashjit_status flashjit_workspace_bytes(flashjit_runtime* runtime, flashjit_pass pass,
                                         const flashjit_spec* spec, const flashjit_shape* shape,
                                         size_t* bytes) noexcept {
  return guarded([&] {
    size_t& needed = required(bytes, "bytes", "give the address of a size_t");
    needed = get(runtime).workspace_bytes(get(spec, pass), get(shape));
  });
}

flashjit_status flashjit_list_bytes(flashjit_runtime* runtime, flashjit_pass pass, const flashjit_spec* spec,
                                    const flashjit_shape* shape, size_t* bytes) noexcept {
  return guarded([&] {
    size_t& needed = required(bytes, "bytes", "give the address of a size_t");
    needed = get(runtime).list_bytes(get(spec, pass), get(shape));
  });
}

flashjit_status flashjit_build_lists(flashjit_runtime* runtime, flashjit_pass pass, const flashjit_spec* spec,
                                     const flashjit_shape* shape, const flashjit_list_args* args,
                                     CUstream_st* stream, flashjit_tile_lists** lists) noexcept {
  return guarded([&] {
    flashjit_tile_lists*& made = required(lists, "lists", "give the address of a flashjit_tile_lists*");
    made = nullptr;
    const auto known = flashjit::read_struct("flashjit_list_args", args);
    Captures room;
    made = new flashjit_tile_lists{
        get(runtime).build_lists(get(spec, pass), get(shape), list_args(known, room), stream)};
  });
}

void flashjit_tile_lists_destroy(flashjit_tile_lists* lists) noexcept { delete lists; }

flashjit_status flashjit_supports(flashjit_runtime* runtime, flashjit_pass pass, const flashjit_spec* spec,
                                  const flashjit_shape* shape) noexcept {
  return guarded([&] {
    const flashjit::Support support = get(runtime).supports(get(spec, pass), get(shape));
    if (!support) throw Error(ErrorCode::unsupported, support.reason);
  });
}

flashjit_status flashjit_reference_forward(const flashjit_spec* spec,
                                           const flashjit_forward_args* args) noexcept {
  return guarded([&] {
    Captures room;
    flashjit::reference_forward(get(spec),
                                forward_args(flashjit::read_struct("flashjit_forward_args", args), room));
  });
}

flashjit_status flashjit_reference_backward(const flashjit_spec* spec,
                                            const flashjit_backward_args* args) noexcept {
  return guarded([&] {
    Captures room;
    flashjit::reference_backward(get(spec),
                                 backward_args(flashjit::read_struct("flashjit_backward_args", args), room));
  });
}

flashjit_status flashjit_reference_jvp(const flashjit_spec* spec, const flashjit_jvp_args* args) noexcept {
  return guarded([&] {
    Captures room;
    flashjit::reference_jvp(get(spec), jvp_args(args, room));
  });
}

flashjit_status flashjit_reference_append(const flashjit_spec* spec,
                                          const flashjit_append_args* args) noexcept {
  return guarded([&] { flashjit::reference_append(get(spec), append_args(args)); });
}

flashjit_status flashjit_reference_merge(const flashjit_spec* spec,
                                         const flashjit_merge_args* args) noexcept {
  return guarded([&] {
    States room;
    flashjit::reference_merge(get(spec), merge_args(args, room));
  });
}

flashjit_status flashjit_reference_quantize(const flashjit_spec* spec,
                                            const flashjit_quantize_args* args) noexcept {
  return guarded([&] { flashjit::reference_quantize(get(spec), quantize_args(args)); });
}

flashjit_status flashjit_shared_create(flashjit_runtime* runtime, const flashjit_spec* spec,
                                       const flashjit_shared_sequence* sequence, void* communicator,
                                       const char* nccl, flashjit_shared_attention** shared) noexcept {
  return guarded([&] {
    flashjit_shared_attention*& created =
        required(shared, "shared", "give the address of a flashjit_shared_attention*");
    created = nullptr;
    created = new flashjit_shared_attention{flashjit::SharedAttention(
        get(runtime), shared_sequence(spec, sequence), communicator, nccl ? nccl : "")};
  });
}

void flashjit_shared_destroy(flashjit_shared_attention* shared) noexcept { delete shared; }

flashjit_status flashjit_shared_workspace_bytes(flashjit_shared_attention* shared, flashjit_pass pass,
                                                size_t* bytes) noexcept {
  return guarded([&] {
    size_t& needed = required(bytes, "bytes", "give the address of a size_t");
    needed = get(shared).workspace_bytes(shared_pass(pass));
  });
}

flashjit_status flashjit_shared_prepare(flashjit_shared_attention* shared, flashjit_pass pass,
                                        void* workspace, size_t workspace_bytes,
                                        CUstream_st* stream) noexcept {
  return guarded([&] { get(shared).prepare(shared_pass(pass), {workspace, workspace_bytes}, stream); });
}

flashjit_status flashjit_shared_forward(flashjit_shared_attention* shared,
                                        const flashjit_shared_forward_args* args, CUstream_st* stream,
                                        CUstream_st* copies) noexcept {
  return guarded([&] {
    const auto c = flashjit::read_struct("flashjit_shared_forward_args", args);
    Captures room;
    get(shared).forward(shared_args<flashjit::SharedForwardArgs>(c, room), stream, copies);
  });
}

flashjit_status flashjit_shared_backward(flashjit_shared_attention* shared,
                                         const flashjit_shared_backward_args* args, CUstream_st* stream,
                                         CUstream_st* copies) noexcept {
  return guarded([&] {
    const auto c = flashjit::read_struct("flashjit_shared_backward_args", args);
    Captures room;
    auto read = shared_args<flashjit::SharedBackwardArgs>(c, room);
    read.dout = c.dout;
    read.dq = c.dq;
    read.dk = c.dk;
    read.dv = c.dv;
    read.dlse = c.dlse;
    read.dsinks = c.dsinks;
    get(shared).backward(read, stream, copies);
  });
}

}  // extern "C"
