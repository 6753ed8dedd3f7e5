#include "call/arguments.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "call/apart.hpp"
#include "call/block_scales.hpp"
#include "call/out_codes.hpp"
#include "call/q_rope.hpp"
#include "call/row_mods.hpp"
#include "call/sink_arguments.hpp"
#include "call/skip_softmax.hpp"
#include "call/tensor_checks.hpp"
#include "plan/workspace.hpp"
#include "support/refuse.hpp"

namespace flashjit {
namespace {

constexpr std::uintptr_t kWorkspaceAlignment = 256;
constexpr std::uintptr_t kRngStateAlignment = 16;

std::int64_t blocks_of(std::int64_t length, int block) { return length / block + (length % block != 0); }

void check_block_map(const AttentionSpec& spec, const AttentionShape& shape, const BlockMapView& map) {
  if (!spec.has_block_map()) {
    if (map.data)
      refuse("block_map is given, but the spec has none: set spec.block_map to the size of its blocks.");
    return;
  }
  const std::int64_t rows = blocks_of(shape.seqlen_q, spec.block_map.q);
  const std::int64_t columns = blocks_of(shape.seqlen_kv, spec.block_map.kv);
  const bool fits = (map.size[0] == 1 || map.size[0] == shape.batch) &&
                    (map.size[1] == 1 || map.size[1] == shape.heads_q) && map.size[2] == rows &&
                    map.size[3] == columns;
  if (!fits)
    refuse("block_map has size [{}, {}, {}, {}], but blocks of {} x {} need [1 or {}, 1 or {}, {}, {}].",
           map.size[0], map.size[1], map.size[2], map.size[3], spec.block_map.q, spec.block_map.kv,
           shape.batch, shape.heads_q, rows, columns);
  const bool empty = map.size[0] == 0 || map.size[1] == 0 || rows == 0 || columns == 0;
  if (!map.data && !empty) refuse("block_map is null, but the spec has one: give device memory.");
}

/// The packed rows of Q or of K, and the arguments about the sequences in them.
struct Packed {
  const char *tensor, *offsets, *longest;  ///< names
  const std::array<std::int64_t, 4>& size;
  const std::int32_t* cu_seqlens;
  std::int64_t max_seqlen;
};

void check_packed(const AttentionSpec& spec, const Packed& packed, std::int64_t batch_size) {
  const std::int64_t rows = packed.size[2];
  if (batch_size < 0 || batch_size > kMaxInt)
    refuse("batch_size is {}: give the number of sequences, 0 to 2^31 - 1.", batch_size);
  if (packed.size[0] != 1)
    refuse("{} has batch {}, but the spec has varlen: pack the sequences into [1, heads, rows, head_dim].",
           packed.tensor, packed.size[0]);
  check_offsets(packed.offsets, spec, {.batch = batch_size}, packed.cu_seqlens);
  if (rows > kMaxInt)
    refuse("{} has {} rows: packed sequences have at most 2^31 - 1 together.", packed.tensor, rows);
  if (packed.max_seqlen < 0 || packed.max_seqlen > kMaxInt)
    refuse("{} is {}: give the length of the longest sequence, 0 to 2^31 - 1.", packed.longest,
           packed.max_seqlen);
  if (packed.max_seqlen == 0 && rows > 0 && batch_size > 0)
    refuse("{} is 0, but {} has {} rows: give the length of the longest sequence.", packed.longest,
           packed.tensor, rows);
}

/// With a cache only the queries may be packed.
template <class Args>
void check_cached_sequences(const AttentionSpec& spec, const Args& args) {
  if (args.cu_seqlens_kv)
    refuse("cu_seqlens_kv is given, but the keys are a cache's: give kv_lengths instead.");
  if (args.max_seqlen_kv < 0 || args.max_seqlen_kv > kMaxInt)
    refuse(
        "max_seqlen_kv is {}: give the most keys that a sequence may have, or 0 for all there is room for.",
        args.max_seqlen_kv);
  if (spec.varlen)
    return check_packed(
        spec, {"q", "cu_seqlens_q", "max_seqlen_q", args.q.size, args.cu_seqlens_q, args.max_seqlen_q},
        args.batch_size);
  if (args.cu_seqlens_q) refuse("cu_seqlens_q is given, but the spec has no varlen: set spec.varlen.");
  if (args.batch_size != 0 || args.max_seqlen_q != 0)
    refuse(
        "batch_size {} and max_seqlen_q {} are given, but the spec has no varlen: set spec.varlen or leave "
        "them 0.",
        args.batch_size, args.max_seqlen_q);
}

template <class Args>
void check_varlen(const AttentionSpec& spec, const Args& args) {
  if (spec.kv.is_cache()) return check_cached_sequences(spec, args);
  if (!spec.varlen) {
    if (args.cu_seqlens_q || args.cu_seqlens_kv)
      refuse("{} is given, but the spec has no varlen: set spec.varlen.",
             args.cu_seqlens_q ? "cu_seqlens_q" : "cu_seqlens_kv");
    if (args.batch_size != 0 || args.max_seqlen_q != 0 || args.max_seqlen_kv != 0)
      refuse(
          "batch_size {}, max_seqlen_q {} and max_seqlen_kv {} are given, but the spec has no varlen: set "
          "spec.varlen or leave them 0.",
          args.batch_size, args.max_seqlen_q, args.max_seqlen_kv);
    return;
  }
  check_packed(spec, {"q", "cu_seqlens_q", "max_seqlen_q", args.q.size, args.cu_seqlens_q, args.max_seqlen_q},
               args.batch_size);
  check_packed(spec,
               {"k", "cu_seqlens_kv", "max_seqlen_kv", args.k.size, args.cu_seqlens_kv, args.max_seqlen_kv},
               args.batch_size);
}

void check_row_max(const AttentionSpec& spec, const ForwardArgs& args) {
  if (!spec.epilogue.row_max && args.row_max)
    refuse("row_max is given, but the spec has none: set spec.epilogue.row_max.");
  if (spec.epilogue.row_max && !args.row_max && memory_of(args.out))
    refuse("row_max is null, but the spec has it: give fp32 [batch, heads_q, seqlen_q] in device memory.");
  check_rows("row_max", args.row_max, args.lse_strides, rows_of(args.q), Access::write);
}

void check_prefix(const AttentionSpec& spec, const AttentionShape& shape, const std::int32_t* length) {
  if (!spec.kv.shared_prefix && length)
    refuse("prefix_length is given, but the spec has no shared_prefix: set spec.kv.shared_prefix.");
  if (spec.kv.shared_prefix && !length && shape.batch > 0)
    refuse("prefix_length is null, but the spec has shared_prefix: give one int32 in device memory.");
  check_pointer("prefix_length", length, alignof(std::int32_t));
}

/// O of the state may be O's memory where each element has its own place.
void check_state(const AttentionSpec& spec, const ForwardArgs& args, const Sizes& sizes) {
  const PartialState& state = args.partial.state;
  if (!spec.partial.running_state) {
    if (state.out.data || state.lse)
      refuse("state is given, but the spec has no running_state: set spec.partial.running_state.");
    return;
  }
  check_tensor("state.out", state.out, sizes, sizeof(float), Access::read);
  if (!state.lse && args.q.size[0] > 0 && args.q.size[1] > 0 && args.q.size[2] > 0)
    refuse("state.lse is null, but the spec has running_state: give the LSE of state.out's keys.");
  check_rows("state.lse", state.lse, args.lse_strides, rows_of(args.q), Access::read);
  if (state.lse_strides != RowStrides{} &&
      row_strides(state.lse_strides, rows_of(args.q)) != row_strides(args.lse_strides, rows_of(args.q)))
    refuse("state.lse has strides [{}, {}, {}] and lse [{}, {}, {}]: they must be equal.",
           state.lse_strides.batch, state.lse_strides.head, state.lse_strides.row, args.lse_strides.batch,
           args.lse_strides.head, args.lse_strides.row);
  if (state.out.data && state.out.data == args.out.data &&
      (spec.out_type() != DType::fp32 || state.out.stride != args.out.stride))
    refuse(
        "state.out is out's memory, but out is {} with strides [{}], and state.out fp32 with strides [{}]: "
        "give one of them memory of its own, or the same strides and a spec with fp32_out.",
        to_string(spec.out_type()), fmt::join(args.out.stride, ", "), fmt::join(state.out.stride, ", "));
}

/// O before the program of it, which the backward pass reads.
void check_out_before_mod(const AttentionSpec& spec, const ForwardArgs& args, const Sizes& sizes) {
  if (!args.out_before_mod.data) return;
  if (spec.epilogue.out_mod.empty())
    refuse(
        "out_before_mod is given, but the spec has no out_mod: set spec.epilogue.out_mod or leave it out.");
  check_tensor("out_before_mod", args.out_before_mod, sizes, size_of(spec.dtype), Access::write);
  check_type("out_before_mod", args.out_before_mod, spec.dtype);
}

/// In 32 bits, as kernels count.
void check_dropout_place(const AttentionSpec& spec, const AttentionShape& shape, const DropoutPlace& place) {
  if (!spec.partial.dropout_place) {
    if (place != DropoutPlace{})
      refuse("dropout_place is given, but the spec has none: set spec.partial.dropout_place.");
    return;
  }
  const auto check = [](const char* name, std::int64_t first, std::int64_t step, std::int64_t count) {
    const bool fits = first >= 0 && first <= kMaxInt && step >= 1 && step <= kMaxInt &&
                      first + step * std::max<std::int64_t>(count - 1, 0) <= kMaxInt;
    if (!fits)
      refuse(
          "dropout_place has {} {} and a step of {}, for {} of them: the first is at least 0, the step at "
          "least 1, and the last at most 2^31 - 1.",
          name, first, step, count);
  };
  check("q", place.q, place.q_step, shape.seqlen_q);
  check("kv", place.kv, place.kv_step, shape.seqlen_kv);
  check("batch", place.batch, 1, shape.batch);
  const std::int64_t heads = place.heads ? place.heads : shape.heads_q;
  if (place.head < 0 || heads < 0 || heads > kMaxInt || place.head > heads - shape.heads_q)
    refuse(
        "dropout_place has head {} of {}, and the call {} heads: head is at least 0, and with the call's "
        "heads at most {}.",
        place.head, heads, shape.heads_q, heads);
}

/// What both passes have besides their tensors.
template <class Args>
void check_common(const AttentionSpec& spec, const AttentionShape& shape, const Args& args) {
  if (args.softmax_scale && !(std::isfinite(*args.softmax_scale) && *args.softmax_scale > 0))
    refuse("softmax_scale is {}: it must be finite and greater than 0; leave it out for 1 / sqrt(head_dim).",
           *args.softmax_scale);
  if (!(args.dropout_p >= 0 && args.dropout_p < 1))
    refuse("dropout_p is {}: it must be at least 0 and less than 1.", args.dropout_p);
  if (!spec.dropout && args.dropout_p > 0)
    refuse("dropout_p is {}, but the spec has no dropout: set spec.dropout.", args.dropout_p);
  if (!spec.dropout && args.rng_state)
    refuse("rng_state is given, but the spec has no dropout: set spec.dropout.");
  check_pointer("rng_state", args.rng_state, kRngStateAlignment);
  check_dropout_place(spec, shape, args.partial.dropout_place);
  if (args.partial.reserved_sms < 0)
    refuse("reserved_sms is {}: give how many multiprocessors are left to others, 0 for none.",
           args.partial.reserved_sms);
  check_kv_lengths(spec, shape, args.kv_lengths);
  check_block_map(spec, shape, args.block_map);
  check_sinks(spec, shape, args);
}

/// The sizes of q and k, packed or not.
template <class Args>
AttentionShape stored_shape(const Args& args) {
  return {args.q.size[0], args.q.size[1], args.k.size[1], args.q.size[2], args.k.size[2]};
}

/// Sizes of the tensors as q, k and the spec tell them.
struct Expected {
  Sizes q, k, v, out;
};

Expected expected_sizes(const AttentionSpec& spec, const AttentionShape& shape) {
  const Size batch{shape.batch, "q"}, d{spec.head_dim, nullptr}, dv{spec.v_dim(), nullptr};
  const Size heads_q{shape.heads_q, "q"}, heads_kv{shape.heads_kv, "k"};
  const Size queries{shape.seqlen_q, "q"}, keys{shape.seqlen_kv, "k"};
  return {.q = {batch, heads_q, queries, d},
          .k = {batch, heads_kv, keys, d},
          .v = {batch, heads_kv, keys, dv},
          .out = {batch, heads_q, queries, dv}};
}

template <class Args>
AttentionShape shape_of_any(const AttentionSpec& spec, const Args& args) {
  AttentionShape shape = stored_shape(args);
  if (spec.varlen) {
    shape.batch = args.batch_size;
    shape.seqlen_q = args.max_seqlen_q;
    shape.seqlen_kv = args.max_seqlen_kv;
  }
  if constexpr (requires { args.page_table; })
    if (spec.kv.is_cache())
      shape.seqlen_kv =
          args.max_seqlen_kv ? args.max_seqlen_kv : cache_capacity(spec, args.k, args.page_table);
  return shape;
}

/// With a cache, k and v have as many pages or slots as k.
template <class Args>
Expected expected_sizes(const AttentionSpec& spec, const Args& args) {
  Expected sizes = expected_sizes(spec, stored_shape(args));
  if (!spec.kv.is_cache()) return sizes;
  sizes.k[0] = sizes.v[0] = {args.k.size[0], "k"};
  if (spec.kv.is_paged()) sizes.k[2] = sizes.v[2] = {spec.kv.page_size, kPageSize};
  return sizes;
}

/// The tensors of both passes; O is written by one and read by the other, also as fp32.
template <class Args>
void check_qkv_and_out(const AttentionSpec& spec, const Args& args, const Expected& sizes) {
  constexpr bool kForward = std::is_same_v<Args, ForwardArgs>;
  check_q(spec, args.q, q_rope_of(args), sizes.q);
  check_kv_tensor("k", args.k, sizes.k, spec.stored_k(), spec.kv.k_format, Access::read);
  check_kv_tensor("v", args.v, sizes.v, spec.stored_v(), spec.kv.v_format, Access::read);
  const bool is_of_k = args.v.data == args.k.data && args.v.stride == args.k.stride;
  if (spec.kv.shared_kv && !is_of_k)
    refuse(
        "the spec has shared_kv, but v is not k's memory with k's strides: give v a view of k's first {} "
        "columns.",
        spec.v_dim());
  check_type("q", args.q, spec.q_type());
  if (!kForward && spec.score.is_weight() && spec.epilogue.out_mod.empty() && !args.out.data)
    return;  // dS has no D
  if constexpr (kForward)
    return check_kv_tensor("out", args.out, sizes.out, spec.stored_out(), spec.epilogue.out_format,
                           Access::write);
  check_tensor("out", args.out, sizes.out, size_of(spec.saved_out_type()), Access::read);
  check_type("out", args.out, spec.saved_out_type());
}

/// Memory from the caller; `subject` begins a sentence, `name` is used within one.
void check_lent(const char* subject, const char* name, const char* ask, const Workspace& memory,
                std::size_t needed) {
  if (needed == 0) return;
  if (memory.bytes < needed || !memory.data)
    refuse("{} has {} bytes{}, but {} are needed: ask Runtime::{}() and give that much.", subject,
           memory.bytes, memory.data ? "" : " at null", needed, ask);
  check_pointer(name, memory.data, kWorkspaceAlignment);
}

/// The pointers of both passes and the pointers of one, without nulls.
template <class Args>
std::vector<NamedPointer> pointers_with(const Args& args, std::initializer_list<NamedPointer> more) {
  std::vector<NamedPointer> pointers{{"q", memory_of(args.q)},
                                     {"k", memory_of(args.k)},
                                     {"v", memory_of(args.v)},
                                     {"out", memory_of(args.out)},
                                     {"lse", args.lse},
                                     {"kv_lengths", args.kv_lengths},
                                     {"block_map", args.block_map.data},
                                     {"cu_seqlens_q", args.cu_seqlens_q},
                                     {"cu_seqlens_kv", args.cu_seqlens_kv},
                                     pointer_of_sinks(args),
                                     {"indices", args.indices.data},
                                     {"topk_length", args.indices.topk_length},
                                     {"rng_state", args.rng_state},
                                     {"workspace", args.workspace.data},
                                     {"lists", args.lists ? args.lists->data : nullptr}};
  pointers.insert(pointers.end(), more);
  return with_captures(std::move(pointers), args.captures);
}

/// Q, K, V and O, and the sizes that tensors like them must have.
template <class Args>
Expected check_inputs_and_out(const AttentionSpec& spec, const Args& args) {
  check_varlen(spec, args);
  const Expected sizes = expected_sizes(spec, args);
  check_qkv_and_out(spec, args, sizes);
  return sizes;
}

void refuse_lse_of_weights(const AttentionSpec& spec, const char* name, const float* rows) {
  if (spec.score.is_weight() && rows)
    refuse("{} is given, but the spec has weight_mod: without a softmax there is no LSE, so leave it out.",
           name);
}

/// What both passes have besides their tensors.
template <class Args>
void check_shared(const AttentionSpec& spec, const AttentionShape& shape, const Args& args) {
  refuse_lse_of_weights(spec, "lse", args.lse);
  check_modified_rows(spec, shape, args.q, args.k);
  check_key_lists(spec, shape, args.q.size[2], args.indices);
  check_rows("lse", args.lse, args.lse_strides, rows_of(args.q),
             std::is_same_v<Args, ForwardArgs> ? Access::write : Access::read);
  check_heads(shape);
  check_common(spec, shape, args);
}

template <class Void>
DType type_of(const char* name, const BasicTensorView<Void>& view) {
  if (!view.dtype)
    refuse("{} has no dtype, and its type is taken from it: give it, as in bhsd(data, b, h, s, d, dtype).",
           name);
  return *view.dtype;
}

/// A size that is no head dimension is refused by validate().
int dim_of(std::int64_t size) { return static_cast<int>(std::clamp<std::int64_t>(size, -1, kMaxInt)); }

KvLayout layout_of(const ForwardArgs& args) {
  const PageTableView& table = args.page_table;
  if (table.data)
    return table.columns == 1 && !table.starts ? KvLayout::slots() : KvLayout::paged(dim_of(args.k.size[2]));
  return args.kv_lengths ? KvLayout::padded() : KvLayout{};
}
KvLayout layout_of(const BackwardArgs& args) { return args.kv_lengths ? KvLayout::padded() : KvLayout{}; }

/// Whether keys or pages have scales of their own.
bool has_key_scales(const ConstScaleView& scales) { return scales.size[1] != 1 || scales.size[3] != 1; }

/// A tensor of 8 bits tells its format; bytes of rows do not.
void take_format(const char* name, const ConstTensorView& tensor, DType dtype, KvFormat& format) {
  if (format.quantized()) return;
  const DType type = type_of(name, tensor);
  if (type == dtype) return;
  format = kv_format_of(type);
  if (!format.quantized())
    refuse(
        "{} is {} and Q is {}: K and V have the type of Q, or e4m3, e5m2 or int8, or spec.kv names their "
        "format.",
        name, to_string(type), to_string(dtype));
}

/// What both passes tell. `dtype` is the type of O, and of Q unless that is quantized.
template <class Args>
void take_common(AttentionSpec& spec, const Args& args, DType dtype) {
  spec.dtype = dtype;
  take_format("k", args.k, dtype, spec.kv.k_format);
  if (args.v.dtype)
    take_format("v", args.v, dtype, spec.kv.v_format);
  else if (!spec.kv.v_format.quantized())
    spec.kv.v_format = spec.kv.k_format;
  if (spec.head_dim == 0) spec.head_dim = dim_of(args.q.size[3]);
  if (spec.head_dim_v == 0 && spec.stored_v().columns == spec.head_dim)
    spec.head_dim_v = dim_of(args.v.size[3]);
  if (const KvLayout told = layout_of(args); !spec.kv.has_lengths())
    spec.kv.kind = told.kind, spec.kv.page_size = told.page_size;
  spec.dropout |= args.dropout_p > 0 || args.rng_state;
  spec.varlen |= args.cu_seqlens_q != nullptr;
  take_sinks(spec, args);
  spec.indices |= args.indices.data != nullptr;
  spec.partial.dropout_place |= args.partial.dropout_place != DropoutPlace{};
}

}  // namespace

AttentionSpec spec_of(const ForwardArgs& args, AttentionSpec spec) {
  const DType q = type_of("q", args.q), out = type_of("out", args.out);
  spec.prologue.q_codes |= size_of(q) == 1;
  spec.prologue.q_rope |= args.q_rope.data != nullptr;
  if (spec.prologue.q_rope && spec.head_dim == 0)
    spec.head_dim = dim_of(plus(args.q.size[3], args.q_rope.size[3]));
  // With quantized Q, O tells the type; in fp32 O may be a part of a larger problem.
  const DType of_codes = out == DType::fp32 || size_of(out) == 1 ? spec.dtype : out;
  take_common(spec, args, spec.prologue.q_codes ? of_codes : q);
  spec.partial.fp32_out |= out == DType::fp32 && spec.dtype != DType::fp32;
  spec.kv.key_scales |= spec.kv.quantized() && (has_key_scales(args.k_scale) || has_key_scales(args.v_scale));
  if (out == DType::e4m3 && !spec.epilogue.out_format.quantized())
    spec.epilogue.out_format = parse_kv_format(args.out_block_scale.data ? "e4m3:row:fp32:apart" : "e4m3");
  spec.epilogue.row_max |= args.row_max != nullptr;
  spec.epilogue.skip_softmax |= args.skip_softmax_threshold.has_value();
  spec.kv.shared_prefix |= args.prefix_length != nullptr;
  spec.kv.shared_kv |= args.k.data && args.v.data == args.k.data && args.v.stride == args.k.stride &&
                       args.v.size[3] <= args.k.size[3] && !spec.has_scales() &&
                       spec.kv.k_format == spec.kv.v_format;
  spec.partial.running_state |= args.partial.state.out.data || args.partial.state.lse;
  return spec;
}

AttentionSpec spec_of(const BackwardArgs& args, AttentionSpec spec) {
  const DType dtype = type_of("q", args.q);
  take_common(spec, args, dtype);
  spec.partial.fp32_out |= args.out.dtype == DType::fp32 && dtype != DType::fp32;
  spec.partial.fp32_grads |= type_of("dq", args.dq) == DType::fp32 && dtype != DType::fp32;
  return spec;
}

AttentionShape shape_of(const AttentionSpec& spec, const ForwardArgs& args) {
  return shape_of_any(spec, args);
}
AttentionShape shape_of(const AttentionSpec& spec, const BackwardArgs& args) {
  return shape_of_any(spec, args);
}

AttentionShape check_arguments(const AttentionSpec& spec, const ForwardArgs& args) {
  const Expected sizes = check_inputs_and_out(spec, args);
  const AttentionShape shape = shape_of(spec, args);
  check_shared(spec, shape, args);
  check_state(spec, args, sizes.out);
  check_page_table(spec, shape, "k", args.k, args.page_table);
  check_row_max(spec, args);
  check_out_before_mod(spec, args, sizes.out);
  check_out_scales(spec, args);
  check_skip_softmax(spec, args);
  check_prefix(spec, shape, args.prefix_length);
  check_scales("k_scale", spec, spec.kv.k_format, shape, args.k, args.k_scale);
  if (!spec.kv.shared_kv)
    check_scales("v_scale", spec, spec.kv.v_format, shape, args.v, args.v_scale);
  else if (args.v_scale.data || args.v_block_scale.data)
    refuse("{} is given, but with shared_kv V is K's memory and has its scales: leave it out.",
           args.v_scale.data ? "v_scale" : "v_block_scale");
  check_block_scales("k_block_scale", "k", spec.kv.k_format, spec.head_dim, args.k, args.k_block_scale);
  if (!spec.kv.shared_kv)
    check_block_scales("v_block_scale", "v", spec.kv.v_format, spec.v_dim(), args.v, args.v_block_scale);
  check_q_scale(spec, shape, args.q_scale);
  check_apart(spec, shape, args);
  return shape;
}

AttentionShape check_arguments(const AttentionSpec& spec, const BackwardArgs& args) {
  const Expected sizes = check_inputs_and_out(spec, args);
  const AttentionShape shape = shape_of(spec, args);
  const int grad_size = size_of(spec.grad_type());
  check_tensor("dout", args.dout, sizes.out, size_of(spec.dtype), Access::read);
  check_tensor("dq", args.dq, sizes.q, grad_size, Access::write);
  check_tensor("dk", args.dk, sizes.k, grad_size, Access::write);
  check_tensor("dv", args.dv, sizes.v, grad_size, Access::write);
  check_type("dout", args.dout, spec.dtype);
  check_type("dq", args.dq, spec.grad_type());
  check_type("dk", args.dk, spec.grad_type());
  check_type("dv", args.dv, spec.grad_type());
  refuse_lse_of_weights(spec, "dlse", args.dlse);
  if (!spec.score.is_weight() && !args.lse && args.q.size[0] > 0 && args.q.size[1] > 0 && args.q.size[2] > 0)
    refuse("lse is null: the backward pass needs the LSE that the forward pass wrote.");
  check_of_sinks(spec, "dsinks", args.dsinks);
  check_rows("dlse", args.dlse, args.lse_strides, rows_of(args.q), Access::read);
  check_shared(spec, shape, args);
  check_apart(spec, shape, args);
  if (const std::int64_t most = shape.batch * shape.seqlen_q;
      spec.varlen && !spec.epilogue.out_mod.empty() && args.q.size[2] > most)
    refuse(
        "q has {} packed rows, but batch_size * max_seqlen_q is {}: with out_mod the backward pass has "
        "memory "
        "for those alone, so give a larger max_seqlen_q, or views without the rows of no sequence.",
        args.q.size[2], most);
  return shape;
}

void check_arguments(const AttentionSpec& spec, const AttentionShape& shape, const ListArgs& args) {
  spec.validate();
  shape.validate();
  check_offsets("cu_seqlens_q", spec, shape, args.cu_seqlens_q);
  check_offsets("cu_seqlens_kv", spec, shape, args.cu_seqlens_kv);
  check_kv_lengths(spec, shape, args.kv_lengths);
  check_block_map(spec, shape, args.block_map);
}

void check_workspace(const Workspace& workspace, std::size_t needed) {
  check_lent("The workspace", "workspace", "workspace_bytes", workspace, needed);
}

void check_list_memory(const Workspace& memory, std::size_t needed) {
  check_lent("The lists' memory", "the lists' memory", "list_bytes", memory, needed);
}

void check_lists(const TileLists& lists, std::string_view wanted, const BlockMapView& map) {
  if (lists.built_for != wanted)
    refuse("lists were built for {}, but this call is {}: build them for it with Runtime::build_lists().",
           lists.built_for.empty() ? "nothing" : lists.built_for, wanted);
  if (lists.block_map_size != std::array{map.size[0], map.size[1]})
    refuse(
        "lists were built for a block_map of batch {} and heads {}, but this call's has {} and {}: give the "
        "map that they were built for.",
        lists.block_map_size[0], lists.block_map_size[1], map.size[0], map.size[1]);
}

void check_limits(const AttentionShape& shape) {
  if (plan::padded_seqlen_q(shape) > kMaxInt)
    refuse("seqlen_q is {}: at most {} is possible.", shape.seqlen_q, kMaxInt / 128 * 128);
}

std::vector<NamedPointer> pointers_of(const ForwardArgs& args) {
  return pointers_with(args, {{"page_table", args.page_table.data},
                              {"page_table.starts", args.page_table.starts},
                              {"row_max", args.row_max},
                              {"q_rope", memory_of(args.q_rope)},
                              {"out_before_mod", memory_of(args.out_before_mod)},
                              {"skip_softmax_counts", args.skip_softmax_counts},
                              {"out_scale", args.out_scale},
                              {"out_block_scale", memory_of(args.out_block_scale)},
                              {"prefix_length", args.prefix_length},
                              {"state.out", memory_of(args.partial.state.out)},
                              {"state.lse", args.partial.state.lse},
                              {"k_scale", args.k_scale.data},
                              {"v_scale", args.v_scale.data},
                              {"k_block_scale", memory_of(args.k_block_scale)},
                              {"v_block_scale", memory_of(args.v_block_scale)},
                              {"q_scale", args.q_scale.data}});
}

std::vector<NamedPointer> pointers_of(const ListArgs& args) {
  return with_captures({{"the lists' memory", args.memory.data},
                        {"kv_lengths", args.kv_lengths},
                        {"block_map", args.block_map.data},
                        {"cu_seqlens_q", args.cu_seqlens_q},
                        {"cu_seqlens_kv", args.cu_seqlens_kv}},
                       args.captures);
}

std::vector<NamedPointer> pointers_of(const BackwardArgs& args) {
  std::vector<NamedPointer> pointers = pointers_with(args, {{"dout", memory_of(args.dout)},
                                                            {"dq", memory_of(args.dq)},
                                                            {"dk", memory_of(args.dk)},
                                                            {"dv", memory_of(args.dv)},
                                                            {"dsinks", args.dsinks},
                                                            {"dlse", args.dlse}});
  for (const Capture& capture : args.captures)
    if (capture.grad) pointers.push_back({capture.name, capture.grad});
  return pointers;
}

}  // namespace flashjit
