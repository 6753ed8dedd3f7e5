#include "api/c_arguments.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>

#include "api/read_struct.hpp"
#include "support/dtypes.hpp"

namespace flashjit::c_api {
namespace {

TensorView view(const flashjit_tensor& tensor) {
  return {tensor.data, std::to_array(tensor.size), std::to_array(tensor.stride)};
}

PageTableView view(const flashjit_page_table& table) {
  return {table.data, table.sequences, table.columns, table.stride, table.starts};
}

ScaleView view(const flashjit_scales& scales) {
  if (!scales.data) return {};
  ScaleView out{scales.data, std::to_array(scales.size), std::to_array(scales.stride)};
  std::ranges::replace(out.size, 0, 1);  // as zeros are defaults
  return out;
}

IndicesView view(const flashjit_indices& indices) {
  return {indices.data, std::to_array(indices.size), std::to_array(indices.stride), indices.topk_length,
          std::to_array(indices.topk_length_stride)};
}

DropoutPlace view(const flashjit_dropout_place& place) {
  return {.batch = place.batch,
          .head = place.head,
          .heads = place.heads,
          .q = place.q,
          .kv = place.kv,
          .q_step = place.q_step ? place.q_step : 1,
          .kv_step = place.kv_step ? place.kv_step : 1};
}

/// What both structs of arguments have besides their tensors.
template <class Args, class CArgs>
void set_common(Args& args, const CArgs& c, Captures& room) {
  set_alike(args, c, room);
  args.kv_lengths = c.kv_lengths;
  args.block_map = {c.block_map.data, std::to_array(c.block_map.size)};
  args.cu_seqlens_q = c.cu_seqlens_q;
  args.cu_seqlens_kv = c.cu_seqlens_kv;
  args.batch_size = c.batch_size;
  args.max_seqlen_q = c.max_seqlen_q;
  args.max_seqlen_kv = c.max_seqlen_kv;
  args.lists = c.lists ? &c.lists->lists : nullptr;
  args.rng_state = c.rng_state;
  args.indices = view(c.indices);
  args.partial.dropout_place = view(c.dropout_place);
  args.partial.reserved_sms = c.reserved_sms;
  args.zero_unused_rows = c.zero_unused_rows != 0;
}

RowStrides strides(const std::int64_t (&c)[3]) { return {c[0], c[1], c[2]}; }

PartialState view(const flashjit_partial_state& c) { return {view(c.out), c.lse, strides(c.lse_stride)}; }

/// The type of a call's tensors; nothing where the caller leaves it untold.
std::optional<DType> dtype(const char* name, flashjit_element_type type) {
  if (type == FLASHJIT_ELEMENT_UNTOLD) return {};
  for (const DTypeInfo& info : dtypes())
    if (info.element && type == 1 + static_cast<int>(*info.element)) return info.dtype;
  throw Error(ErrorCode::invalid_argument,
              fmt::format("{} is {}: give FLASHJIT_ELEMENT_FP32 (1), FLASHJIT_ELEMENT_FP16 (2), "
                          "FLASHJIT_ELEMENT_BF16 (3), or FLASHJIT_ELEMENT_UNTOLD (0) for the default.",
                          name, type));
}

RopeView view(const flashjit_rope& rope) {
  return {.cos = rope.cos,
          .sin = rope.sin,
          .table_rows = rope.table_rows,
          .stride = rope.stride,
          .type = dtype("rope.type", rope.type).value_or(DType::fp32),
          .theta = rope.theta,
          .dims = rope.dims,
          .interleaved = rope.interleaved != 0,
          .positions = rope.positions,
          .sections = {rope.sections[0], rope.sections[1], rope.sections[2]},
          .interleaved_sections = rope.interleaved_sections != 0};
}

NormView view(const char* name, const flashjit_norm& norm) {
  NormView view{norm.weight, dtype(name, norm.type).value_or(DType::fp32)};
  if (norm.eps != 0) view.eps = norm.eps;
  return view;
}

ElementType slots_type(flashjit_element_type type) {
  switch (type) {
    case FLASHJIT_ELEMENT_UNTOLD:
    case FLASHJIT_ELEMENT_INT64:
      return ElementType::int64;
    case FLASHJIT_ELEMENT_INT32:
      return ElementType::int32;
    default:
      throw Error(
          ErrorCode::invalid_argument,
          fmt::format("slots_type is {}: give FLASHJIT_ELEMENT_INT64, which 0 is too, or _INT32.", type));
  }
}

constexpr std::size_t word(std::size_t offset) { return offset / sizeof(std::uint64_t); }
template <class T>
constexpr std::size_t kWordsOf = word(sizeof(T));

/// Letters of the longest name of a capture that is remembered.
constexpr std::size_t kMostLetters = 64;

/// A number on the host, or none.
std::uint64_t bits(const float* value) {
  return value ? std::uint64_t{1} << 32 | std::bit_cast<std::uint32_t>(*value) : 0;
}

/// The first word of the struct.
template <class T>
std::size_t add_struct(CallWords& call, const T& c) {
  static_assert(sizeof c % sizeof(std::uint64_t) == 0);
  std::memcpy(&call.words[call.count], &c, sizeof c);
  call.count += kWordsOf<T>;
  return call.count - kWordsOf<T>;
}

/// A captured value, with its name's letters. False where there is no room.
bool add_capture(CallWords& call, const flashjit_capture& c) {
  const std::size_t letters = c.name ? std::strlen(c.name) : 0, words = word(letters + 7);
  if (letters > kMostLetters || call.count + kWordsOf<flashjit_capture> + words > CallWords::kMostWords)
    return false;
  const std::size_t first = add_struct(call, c);
  call.words[first + word(offsetof(flashjit_capture, name))] = letters;
  call.take_address(first + word(offsetof(flashjit_capture, data)));
  call.take_address(first + word(offsetof(flashjit_capture, grad)));
  if (words == 0) return true;
  call.words[call.count + words - 1] = 0;
  std::memcpy(&call.words[call.count], c.name, letters);
  call.count += words;
  return true;
}

/// What a pass's checks and launches depend on beside words of its struct. False: it is not remembered.
bool add_others(CallWords& call, const flashjit_forward_args& c) {
  call.add(bits(c.skip_softmax_threshold));
  call.add(c.state.out.data == c.out.data);
  return !c.out_block_scale.data;
}
bool add_others(CallWords&, const flashjit_backward_args&) { return true; }

/// Words that are addresses on the host. The call's words hold the values there, too.
constexpr std::array kHostWordsOfForward = {word(offsetof(flashjit_forward_args, softmax_scale)),
                                            word(offsetof(flashjit_forward_args, captures)),
                                            word(offsetof(flashjit_forward_args, skip_softmax_threshold))};
constexpr std::array kHostWordsOfBackward = {word(offsetof(flashjit_backward_args, softmax_scale)),
                                             word(offsetof(flashjit_backward_args, captures))};

std::span<const std::size_t> host_words(const flashjit_forward_args&) { return kHostWordsOfForward; }
std::span<const std::size_t> host_words(const flashjit_backward_args&) { return kHostWordsOfBackward; }

std::span<const std::size_t> places_of_memory(const flashjit_forward_args&) { return kMemoryOfForward; }
std::span<const std::size_t> places_of_memory(const flashjit_backward_args&) { return kMemoryOfBackward; }

}  // namespace

template <class CArgs>
bool add_words(CallWords& call, const flashjit_spec& spec, const CArgs& c) {
  static_assert(kWordsOf<CArgs> + 5 <= CallWords::kMostWords);
  if (c.lists || c.capture_count > FLASHJIT_MAX_CAPTURES || (c.capture_count > 0 && !c.captures))
    return false;
  call.add(spec.id);
  call.add(bits(c.softmax_scale));
  call.add(c.k.data == c.v.data);
  if (!add_others(call, c)) return false;
  const std::size_t first = add_struct(call, c);
  for (const std::size_t offset : places_of_memory(c)) call.take_address(first + word(offset));
  for (const std::size_t at : host_words(c)) call.words[first + at] = 0;
  for (std::size_t i = 0; i < c.capture_count; ++i)
    if (!add_capture(call, c.captures[i])) return false;
  return true;
}
template bool add_words(CallWords&, const flashjit_spec&, const flashjit_forward_args&);
template bool add_words(CallWords&, const flashjit_spec&, const flashjit_backward_args&);

template <class CArgs>
CArgs with_moved_addresses(CArgs c, MovedCaptures& room) {
  std::size_t addresses = 0;
  const auto move = [&](void* place) {
    std::uint64_t address = 0;
    std::memcpy(&address, place, sizeof address);
    if (address != 0) address += distance_of_address(addresses);
    std::memcpy(place, &address, sizeof address);
    ++addresses;
  };
  for (const std::size_t offset : places_of_memory(c)) move(reinterpret_cast<char*>(&c) + offset);
  std::copy_n(c.captures, c.capture_count, room.begin());
  for (flashjit_capture& capture : std::span(room).first(c.capture_count))
    move(static_cast<void*>(&capture.data)), move(static_cast<void*>(&capture.grad));
  c.captures = room.data();
  return c;
}
template flashjit_forward_args with_moved_addresses(flashjit_forward_args, MovedCaptures&);
template flashjit_backward_args with_moved_addresses(flashjit_backward_args, MovedCaptures&);

static_assert(FLASHJIT_MAX_CAPTURES == kMaxCaptures + kMaxScalars);
static_assert(FLASHJIT_ELEMENT_BOOL == 1 + static_cast<int>(ElementType::boolean));

Capture capture(const flashjit_capture& c) {
  if (c.type < FLASHJIT_ELEMENT_UNTOLD || c.type > FLASHJIT_ELEMENT_BOOL)
    throw Error(ErrorCode::invalid_argument,
                fmt::format("the type of the capture {} is {}: give FLASHJIT_ELEMENT_UNTOLD (0) to "
                            "FLASHJIT_ELEMENT_BOOL (9).",
                            c.name, c.type));
  Capture made{.name = c.name,
               .data = c.data,
               .grad = c.grad,
               .rank = c.rank,
               .size = std::to_array(c.size),
               .stride = std::to_array(c.stride),
               .scalar = c.scalar};
  if (c.type != FLASHJIT_ELEMENT_UNTOLD) made.type = static_cast<ElementType>(c.type - 1);
  return made;
}

ListArgs list_args(const flashjit_list_args& c, Captures& room) {
  return {.memory = {c.memory, c.memory_bytes},
          .kv_lengths = c.kv_lengths,
          .block_map = {c.block_map.data, std::to_array(c.block_map.size)},
          .captures = captures(c, room),
          .cu_seqlens_q = c.cu_seqlens_q,
          .cu_seqlens_kv = c.cu_seqlens_kv};
}

ForwardArgs forward_args(const flashjit_forward_args& c, Captures& room) {
  ForwardArgs args{.q = view(c.q), .k = view(c.k), .v = view(c.v), .out = view(c.out), .lse = c.lse};
  args.lse_strides = strides(c.lse_stride);
  set_common(args, c, room);
  args.page_table = view(c.page_table);
  args.row_max = c.row_max;
  args.k_scale = view(c.k_scale);
  args.v_scale = view(c.v_scale);
  args.q_scale = view(c.q_scale);
  args.prefix_length = c.prefix_length;
  args.partial.state = view(c.state);
  args.out_before_mod = view(c.out_before_mod);
  args.k_block_scale = view(c.k_block_scale);
  args.v_block_scale = view(c.v_block_scale);
  if (c.skip_softmax_threshold) args.skip_softmax_threshold = *c.skip_softmax_threshold;
  args.skip_softmax_counts = c.skip_softmax_counts;
  args.q_rope = view(c.q_rope);
  args.out_scale = c.out_scale;
  args.out_block_scale = view(c.out_block_scale);
  return args;
}

BackwardArgs backward_args(const flashjit_backward_args& c, Captures& room) {
  BackwardArgs args{.q = view(c.q),
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

JvpArgs jvp_args(const flashjit_jvp_args* given, Captures& room) {
  const auto c = read_struct("flashjit_jvp_args", given);
  required(c.forward, "forward", "give the arguments of O");
  JvpArgs args;
  static_cast<ForwardArgs&>(args) = forward_args(read_struct("flashjit_forward_args", c.forward), room);
  args.q_tangent = view(c.q_tangent);
  args.k_tangent = view(c.k_tangent);
  args.v_tangent = view(c.v_tangent);
  args.out_tangent = view(c.out_tangent);
  args.lse_tangent = c.lse_tangent;
  args.sinks_tangent = c.sinks_tangent;
  return args;
}

BackwardJvpArgs backward_jvp_args(const flashjit_backward_jvp_args* given, Captures& room) {
  const auto c = read_struct("flashjit_backward_jvp_args", given);
  required(c.backward, "backward", "give the arguments of the backward pass");
  BackwardJvpArgs args;
  static_cast<BackwardArgs&>(args) = backward_args(read_struct("flashjit_backward_args", c.backward), room);
  args.q_tangent = view(c.q_tangent);
  args.k_tangent = view(c.k_tangent);
  args.v_tangent = view(c.v_tangent);
  args.dout_tangent = view(c.dout_tangent);
  args.dlse_tangent = c.dlse_tangent;
  args.sinks_tangent = c.sinks_tangent;
  if (c.capture_tangents) args.capture_tangents = {c.capture_tangents, args.captures.size()};
  return args;
}

AppendArgs append_args(const flashjit_append_args* given) {
  const auto c = read_struct("flashjit_append_args", given);
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
          .k_block_scale = view(c.k_block_scale),
          .v_block_scale = view(c.v_block_scale),
          .slots = {c.slots, slots_type(c.slots_type)},
          .k_norm = view("k_norm.type", c.k_norm),
          .q_norm = view("q_norm.type", c.q_norm)};
}

MergeArgs merge_args(const flashjit_merge_args* given, States& room) {
  const auto c = read_struct("flashjit_merge_args", given);
  if (c.state_count == 0 || c.state_count > room.size())
    throw Error(ErrorCode::invalid_argument,
                fmt::format("state_count is {}: give 1 to {}; flashjit_merge() joins more in several calls.",
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

OverArgs over_args(const flashjit_over_args* given, Caches& room) {
  const auto c = read_struct("flashjit_over_args", given);
  if (c.cache_count == 0 || c.cache_count > kMaxCaches)
    throw Error(ErrorCode::invalid_argument,
                fmt::format("cache_count is {}: give 1 to {}.", c.cache_count, kMaxCaches));
  required(c.caches, "caches", "give cache_count of them");
  for (std::size_t i = 0; i < c.cache_count; ++i) {
    const auto args = read_struct("flashjit_forward_args", c.caches[i].args);
    room.of_call[i] = {get(c.caches[i].spec), forward_args(args, room.captures[i])};
  }
  return {.caches = {room.of_call.data(), c.cache_count},
          .out = view(c.out),
          .lse = c.lse,
          .lse_strides = strides(c.lse_stride),
          .workspace = {c.workspace, c.workspace_bytes}};
}

QuantizeArgs quantize_args(const flashjit_quantize_args* given) {
  const auto c = read_struct("flashjit_quantize_args", given);
  return {.x = view(c.x),
          .codes = view(c.codes),
          .scale = view(c.scale),
          .hadamard = c.hadamard != 0,
          .rope = view(c.rope),
          .block_scale = view(c.block_scale)};
}

}  // namespace flashjit::c_api
