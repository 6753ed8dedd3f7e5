#include "call/tensor_checks.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "support/refuse.hpp"

namespace flashjit {
namespace {

constexpr const char* kDimensions[] = {"batch", "heads", "length", "head_dim"};

bool aligned(const void* pointer, std::uintptr_t alignment) {
  return reinterpret_cast<std::uintptr_t>(pointer) % alignment == 0;
}

[[noreturn, gnu::cold, gnu::noinline]] void refuse_size(const char* name, int dimension, std::int64_t given,
                                                        Size expected) {
  if (!expected.owner && expected.value == 0)
    refuse(
        "{} has head_dim {}, but the spec's is 0: set it, or let spec_of(args, spec) take it from the call.",
        name, given);
  if (!expected.owner)
    refuse("{} has head_dim {}, but the spec says {}: give a tensor of that size or change the spec.", name,
           given, expected.value);
  if (expected.owner == std::string_view(kPageSize))
    refuse(
        "{} has {} rows a page (size[2]), but spec.kv.page_size is {}: views are [pages, heads, rows, "
        "head_dim], and strides say how they lie.",
        name, given, expected.value);
  refuse("{} has {} {}, but {} has {}: they must be equal.", name, kDimensions[dimension], given,
         expected.owner, expected.value);
}

/// Refuses negative and overflowing strides, and those that are no multiple of `alignment` bytes.
void check_strides(const char* name, const ConstTensorView& tensor, int element_size, int alignment) {
  std::int64_t extent = 0;
  for (int i = 0; i < 3; ++i) {
    if (tensor.size[i] <= 1) continue;
    const std::int64_t stride = tensor.stride[i];
    if (stride < 0)
      refuse("{} has stride {} in {}: strides must be 0 or more.", name, stride, kDimensions[i]);
    std::int64_t span = 0;
    if (multiply_overflows(tensor.size[i] - 1, stride, span) || span > kMaxOffset - extent)
      refuse("{} reaches beyond 2^62 elements: sizes [{}] with strides [{}].", name,
             fmt::join(tensor.size, ", "), fmt::join(tensor.stride, ", "));
    extent += span;
    if (stride % (alignment / element_size) != 0)
      refuse(
          "{} has stride {} in {}: strides must be multiples of {} elements ({} bytes); pad the rows or copy "
          "the tensor.",
          name, stride, kDimensions[i], alignment / element_size, alignment);
  }
  if (tensor.size[3] > 1 && tensor.stride[3] != 1)
    refuse(
        "{} has stride {} in head_dim: the last dimension must be contiguous (stride 1); transpose or copy "
        "the tensor.",
        name, tensor.stride[3]);
}

/// Refuses views in which two indices name one element, which kernels that write in parallel cannot honour.
void check_distinct(const char* name, const ConstTensorView& tensor) {
  std::array<int, 3> order = {2, 1, 0};
  if (tensor.stride[order[0]] > tensor.stride[order[1]]) std::swap(order[0], order[1]);
  if (tensor.stride[order[1]] > tensor.stride[order[2]]) std::swap(order[1], order[2]);
  if (tensor.stride[order[0]] > tensor.stride[order[1]]) std::swap(order[0], order[1]);
  std::int64_t covered =
      tensor.size[3];  // elements from the first to behind the last of the dimensions before
  for (const int i : order) {
    if (tensor.size[i] <= 1) continue;
    if (tensor.stride[i] < covered)
      refuse(
          "{} is written, but its elements overlap: stride {} in {} is less than the {} elements that lie "
          "between; give a tensor of its own.",
          name, tensor.stride[i], kDimensions[i], covered);
    covered += (tensor.size[i] - 1) * tensor.stride[i];
  }
}

constexpr const char* kScaleDimensions[] = {"sequences", "pages", "heads", "rows"};
using ScaleSizes = std::array<std::int64_t, 4>;

/// Whether each size is 1 or the one of `all`.
void check_scale_view(const char* name, const ConstScaleView& scales, const ScaleSizes& all) {
  check_pointer(name, scales.data, alignof(float));
  for (std::size_t i = 0; i < all.size(); ++i) {
    const std::int64_t size = scales.size[i];
    if (size != 1 && size != all[i])
      refuse("{} has {} {}: give one for all{}.", name, size, kScaleDimensions[i],
             all[i] == 1 ? "" : fmt::format(", or {}", all[i]));
    if (size != 1 && (scales.stride[i] < 0 || scales.stride[i] > kMaxOffset / all[i]))
      refuse("{} has stride {} in {}: strides must be 0 or more and within 2^62 elements.", name,
             scales.stride[i], kScaleDimensions[i]);
  }
}

}  // namespace

void check_tensor(const char* name, const ConstTensorView& tensor, const Sizes& sizes, int element_size,
                  Access access, int alignment) {
  const bool wants = std::ranges::any_of(sizes, [](const Size& size) { return size.value != 0; });
  if (!tensor.data && wants && std::ranges::all_of(tensor.size, [](auto size) { return size == 0; }))
    refuse("{} is not given.", name);
  bool empty = false;
  for (int i = 0; i < 4; ++i) {
    if (tensor.size[i] < 0)
      refuse("{} has {} {}: sizes must be 0 or more.", name, kDimensions[i], tensor.size[i]);
    if (tensor.size[i] != sizes[i].value) refuse_size(name, i, tensor.size[i], sizes[i]);
    empty |= tensor.size[i] == 0;
  }
  if (empty) return;
  if (!tensor.data) refuse("{} is null, but it has elements: give device memory.", name);
  if (!aligned(tensor.data, static_cast<std::uintptr_t>(alignment)))
    refuse("{} is at {}, which is no multiple of {} bytes: align its memory.", name, tensor.data, alignment);
  check_strides(name, tensor, element_size, alignment);
  if (access == Access::write) check_distinct(name, tensor);
}

void check_kv_tensor(const char* name, const ConstTensorView& tensor, Sizes sizes, const StoredKvRow& row,
                     const KvFormat& format, Access access) {
  sizes[3] = {row.columns, nullptr};
  if (row.type == DType::int8 && !format.is_plain_8bit() && tensor.size[3] != row.columns)
    refuse(
        "{} has rows of {} bytes, but rows of the KV format {} have {}: give bytes, with strides in bytes.",
        name, tensor.size[3], to_string(format), row.columns);
  check_tensor(name, tensor, sizes, size_of(row.type), access, row.alignment);
  check_type(name, tensor, row.type);
  if (tensor.size[2] > 1 && tensor.stride[2] < row.columns && access == Access::read && format.quantized() &&
      tensor.stride[2] != 0)
    refuse("{} has stride {} in length, but rows of the KV format {} have {} bytes: give a larger stride.",
           name, tensor.stride[2], to_string(format), row.columns);
}

void refuse_type(const char* name, DType given, DType wanted) {
  refuse("{} is {}, but the spec needs {}: give such a tensor, or another spec.", name, to_string(given),
         to_string(wanted));
}

void check_pointer(const char* name, const void* pointer, std::uintptr_t alignment) {
  if (!aligned(pointer, alignment))
    refuse("{} is at {}, which is no multiple of {} bytes: align its memory.", name, pointer, alignment);
}

std::int64_t cache_capacity(const AttentionSpec& spec, const ConstTensorView& k, const PageTableView& table) {
  if (k.size[0] == 0) return 0;
  return spec.kv.is_paged() ? times(table.columns, spec.kv.page_size) : k.size[2];
}

void check_page_table(const AttentionSpec& spec, const AttentionShape& shape, const char* k_name,
                      const ConstTensorView& k, const PageTableView& table) {
  if (!spec.kv.is_cache()) {
    if (table.data)
      refuse("page_table is given, but the spec has no cache: set spec.kv to KvLayout::paged(page_size).");
    return;
  }
  if (table.data && table.sequences != shape.batch)
    refuse("page_table has {} rows, but the call has {} sequences: give a row for each.", table.sequences,
           shape.batch);
  if (shape.batch == 0) return;
  if (shape.seqlen_kv > cache_capacity(spec, k, table))
    refuse("max_seqlen_kv is {}, but {} has room for {} keys: make it wider or the maximum smaller.",
           shape.seqlen_kv,
           spec.kv.is_paged() ? table.starts ? "page_table" : "a row of page_table"
                              : fmt::format("a slot of {}", k_name),
           cache_capacity(spec, k, table));
  if (!table.data) {
    const bool empty = table.columns == 0 && table.sequences == shape.batch;  // no sequence has a key
    if (spec.kv.is_paged() && !empty)
      refuse(
          "page_table is null, but the spec has pages: give int32 [{}, pages of the longest] in device "
          "memory.",
          shape.batch);
    if (!spec.kv.is_paged() && k.size[0] < shape.batch)
      refuse("{} has {} slots for {} sequences: give as many, or a page_table that says which slot is whose.",
             k_name, k.size[0], shape.batch);
    return;
  }
  check_pointer("page_table", table.data, alignof(std::int32_t));
  check_pointer("page_table.starts", table.starts, alignof(std::int32_t));
  if (table.starts && !spec.kv.is_paged())
    refuse("page_table.starts is given, but a slot is one page: set spec.kv to KvLayout::paged(page_size).");
  if (table.starts && table.stride != 0)
    refuse("page_table has starts and stride {}: entries lie one behind the other, so leave stride 0.",
           table.stride);
  if (spec.kv.is_paged() && k.size[0] > kMaxInt / spec.kv.page_size)
    refuse("{} has {} pages of {} rows: give at most 2^31 - 1 rows in all.", k_name, k.size[0],
           spec.kv.page_size);
  if (table.columns < 0 || table.columns > kMaxInt || (!spec.kv.is_paged() && table.columns != 1))
    refuse("page_table has {} columns: {}.", table.columns,
           !spec.kv.is_paged()
               ? "give one, the slot of each sequence, or set spec.kv to KvLayout::paged(page_size)"
               : "give one for each page of the longest sequence");
  if (table.stride < 0 || table.stride > kMaxInt)
    refuse("page_table has stride {}: it must be from 0 to 2^31 - 1 elements.", table.stride);
}

void check_kv_lengths(const AttentionSpec& spec, const AttentionShape& shape, const std::int32_t* lengths) {
  if (!spec.kv.has_lengths() && lengths)
    refuse(
        "kv_lengths is given, but the spec has none: set spec.kv to KvLayout::padded() for keys that "
        "are padding, or to slots() or paged(page_size) for a cache.");
  if (spec.kv.has_lengths() && !lengths && shape.batch > 0)
    refuse("kv_lengths is null, but the spec has {}: give one length per batch entry in device memory.",
           spec.kv.is_cache() ? "a cache" : "them");
  check_pointer("kv_lengths", lengths, alignof(std::int32_t));
  if (spec.kv.is_padded() && spec.mask == causal() && shape.seqlen_q != 1 &&
      shape.seqlen_q != shape.seqlen_kv)
    refuse(
        "The spec has causal with kv_lengths, which has two meanings for {} queries and {} keys: set "
        "spec.kv to KvLayout::slots() where the last query is to see a sequence's own last key, or "
        "take causal_top_left or a mask program where K is padded.",
        shape.seqlen_q, shape.seqlen_kv);
}

void check_offsets(const char* name, const AttentionSpec& spec, const AttentionShape& shape,
                   const std::int32_t* cu_seqlens) {
  if (!spec.varlen && cu_seqlens) refuse("{} is given, but the spec has no varlen: set spec.varlen.", name);
  if (spec.varlen && !cu_seqlens && shape.batch > 0)
    refuse("{} is null, but the spec has varlen: give int32 [batch_size + 1] in device memory.", name);
  check_pointer(name, cu_seqlens, alignof(std::int32_t));
}

void check_heads(const AttentionShape& shape) {
  const bool divides = shape.heads_kv == 0 ? shape.heads_q == 0 : shape.heads_q % shape.heads_kv == 0;
  if (!divides)
    refuse("q has {} heads and k has {}: the heads of q must be a multiple of k's heads.", shape.heads_q,
           shape.heads_kv);
}

void check_scales(const char* name, const AttentionSpec& spec, const KvFormat& format,
                  const AttentionShape& shape, const ConstTensorView& k, const ConstScaleView& scales) {
  const std::string type = format.quantized() ? to_string(format) : to_string(spec.dtype);
  const char tensor = name[0];  // of k_scale or v_scale
  if (!format.has_argument()) {
    if (scales.data)
      refuse("{} is given, but {} is {}, which has no scales: set spec.kv.{}_format, or leave it out.", name,
             tensor, type, tensor);
    return;
  }
  const ScaleSizes all = {shape.batch, spec.kv.is_cache() ? k.size[0] : 1, shape.heads_kv, k.size[2]};
  if (std::ranges::find(all, 0) != all.end()) return;
  if (!scales.data)
    refuse("{} is null, but {} is {}: give its scales in device memory, one float for all or more.", name,
           tensor, type);
  check_scale_view(name, scales, all);
  if (spec.kv.shared_prefix && scales.size[0] != 1)
    refuse(
        "{} has {} sequences, but with shared_prefix sequences have keys in common, whose codes have one "
        "scale: give one for all sequences.",
        name, scales.size[0]);
  for (std::size_t i = 1; i < all.size(); i += 2)
    if (scales.size[i] != 1 && !spec.kv.key_scales)
      refuse("{} has {} {}, but the spec has one scale for all keys of a head: set spec.kv.key_scales.", name,
             scales.size[i], kScaleDimensions[i]);
}

void check_q_scale(const AttentionSpec& spec, const AttentionShape& shape, const ConstScaleView& scales) {
  if (!spec.prologue.q_codes) {
    if (scales.data)
      refuse("q_scale is given, but Q is {}, which has no scales: set spec.prologue.q_codes or leave it out.",
             to_string(spec.dtype));
    return;
  }
  const ScaleSizes all = {shape.batch, 1, shape.heads_kv, 1};
  if (std::ranges::find(all, 0) != all.end()) return;
  if (!scales.data)
    refuse(
        "q_scale is null, but Q is {}: give its scale in device memory, one float for all, or one for each "
        "sequence and KV head.",
        to_string(spec.q_type()));
  check_scale_view("q_scale", scales, all);
}

void check_key_lists(const AttentionSpec& spec, const AttentionShape& shape, std::int64_t rows_q,
                     const IndicesView& indices) {
  constexpr const char* kIndexDimensions[] = {"sequences", "queries", "heads", "top-k"};
  if (!spec.indices) {
    if (indices.data) refuse("indices is given, but the spec has none: set spec.indices.");
    if (indices.topk_length) refuse("topk_length is given without indices, whose lengths it tells.");
    return;
  }
  const auto [sequences, queries, heads, top_k] = indices.size;
  const std::int64_t batch = spec.varlen ? 1 : shape.batch;
  if ((sequences != 1 && sequences != batch) || queries != rows_q || heads != shape.heads_kv)
    refuse("indices has size [{}, {}, {}, {}], but the call needs [{}, {}, {}, top-k].", sequences, queries,
           heads, top_k, batch == 1 ? "1" : fmt::format("1 or {}", batch), rows_q, shape.heads_kv);
  if (top_k < 0 || top_k > kMaxInt / 2)
    refuse("indices has top-k {}: it must be from 0 to {}.", top_k, kMaxInt / 2);
  if (std::ranges::find(indices.size, 0) != indices.size.end() || shape.batch == 0) return;
  if (!indices.data)
    refuse("indices is null, but the spec has them: give int32 [{}, {}, {}, top-k] in device memory.",
           sequences, queries, heads);
  check_pointer("indices", indices.data, alignof(std::int32_t));
  for (std::size_t i = 0; i < indices.size.size(); ++i) {
    const std::int64_t size = indices.size[i], stride = indices.stride[i];
    if (size > 1 && (stride < 0 || stride > kMaxOffset / size || (i == 3 && stride != 1)))
      refuse("indices has stride {} in {}: {}.", stride, kIndexDimensions[i],
             i == 3 ? "a list's entries lie one behind the other"
                    : "strides must be 0 or more and within 2^62 elements");
  }
  check_pointer("topk_length", indices.topk_length, alignof(std::int32_t));
  for (std::size_t i = 0; i < indices.topk_length_stride.size(); ++i)
    if (const std::int64_t size = indices.size[i], stride = indices.topk_length_stride[i];
        size > 1 && (stride < 0 || stride > kMaxOffset / size))
      refuse("topk_length has stride {} in {}: strides must be 0 or more and within 2^62 elements.", stride,
             kIndexDimensions[i]);
}

RowStrides row_strides(const RowStrides& given, const RowSizes& sizes) {
  if (given != RowStrides{}) return given;
  return {times(sizes.heads, sizes.rows), sizes.rows, 1};
}

void check_rows(const char* name, const float* data, const RowStrides& given, const RowSizes& sizes,
                Access access) {
  check_pointer(name, data, alignof(float));
  if (!data || sizes.batch == 0 || sizes.heads == 0 || sizes.rows == 0) return;
  const ConstTensorView rows = rows_view(data, given, sizes);
  check_strides(name, rows, 16, 16);  // any stride keeps the alignment of elements of that size
  if (access == Access::write) check_distinct(name, rows);
}

ConstTensorView rows_view(const float* data, const RowStrides& given, const RowSizes& sizes) {
  const RowStrides strides = row_strides(given, sizes);
  return {data, {sizes.batch, sizes.heads, sizes.rows, 1}, {strides.batch, strides.head, strides.row, 1}};
}

RowsParam rows_param(const float* data, const RowStrides& given, const RowSizes& sizes) {
  const RowStrides strides = row_strides(given, sizes);
  return {const_cast<float*>(data), strides.batch, strides.head, strides.row};
}

TensorParam tensor_param(const ConstTensorView& tensor) {
  const auto stride = [&](int i) { return tensor.size[i] > 1 ? tensor.stride[i] : 0; };
  return {const_cast<void*>(tensor.data), stride(0), stride(1), stride(2)};
}

ScaleParam scale_param(const ConstScaleView& scales) {
  const auto stride = [&](int i) { return scales.size[i] > 1 ? scales.stride[i] : 0; };
  return {const_cast<float*>(scales.data), stride(0), stride(1), stride(2), stride(3)};
}

IndicesParam indices_param(const IndicesView& indices) {
  const auto stride = [&](int i) { return indices.size[i] > 1 ? indices.stride[i] : 0; };
  const auto length_stride = [&](int i) { return indices.size[i] > 1 ? indices.topk_length_stride[i] : 0; };
  return {.keys = indices.data,
          .stride_b = stride(0),
          .stride_q = stride(1),
          .stride_h = stride(2),
          .count = static_cast<int>(indices.size[3]),
          .topk_length = indices.topk_length,
          .length_stride_b = length_stride(0),
          .length_stride_q = length_stride(1)};
}

PageTableParam page_table_param(const PageTableView& table, const ConstTensorView& k) {
  return {table.data, static_cast<int>(table.stride ? table.stride : table.columns),
          static_cast<int>(k.size[0]), table.starts, static_cast<unsigned>(table.columns)};
}

}  // namespace flashjit
