#include "call/append_arguments.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>

#include "call/apart.hpp"
#include "call/block_scales.hpp"
#include "call/tensor_checks.hpp"
#include "support/refuse.hpp"

namespace flashjit {
namespace {

constexpr int kRopeStep = 16;

bool rotates(const RopeView& rope) { return rope.cos || rope.sin || rope.theta != 0; }
int rotated_dims(const AttentionSpec& spec, const RopeView& rope) {
  return rope.dims ? rope.dims : spec.head_dim;
}
std::int64_t table_stride(const AttentionSpec& spec, const RopeView& rope) {
  return rope.stride ? rope.stride : rotated_dims(spec, rope) / 2;
}

void check_tables(const AttentionSpec& spec, const RopeView& rope) {
  if (rope.theta != 0)
    refuse("rope.theta is {}, but rope.cos and rope.sin are given: give tables or theta.", rope.theta);
  if (!rope.cos || !rope.sin)
    refuse("rope.{} is null, but rope.{} is given: give both tables.", rope.cos ? "sin" : "cos",
           rope.cos ? "cos" : "sin");
  if (rope.type != DType::fp32 && rope.type != spec.dtype)
    refuse("rope.type is {}: the tables are of fp32 or of the spec's type, {}.", to_string(rope.type),
           to_string(spec.dtype));
  check_pointer("rope.cos", rope.cos, static_cast<std::uintptr_t>(size_of(rope.type)));
  check_pointer("rope.sin", rope.sin, static_cast<std::uintptr_t>(size_of(rope.type)));
  if (rope.table_rows < 0 || rope.table_rows > kMaxInt)
    refuse("rope.table_rows is {}: give the number of positions that the tables have, 0 to 2^31 - 1.",
           rope.table_rows);
  if (rope.stride < 0 || rope.stride > kMaxInt)
    refuse("rope.stride is {}: it must be from 0 to 2^31 - 1 elements.", rope.stride);
}

bool has_sections(const RopeView& rope) { return rope.sections != std::array<int, 3>{}; }

/// M-RoPE's, of `pairs` pairs.
void check_sections(const RopeView& rope, int pairs) {
  const auto [time, height, width] = rope.sections;
  if (!has_sections(rope)) {
    if (rope.interleaved_sections)
      refuse("rope.interleaved_sections is given without rope.sections: give the pairs of the three, too.");
    return;
  }
  if (std::min({time, height, width}) < 0 || std::int64_t{time} + height + width != pairs)
    refuse("rope.sections is {}, {}, {}: give numbers of pairs from 0 on, {} together.", time, height, width,
           pairs);
  if (!rope.positions)
    refuse("rope.positions is null, but rope.sections is given: give three arrays of positions.");
  if (rope.interleaved_sections && (time < height || time < width))
    refuse("rope.sections is {}, {}, {}: interleaved, the first is the largest.", time, height, width);
}

void check_norm(const char* name, const AttentionSpec& spec, const NormView& norm, bool has_rows) {
  if (!norm.weight) return;
  if (!has_rows) refuse("{} is given without rows to norm: leave it out, or give q.", name);
  if (norm.type != DType::fp32 && norm.type != spec.dtype)
    refuse("{}.type is {}: weights are of fp32 or of the spec's type, {}.", name, to_string(norm.type),
           to_string(spec.dtype));
  check_pointer(name, norm.weight, static_cast<std::uintptr_t>(size_of(norm.type)));
  if (!(std::isfinite(norm.eps) && norm.eps > 0))
    refuse("{}.eps is {}: it must be finite and greater than 0.", name, norm.eps);
}

void check_rope(const AttentionSpec& spec, const RopeView& rope) {
  if (!rotates(rope)) {
    if (rope.dims != 0 || rope.positions || has_sections(rope))
      refuse("rope has neither tables nor theta: give rope.cos and rope.sin, or rope.theta.");
    return;
  }
  const int dims = rotated_dims(spec, rope);
  if (dims < kRopeStep || dims % kRopeStep != 0 || dims > spec.head_dim)
    refuse("rope.dims is {}: it must be a multiple of {} up to head_dim, {}.", dims, kRopeStep,
           spec.head_dim);
  check_pointer("rope.positions", rope.positions, alignof(std::int32_t));
  check_sections(rope, dims / 2);
  if (rope.cos || rope.sin) return check_tables(spec, rope);
  if (!(std::isfinite(rope.theta) && rope.theta > 0))
    refuse("rope.theta is {}: it must be finite and greater than 0.", rope.theta);
}

bool same_memory(const ConstTensorView& a, const ConstTensorView& b) {
  const TensorParam x = tensor_param(a), y = tensor_param(b);
  return x.data == y.data && x.stride_b == y.stride_b && x.stride_h == y.stride_h && x.stride_s == y.stride_s;
}

/// Where a tensor is written that another's rows are read from, they are the same or apart.
void check_apart(const char* written_name, const ConstTensorView& written, int written_size,
                 const std::string& read_name, const ConstTensorView& read, int read_size) {
  const Extent a = extent_of(written, written_size), b = extent_of(read, read_size);
  if (a.begin >= b.end || b.begin >= a.end) return;
  if (written_size == read_size && same_memory(written, read)) return;
  refuse("{} overlaps {}: give the very same tensor, or memory of its own.", written_name, read_name);
}

/// Whether both caches get the same rows, as latents have them.
bool same_rows(const AppendArgs& args) {
  return same_memory(args.k, args.v) && same_memory(args.k_cache, args.v_cache) &&
         args.k_scale.data == args.v_scale.data && !rotates(args.rope) && !args.k_norm.weight;
}

/// One memory may be both caches where both get the same rows. Else one's rows are lost.
void check_caches(const AttentionSpec& spec, const AppendArgs& args) {
  // Behind a page table or slots views may overlap, as where K's and V's pages take turns in one pool.
  const bool behind_a_table = args.page_table.data || args.slots.data;
  if (same_rows(args) || (behind_a_table && args.k_cache.data != args.v_cache.data)) return;
  const Placed k("k_cache", args.k_cache, size_of(spec.stored_k().type)),
      v("v_cache", args.v_cache, size_of(spec.stored_v().type));
  flashjit::check_apart({&k, 1}, {&v, 1});
}

/// Quantized latents have V in the rows of K.
bool has_v(const AttentionSpec& spec) { return !(spec.kv.shared_kv && spec.kv.k_format.quantized()); }

void check_row_count(const ConstTensorView& k) {
  if (k.size[0] > 0 && k.size[2] > kMaxInt / k.size[0])
    refuse("k has {} x {} new rows: at most 2^31 - 1 are possible.", k.size[0], k.size[2]);
}

/// Slots say where rows go; what else would say so is not given.
void check_slots(const AppendArgs& args) {
  const SlotsView& slots = args.slots;
  if (slots.type != ElementType::int64 && slots.type != ElementType::int32)
    refuse("slots.type is {}: slots are of int64 or int32.", to_string(slots.type));
  check_pointer("slots", slots.data, slots.type == ElementType::int64 ? 8 : 4);
  const auto refuse_given = [](const char* name, bool given) {
    if (given) refuse("{} is given with slots, which say where each row goes: leave it out.", name);
  };
  refuse_given("kv_lengths", args.kv_lengths != nullptr);
  refuse_given("page_table", args.page_table.data != nullptr);
  refuse_given("cu_seqlens_q", args.cu_seqlens_q != nullptr);
  refuse_given("batch_size", args.batch_size != 0);
  refuse_given("max_seqlen_kv", args.max_seqlen_kv != 0);
  if (rotates(args.rope) && !args.rope.positions && args.k.size[0] * args.k.size[2] > 0)
    refuse("rope.positions is null, but slots do not tell positions: give one for each new row.");
  for (const auto& [name, scale] : {std::pair("k_scale", &args.k_scale), std::pair("v_scale", &args.v_scale)})
    if (scale->data && scale->size[0] != 1)
      refuse("{} has {} sequences, but slots do not tell sequences: give scales of size 1 there.", name,
             scale->size[0]);
}

void check_new_rows(const AttentionSpec& spec, const AppendArgs& args) {
  if (spec.varlen) {
    if (args.k.size[0] != 1)
      refuse("k has batch {}, but the spec has varlen: pack the sequences into [1, heads, rows, head_dim].",
             args.k.size[0]);
    if (args.slots.data) return check_row_count(args.k);
    if (args.batch_size < 0 || args.batch_size > kMaxInt)
      refuse("batch_size is {}: give the number of sequences, 0 to 2^31 - 1.", args.batch_size);
  } else if (args.batch_size != 0) {
    refuse("batch_size {} is given, but the spec has no varlen: set spec.varlen or leave it 0.",
           args.batch_size);
  }
  check_row_count(args.k);
  if (args.slots.data) return;
  check_offsets("cu_seqlens_q", spec, shape_of(spec, args), args.cu_seqlens_q);
  if (args.max_seqlen_kv < 0 || args.max_seqlen_kv > kMaxInt)
    refuse(
        "max_seqlen_kv is {}: give the most keys that a sequence may have, or 0 for all there is room for.",
        args.max_seqlen_kv);
}

void check_q(const AttentionSpec& spec, const AppendArgs& args) {
  if (!args.q.data && args.q.size == std::array<std::int64_t, 4>{}) {
    if (args.q_out.data) refuse("q_out is given without q: give both or neither.");
    return;
  }
  const int element_size = size_of(spec.dtype);
  const Sizes sizes = {Size{args.k.size[0], "k"}, Size{args.q.size[1], "q"}, Size{args.k.size[2], "k"},
                       Size{spec.head_dim, nullptr}};
  check_tensor("q", args.q, sizes, element_size, Access::read);
  check_tensor("q_out", args.q_out, sizes, element_size, Access::write);
  check_apart("q_out", args.q_out, element_size, "q", args.q, element_size);
}

/// Written scales, of one sequence or one page: each has a place of its own.
void check_written_scales(const char* name, const ScaleView& scales) {
  const auto &size = scales.size, &stride = scales.stride;
  const int first = size[0] == 1 ? 1 : 0;
  const ConstTensorView places{
      scales.data, {size[first], size[2], size[3], 1}, {stride[first], stride[2], stride[3], 1}};
  const auto same = [&](int i) { return Size{places.size[i], nullptr}; };
  check_tensor(name, places, {same(0), same(1), same(2), same(3)}, sizeof(float), Access::write,
               alignof(float));
}

/// With spec.kv.key_scales each new key's are written, which so must be its own.
void check_new_scales(const char* name, const AttentionSpec& spec, const KvFormat& format,
                      const AttentionShape& shape, const ConstTensorView& cache, const ScaleView& scales) {
  check_scales(name, spec, format, shape, cache, scales);
  if (!spec.kv.key_scales || !scales.data) return;
  const auto [sequences, pages, heads, rows] = scales.size;
  if (sequences != 1 || pages != cache.size[0] || heads != cache.size[1] || rows != cache.size[2])
    refuse(
        "{} is [{}, {}, {}, {}], but each new key gets a scale of its own: give [1, {}, {}, {}], or leave "
        "spec.kv.key_scales out and give scales of heads.",
        name, sequences, pages, heads, rows, cache.size[0], cache.size[1], cache.size[2]);
  check_written_scales(name, scales);
}

NormParam norm_param(const NormView& norm) { return {norm.weight, norm.type == DType::fp32, norm.eps}; }

/// `rows`: how many positions there are.
RopeParam rope_param(const AttentionSpec& spec, const RopeView& rope, std::int64_t rows) {
  RopeParam param{};
  if (!rotates(rope)) return param;
  const int dims = rotated_dims(spec, rope);
  param.pairs = dims / 2;
  param.interleaved = rope.interleaved;
  param.positions = rope.positions;
  std::ranges::copy(rope.sections, param.sections);
  param.interleaved_sections = rope.interleaved_sections;
  param.position_count = static_cast<int>(rows);
  param.cos = rope.cos;
  param.sin = rope.sin;
  param.stride = table_stride(spec, rope);
  param.table_rows = static_cast<int>(rope.table_rows);
  param.fp32_tables = rope.type == DType::fp32;
  param.turns = 1 / (2 * std::numbers::pi);
  double factor = rope.cos ? 0 : std::pow(static_cast<double>(rope.theta), -2.0 / dims);
  for (double& kept : param.factors) kept = factor, factor *= factor;
  return param;
}

DType states_type(const AttentionSpec& spec, const MergeArgs& args) {
  return args.states_type.value_or(spec.dtype);
}
DType out_type(const AttentionSpec& spec, const MergeArgs& args) {
  return args.out_type.value_or(spec.dtype);
}

void check_type(const char* name, const AttentionSpec& spec, DType type) {
  if (type == DType::fp32 || type == spec.dtype) return;
  refuse("{} is {}: it must be fp32 or the spec's type, {}.", name, to_string(type), to_string(spec.dtype));
}

std::vector<NamedPointer> without_nulls(std::vector<NamedPointer> pointers) {
  std::erase_if(pointers, [](const NamedPointer& named) { return named.pointer == nullptr; });
  return pointers;
}

/// That 32 bits count the rows of all heads; returns how many heads there are.
std::int64_t check_rows(const char* name, const std::array<std::int64_t, 4>& size) {
  const std::int64_t heads = size[0] > 0 && size[1] > kMaxInt / size[0] ? kMaxInt : size[0] * size[1];
  if (heads > 0 && size[2] > kMaxInt / heads)
    refuse("{} has {} x {} x {} rows: at most 2^31 - 1 are possible.", name, size[0], size[1], size[2]);
  return heads;
}

constexpr const char* kStateNames[kMaxPartialStates] = {"states[0].out", "states[1].out", "states[2].out",
                                                        "states[3].out", "states[4].out", "states[5].out",
                                                        "states[6].out", "states[7].out"};
constexpr const char* kLseNames[kMaxPartialStates] = {"states[0].lse", "states[1].lse", "states[2].lse",
                                                      "states[3].lse", "states[4].lse", "states[5].lse",
                                                      "states[6].lse", "states[7].lse"};

}  // namespace

AttentionShape shape_of(const AttentionSpec& spec, const AppendArgs& args) {
  return {.batch = spec.varlen && !args.slots.data ? args.batch_size : args.k.size[0],
          .heads_q = args.q.size[1],
          .heads_kv = args.k.size[1],
          .seqlen_q = args.k.size[2],
          .seqlen_kv =
              args.max_seqlen_kv ? args.max_seqlen_kv : cache_capacity(spec, args.k_cache, args.page_table)};
}

AttentionShape shape_of(const AttentionSpec& /*spec*/, const MergeArgs& args) {
  const auto& size = args.out.size;
  return {.batch = size[0], .heads_q = size[1], .heads_kv = size[1], .seqlen_q = size[2], .seqlen_kv = 0};
}

AttentionShape shape_of(const AttentionSpec& /*spec*/, const QuantizeArgs& args) {
  const auto& size = args.x.size;
  return {.batch = size[0], .heads_q = size[1], .heads_kv = size[1], .seqlen_q = size[2], .seqlen_kv = 0};
}

void check_arguments(const AttentionSpec& spec, const AppendArgs& args) {
  if (!spec.kv.is_cache())
    refuse("The spec has no cache to append to: set spec.kv to KvLayout::paged(page_size) or slots().");
  const KvFormat &of_k = spec.kv.k_format, &of_v = spec.kv.v_format;
  if (std::max(of_k.keys, of_v.keys) > 0 || !of_k.decode.empty() || !of_v.decode.empty())
    KernelSpec{spec, Pass::append}.validate();  // which says what is not appended, and why
  check_new_rows(spec, args);
  const int element_size = size_of(spec.dtype);
  const Size batch{args.k.size[0], "k"}, heads{args.k.size[1], "k"}, rows{args.k.size[2], "k"};
  const Size d{spec.head_dim, nullptr}, dv{spec.v_dim(), nullptr};
  check_tensor("k", args.k, {batch, heads, rows, d}, element_size, Access::read);
  const Size pages{args.k_cache.size[0], "k_cache"};
  const Size page_rows =
      spec.kv.is_paged() ? Size{spec.kv.page_size, kPageSize} : Size{args.k_cache.size[2], "k_cache"};
  check_kv_tensor("k_cache", args.k_cache, {pages, heads, page_rows, d}, spec.stored_k(), spec.kv.k_format,
                  Access::write);
  if (!has_v(spec) && (args.v.data || args.v_cache.data))
    refuse("v or v_cache is given, but with shared_kv rows of {} have V in them: leave both out.",
           to_string(spec.kv.k_format));
  if (has_v(spec)) check_tensor("v", args.v, {batch, heads, rows, dv}, element_size, Access::read);
  if (has_v(spec))
    check_kv_tensor("v_cache", args.v_cache, {pages, heads, page_rows, dv}, spec.stored_v(), spec.kv.v_format,
                    Access::write);
  check_caches(spec, args);
  check_q(spec, args);
  const AttentionShape shape = shape_of(spec, args);
  check_heads(shape);
  if (args.slots.data) {
    check_slots(args);
  } else {
    check_kv_lengths(spec, shape, args.kv_lengths);
    check_page_table(spec, shape, "k_cache", args.k_cache, args.page_table);
  }
  check_new_scales("k_scale", spec, spec.kv.k_format, shape, args.k_cache, args.k_scale);
  if (has_v(spec)) check_new_scales("v_scale", spec, spec.kv.v_format, shape, args.v_cache, args.v_scale);
  check_block_scales("k_block_scale", "k_cache", spec.kv.k_format, spec.head_dim, args.k_cache,
                     args.k_block_scale, true);
  if (has_v(spec))
    check_block_scales("v_block_scale", "v_cache", spec.kv.v_format, spec.v_dim(), args.v_cache,
                       args.v_block_scale, true);
  flashjit::check_apart(spec, shape, args, same_rows(args));
  check_rope(spec, args.rope);
  check_norm("k_norm", spec, args.k_norm, true);
  check_norm("q_norm", spec, args.q_norm, args.q.size != std::array<std::int64_t, 4>{});
}

void check_arguments(const AttentionSpec& spec, const MergeArgs& args) {
  if (args.states.empty() || args.states.size() > kMaxPartialStates)
    refuse("{} states are given: give 1 to {}; merge() joins more in several calls.", args.states.size(),
           kMaxPartialStates);
  check_type("states_type", spec, states_type(spec, args));
  check_type("out_type", spec, out_type(spec, args));
  const int out_size = size_of(out_type(spec, args)), state_size = size_of(states_type(spec, args));
  const auto& size = args.out.size;
  const Sizes sizes = {Size{size[0], "out"}, Size{size[1], "out"}, Size{size[2], "out"},
                       Size{spec.v_dim(), nullptr}};
  check_tensor("out", args.out, sizes, out_size, Access::write);
  const RowSizes rows = rows_of(args.out);
  check_rows("lse", args.lse, args.lse_strides, rows, Access::write);
  const std::int64_t heads = check_rows("out", size);
  for (std::size_t i = 0; i < args.states.size(); ++i) {
    const PartialState& state = args.states[i];
    check_tensor(kStateNames[i], state.out, sizes, state_size, Access::read);
    if (!state.lse && heads * size[2] > 0) refuse("{} is null: a state needs its LSE.", kLseNames[i]);
    check_rows(kLseNames[i], state.lse, state.lse_strides, rows, Access::read);
    check_apart("out", args.out, out_size, kStateNames[i], state.out, state_size);
    if (!args.lse) continue;
    const Placed written{"lse", rows_view(args.lse, args.lse_strides, rows), sizeof(float)},
        read{kLseNames[i], rows_view(state.lse, state.lse_strides, rows), sizeof(float)};
    check_apart({&written, 1}, {&read, 1});
  }
}

void check_arguments(const AttentionSpec& spec, const QuantizeArgs& args) {
  if (!spec.kv.k_format.quantized())
    refuse("The spec has K of {}: set spec.kv.k_format to e4m3, e5m2 or int8, or to another KV format.",
           to_string(spec.dtype));
  const auto [batch, heads, rows, dim] = args.x.size;
  const Sizes sizes = {Size{batch, "x"}, Size{heads, "x"}, Size{rows, "x"}, Size{spec.head_dim, nullptr}};
  check_tensor("x", args.x, sizes, size_of(spec.dtype), Access::read);
  spec.kv.k_format.validate_row(spec.head_dim);
  if (!spec.kv.k_format.decode.empty()) KernelSpec{spec, Pass::quantize}.validate();
  check_kv_tensor("codes", args.codes, sizes, spec.stored_k(), spec.kv.k_format, Access::write);
  check_rows("x", args.x.size);
  check_rope(spec, args.rope);
  check_block_scales("block_scale", "codes", spec.kv.k_format, spec.head_dim, args.codes, args.block_scale,
                     true);
  if (const int keys = spec.kv.k_format.keys; keys > 0 && rows % keys != 0)
    refuse(
        "x has {} rows, but {} keys share scales in {}: give whole groups, and keep the last {} keys in 16 "
        "bits.",
        rows, keys, to_string(spec.kv.k_format), rows % keys);
  if (!spec.kv.k_format.has_argument()) {
    if (args.scale.data)
      refuse("scale is given, but rows of {} have their scales themselves: leave it out.",
             to_string(spec.kv.k_format));
    return;
  }
  if (!args.scale.data && (batch == 0 || heads == 0 || rows == 0)) return;
  if (!args.scale.data) refuse("scale is null: give fp32 in device memory, one float or more.");
  const auto& size = args.scale.size;
  const auto fits = [](std::int64_t n, std::int64_t all) { return n == 1 || n == all; };
  const bool divides = size[2] >= 1 && heads % size[2] == 0;
  const bool by_row = size[3] != 1,
             all_rows = times(size[0], size[1]) == batch && size[2] == heads && size[3] == rows;
  if (!fits(size[0], batch) || !fits(size[1], batch) || (size[0] != 1 && size[1] != 1) || !divides ||
      (by_row && !all_rows))
    refuse(
        "scale is [{}, {}, {}, {}], but x is [{}, {}, {}, {}]: in the place of sequences or of pages give 1 "
        "or {}, heads that divide {}, and 1 for the rows, or with all others {}.",
        size[0], size[1], size[2], size[3], batch, heads, rows, dim, batch, heads, rows);
  check_written_scales("scale", args.scale);
}

AppendParams make_params(const AttentionSpec& spec, const AppendArgs& args) {
  const AttentionShape shape = shape_of(spec, args);
  const PageTableView& table = args.page_table;
  return {.k = tensor_param(args.k),
          .v = tensor_param(args.v),
          .q = tensor_param(args.q),
          .q_out = tensor_param(args.q_out),
          .k_cache = tensor_param(args.k_cache),
          .v_cache = tensor_param(args.v_cache),
          .k_scale = scale_param(args.k_scale),
          .v_scale = scale_param(args.v_scale),
          .page_table = page_table_param(table, args.k_cache),
          .kv_lengths = args.kv_lengths,
          .cu_seqlens = args.cu_seqlens_q,
          .batch = static_cast<int>(shape.batch),
          .rows = static_cast<int>(shape.seqlen_q),
          .heads_kv = static_cast<int>(shape.heads_kv),
          .heads_q = static_cast<int>(shape.heads_q),
          .seqlen_kv = static_cast<int>(shape.seqlen_kv),
          .rope = rope_param(spec, args.rope, args.k.size[0] * args.k.size[2]),
          .slots = args.slots.data,
          .wide_slots = args.slots.type == ElementType::int64,
          .slot_rows = static_cast<int>(std::max<std::int64_t>(args.k_cache.size[2], 1)),
          .slot_pages = static_cast<int>(args.k_cache.size[0]),
          .k_norm = norm_param(args.k_norm),
          .q_norm = norm_param(args.q_norm),
          .k_block_scale = tensor_param(args.k_block_scale),
          .v_block_scale = tensor_param(args.v_block_scale)};
}

MergeParams make_params(const AttentionSpec& spec, const MergeArgs& args) {
  MergeParams params{};
  params.out = tensor_param(args.out);
  params.lse_out = rows_param(args.lse, args.lse_strides, rows_of(args.out));
  params.count = static_cast<int>(args.states.size());
  params.batch = static_cast<int>(args.out.size[0]);
  params.heads = static_cast<int>(args.out.size[1]);
  params.seqlen = static_cast<int>(args.out.size[2]);
  params.fp32_parts = states_type(spec, args) == DType::fp32;
  params.fp32_out = out_type(spec, args) == DType::fp32;
  for (std::size_t i = 0; i < args.states.size(); ++i) {
    params.o[i] = tensor_param(args.states[i].out);
    params.lse[i] = rows_param(args.states[i].lse, args.states[i].lse_strides, rows_of(args.out));
  }
  return params;
}

QuantizeParams make_params(const AttentionSpec& spec, const QuantizeArgs& args) {
  const AttentionShape shape = shape_of(spec, args);
  ScaleParam scale = scale_param(args.scale);
  scale.stride_b += scale.stride_page;  // one of them is 0
  return {.x = tensor_param(args.x),
          .codes = tensor_param(args.codes),
          .scale = scale,
          .batch = static_cast<int>(shape.batch),
          .heads = static_cast<int>(shape.heads_q),
          .rows = static_cast<int>(shape.seqlen_q),
          .scales_b = args.scale.data ? static_cast<int>(args.scale.size[0] * args.scale.size[1]) : 0,
          .scales_h = static_cast<int>(args.scale.size[2]),
          .heads_of_scale = static_cast<int>(shape.heads_q / std::max<std::int64_t>(args.scale.size[2], 1)),
          .scale_of_row = args.scale.size[3] != 1,
          .hadamard = args.hadamard,
          .rope = rope_param(spec, args.rope, args.x.size[0] * args.x.size[2]),
          .block_scale = tensor_param(args.block_scale)};
}

std::vector<NamedPointer> pointers_of(const AppendArgs& args) {
  return without_nulls({{"k", memory_of(args.k)},
                        {"v", memory_of(args.v)},
                        {"k_cache", memory_of(args.k_cache)},
                        {"v_cache", memory_of(args.v_cache)},
                        {"k_scale", args.k_scale.data},
                        {"v_scale", args.v_scale.data},
                        {"k_block_scale", memory_of(args.k_block_scale)},
                        {"v_block_scale", memory_of(args.v_block_scale)},
                        {"kv_lengths", args.kv_lengths},
                        {"page_table", args.page_table.data},
                        {"page_table.starts", args.page_table.starts},
                        {"q", memory_of(args.q)},
                        {"q_out", memory_of(args.q_out)},
                        {"rope.cos", args.rope.cos},
                        {"rope.sin", args.rope.sin},
                        {"rope.positions", args.rope.positions},
                        {"k_norm", args.k_norm.weight},
                        {"q_norm", args.q_norm.weight},
                        {"cu_seqlens_q", args.cu_seqlens_q},
                        {"slots", args.slots.data}});
}

std::vector<NamedPointer> pointers_of(const QuantizeArgs& args) {
  return without_nulls({{"x", memory_of(args.x)},
                        {"codes", memory_of(args.codes)},
                        {"scale", args.scale.data},
                        {"block_scale", memory_of(args.block_scale)},
                        {"rope.cos", args.rope.cos},
                        {"rope.sin", args.rope.sin},
                        {"rope.positions", args.rope.positions}});
}

std::vector<NamedPointer> pointers_of(const MergeArgs& args) {
  std::vector<NamedPointer> pointers = {{"out", memory_of(args.out)}, {"lse", args.lse}};
  for (std::size_t i = 0; i < args.states.size(); ++i) {
    pointers.push_back({kStateNames[i], memory_of(args.states[i].out)});
    pointers.push_back({kLseNames[i], args.states[i].lse});
  }
  return without_nulls(std::move(pointers));
}

}  // namespace flashjit
