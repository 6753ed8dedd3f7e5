// Checks that all calls share: of tensors, caches and packed sequences.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <span>

#include "flashjit/runtime.hpp"
#include "support/overflow.hpp"
#include "templates/common/params.cuh"

namespace flashjit {

/// The most that a kernel's int holds, and that an offset of elements may be.
inline constexpr std::int64_t kMaxInt = std::numeric_limits<int>::max(), kMaxOffset = std::int64_t{1} << 62;
/// The owner of the rows of a page.
inline constexpr const char* kPageSize = "spec.kv.page_size";
/// The size that a dimension must have, and where it comes from: a tensor's name, or null for the spec.
struct Size {
  std::int64_t value;
  const char* owner;
};
using Sizes = std::array<Size, 4>;

enum class Access { read, write };

/// Rows of LSE, or of another tensor with its strides.
struct RowSizes {
  std::int64_t batch, heads, rows;
};
/// LSE has a float for each row of Q.
inline RowSizes rows_of(const ConstTensorView& q) { return {q.size[0], q.size[1], q.size[2]}; }
/// The strides as given, or contiguous ones.
RowStrides row_strides(const RowStrides& given, const RowSizes& sizes);
/// Whether pointer and strides fit floats; where they are written, each has memory of its own.
void check_rows(const char* name, const float* data, const RowStrides& strides, const RowSizes& sizes,
                Access access);
ConstTensorView rows_view(const float* data, const RowStrides& strides, const RowSizes& sizes);
RowsParam rows_param(const float* data, const RowStrides& strides, const RowSizes& sizes);

/// Whether the view has these sizes, and pointers and strides that kernels can read or write.
void check_tensor(const char* name, const ConstTensorView& tensor, const Sizes& sizes, int element_size,
                  Access access, int alignment = 16);
/// The same of rows of K or V.
void check_kv_tensor(const char* name, const ConstTensorView& tensor, Sizes sizes, const StoredKvRow& row,
                     const KvFormat& format, Access access);
[[noreturn]] void refuse_type(const char* name, DType given, DType wanted);
/// Where the view has an element type, it must be the spec's.
template <class Void>
void check_type(const char* name, const BasicTensorView<Void>& tensor, DType wanted) {
  if (tensor.dtype.value_or(wanted) != wanted) refuse_type(name, *tensor.dtype, wanted);
}
void check_pointer(const char* name, const void* pointer, std::uintptr_t alignment);

/// Product and sum of a caller's sizes, which nothing bounds: what leaves 63 bits is the largest number.
inline std::int64_t times(std::int64_t a, std::int64_t b) {
  std::int64_t product = 0;
  return multiply_overflows(a, b, product) ? std::numeric_limits<std::int64_t>::max() : product;
}
inline std::int64_t plus(std::int64_t a, std::int64_t b) {
  std::int64_t sum = 0;
  return add_overflows(a, b, sum) ? std::numeric_limits<std::int64_t>::max() : sum;
}

/// How many keys of a sequence there is room for: in the pages of its table's row, or in its slot.
std::int64_t cache_capacity(const AttentionSpec& spec, const ConstTensorView& k, const PageTableView& table);
/// `k_name` is what the caller knows the cache's K by.
void check_page_table(const AttentionSpec& spec, const AttentionShape& shape, const char* k_name,
                      const ConstTensorView& k, const PageTableView& table);
void check_kv_lengths(const AttentionSpec& spec, const AttentionShape& shape, const std::int32_t* lengths);
void check_offsets(const char* name, const AttentionSpec& spec, const AttentionShape& shape,
                   const std::int32_t* cu_seqlens);
void check_heads(const AttentionShape& shape);

/// The scales of K or V as the spec has them; `k` is what has the keys' rows: a tensor, packed rows, pages or
/// slots.
void check_scales(const char* name, const AttentionSpec& spec, const KvFormat& format,
                  const AttentionShape& shape, const ConstTensorView& k, const ConstScaleView& scales);
/// That of Q, with spec.prologue.q_codes.
void check_q_scale(const AttentionSpec& spec, const AttentionShape& shape, const ConstScaleView& scales);

/// `rows_q`: of a sequence's queries, or of all where they are packed.
void check_key_lists(const AttentionSpec& spec, const AttentionShape& shape, std::int64_t rows_q,
                     const IndicesView& indices);

/// A stride that no index uses is not handed on: callers may have left anything in it.
TensorParam tensor_param(const ConstTensorView& tensor);
ScaleParam scale_param(const ConstScaleView& scales);
IndicesParam indices_param(const IndicesView& indices);
PageTableParam page_table_param(const PageTableView& table, const ConstTensorView& k);

/// The view's memory; null where no element of it is ever touched.
template <class View>
const void* memory_of(const View& view) {
  return std::ranges::find(view.size, 0) == view.size.end() ? view.data : nullptr;
}

}  // namespace flashjit
