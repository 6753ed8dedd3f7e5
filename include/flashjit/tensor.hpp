// Views of device memory. flashjit never owns, copies or moves a tensor.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string_view>
#include <type_traits>

#include "flashjit/types.hpp"

namespace flashjit {

/// A four-dimensional view: pointer, sizes and strides in elements, in the order batch, heads, length, dim.
///
/// The last dimension must be contiguous; pointer and other strides must be multiples of 16 bytes. Any such
/// memory layout works without a copy; the factories below cover the usual ones.
template <class Void>
struct BasicTensorView {
  Void* data = nullptr;
  std::array<std::int64_t, 4> size{};    ///< batch, heads, length, dim
  std::array<std::int64_t, 4> stride{};  ///< in elements, same order
  /// Element type. spec_of() reads it; beside a spec it may be left out, and must be the spec's.
  std::optional<DType> dtype = {};

  /// Memory order [batch, heads, length, dim].
  static BasicTensorView bhsd(Void* data, std::int64_t b, std::int64_t h, std::int64_t s, std::int64_t d,
                              std::optional<DType> dtype = {}) {
    return {data, {b, h, s, d}, {h * s * d, s * d, d, 1}, dtype};
  }
  /// Memory order [batch, length, heads, dim].
  static BasicTensorView bshd(Void* data, std::int64_t b, std::int64_t s, std::int64_t h, std::int64_t d,
                              std::optional<DType> dtype = {}) {
    return {data, {b, h, s, d}, {s * h * d, d, h * d, 1}, dtype};
  }
  /// Part `index` (0: Q, 1: K, 2: V) of a packed tensor [batch, length, 3, heads, dim], which starts at
  /// `data`.
  static BasicTensorView packed_qkv(Void* data, std::int64_t b, std::int64_t s, std::int64_t h,
                                    std::int64_t d, int index, std::size_t element_size) {
    using Byte = std::conditional_t<std::is_const_v<Void>, const char, char>;
    return {static_cast<Byte*>(data) + index * h * d * static_cast<std::int64_t>(element_size),
            {b, h, s, d},
            {s * 3 * h * d, d, 3 * h * d, 1}};
  }

  /// The first `count` columns: with spec.kv.shared_kv V is K's first ones.
  BasicTensorView first_columns(std::int64_t count) const {
    return {data, {size[0], size[1], size[2], count}, stride, dtype};
  }

  /// A writable view converts to a readable one.
  operator BasicTensorView<const void>() const requires(!std::is_const_v<Void>) {
    return {data, size, stride, dtype};
  }
};

using TensorView = BasicTensorView<void>;
using ConstTensorView = BasicTensorView<const void>;

/// Where rows are in LSE, or in another tensor with a float for each row of Q, in elements. All 0:
/// contiguous, [batch, heads, length] of Q, which where sequences are packed is [heads, rows].
struct RowStrides {
  std::int64_t batch = 0, head = 0, row = 0;

  bool operator==(const RowStrides&) const = default;
};

/// A block map: uint8 [batch or 1, heads_q or 1, ceil(seqlen_q / block.q), ceil(seqlen_kv / block.kv)], in
/// device memory, contiguous; zero: no pair of the block attends.
struct BlockMapView {
  const std::uint8_t* data = nullptr;
  std::array<std::int64_t, 4> size{};  ///< batch or 1, heads or 1, block rows, block columns
};

/// Which pages of a paged cache have a sequence's keys: int32 [sequences, columns] in device memory. Key n of
/// sequence b is row n % page_size of page data[b * stride + n / page_size]. Entries behind the pages of a
/// sequence's keys are not read. For slots a table has one column: the slot of each sequence.
///
/// With starts the sequences' entries are in one row (CSR: indptr and indices): sequence b's begin at
/// data[starts[b]], and columns is how many entries there are, which no sequence can exceed. Give
/// max_seqlen_kv then: its default is all entries times page_size.
struct PageTableView {
  const std::int32_t* data = nullptr;
  std::int64_t sequences = 0, columns = 0;
  std::int64_t stride = 0;               ///< from one sequence to the next, in elements; 0: columns
  const std::int32_t* starts = nullptr;  ///< [sequences], or more, in device memory; null: each has a row

  /// On the host, where the table is: what it has for a page of a sequence.
  std::int64_t entry(std::int64_t sequence, std::int64_t page) const {
    if (!starts) return data[sequence * (stride ? stride : columns) + page];
    const std::int64_t at = starts[sequence] + page;
    return at >= 0 && at < columns ? data[at] : -1;
  }
};

/// Which keys each query attends to, with spec.indices: int32 [sequences or 1, queries, KV heads, top-k] in
/// device memory, with spec.varlen packed like Q: [1, rows of Q, KV heads, top-k]. Key n of a sequence is its
/// n-th row of K, in pages too; other numbers are no key. A dimension of size 1 of sequences is shared by
/// all.
struct IndicesView {
  const std::int32_t* data = nullptr;
  std::array<std::int64_t, 4> size{};    ///< sequences or 1, queries, KV heads, top-k
  std::array<std::int64_t, 4> stride{};  ///< in elements, the last 1; not read where the size is 1
  /// How many first entries of a query's lists count, in device memory, [sequences or 1, queries] as above.
  /// Entries behind them are not read. A length below 0 counts as 0, one beyond top-k as top-k. Null: all.
  const std::int32_t* topk_length = nullptr;
  std::array<std::int64_t, 2> topk_length_stride{};  ///< in elements; 0 repeats a length

  static IndicesView contiguous(const std::int32_t* data, std::int64_t sequences, std::int64_t queries,
                                std::int64_t heads_kv, std::int64_t top_k) {
    return {data,
            {sequences, queries, heads_kv, top_k},
            {queries * heads_kv * top_k, heads_kv * top_k, top_k, 1}};
  }
};

/// Scales of K or V where these are of 8 bits: fp32 [sequences, pages, KV heads, rows] in device memory. A
/// key is its code times the scale of its sequence, page, head and row. A dimension of size 1 is shared by
/// all.
///
/// Without spec.kv.key_scales pages and rows have size 1. The pages of a cache in slots are the slots, and
/// their rows its capacity; without a cache there is one page, with the rows of K: packed ones with
/// spec.varlen.
template <class Float>
struct BasicScaleView {
  Float* data = nullptr;
  std::array<std::int64_t, 4> size{1, 1, 1, 1};  ///< sequences, pages, KV heads, rows
  std::array<std::int64_t, 4> stride{};          ///< in elements, same order; not read where the size is 1

  /// One for all keys.
  static BasicScaleView of_tensor(Float* data) { return {data}; }
  /// [sequences, heads], contiguous.
  static BasicScaleView of_heads(Float* data, std::int64_t sequences, std::int64_t heads) {
    return {data, {sequences, 1, heads, 1}, {heads, 0, 1, 0}};
  }
  /// [pages, heads], contiguous.
  static BasicScaleView of_pages(Float* data, std::int64_t pages, std::int64_t heads) {
    return {data, {1, pages, heads, 1}, {0, heads, 1, 0}};
  }
  /// [pages, heads, rows], contiguous: one for each key.
  static BasicScaleView of_keys(Float* data, std::int64_t pages, std::int64_t heads, std::int64_t rows) {
    return {data, {1, pages, heads, rows}, {0, heads * rows, rows, 1}};
  }

  operator BasicScaleView<const Float>() const requires(!std::is_const_v<Float>) {
    return {data, size, stride};
  }
};

using ScaleView = BasicScaleView<float>;
using ConstScaleView = BasicScaleView<const float>;

/// The most dimensions of a captured tensor.
inline constexpr int kMaxCaptureDims = 6;

/// A value for a name that a program of the spec declares: a tensor in device memory, or a scalar. The
/// caller owns both; nothing is copied. Names must live until the call returns, memory until its kernels have
/// ended.
struct Capture {
  std::string_view name;
  const void* data = nullptr;  ///< of a tensor, aligned to its element
  float* grad = nullptr;  ///< backward, if the program declares "grad": fp32, contiguous, the tensor's sizes.
                          ///< The gradient is ADDED to the memory: zero it first. Jvp: the tangent, read
  int rank = 0;           ///< of a tensor, 1 to 6; 0: a scalar
  std::array<std::int64_t, kMaxCaptureDims> size{};  ///< the first `rank` count; each at least 1
  std::array<std::int64_t, kMaxCaptureDims>
      stride{};                          ///< in elements; 0 repeats the tensor, negative ones are refused
  double scalar = 0;                     ///< an int must be given as an integer from -2^31 to 2^31 - 1
  std::optional<ElementType> type = {};  ///< element type of `data`, checked if given

  /// A contiguous tensor, the last dimension fastest.
  static Capture tensor(std::string_view name, const void* data, std::initializer_list<std::int64_t> sizes,
                        float* grad = nullptr) {
    Capture made{.name = name, .data = data, .grad = grad, .rank = static_cast<int>(sizes.size())};
    constexpr std::int64_t kTooFar = std::int64_t{1}
                                     << 62;  // is refused at the call, as are seven dimensions
    std::int64_t stride = 1;
    for (int i = made.rank; i-- > 0;) {
      const std::int64_t size = sizes.begin()[i];
      if (i < kMaxCaptureDims) made.size[i] = size, made.stride[i] = stride;
      if (size > 0) stride = stride > kTooFar / size ? kTooFar : stride * size;
    }
    return made;
  }
  /// A tensor with any non-negative strides, in elements, as many as sizes.
  static Capture strided(std::string_view name, const void* data, std::initializer_list<std::int64_t> sizes,
                         std::initializer_list<std::int64_t> strides, float* grad = nullptr) {
    Capture made = tensor(name, data, sizes, grad);
    made.stride = {};
    for (std::size_t i = 0; i < strides.size() && i < kMaxCaptureDims; ++i)
      made.stride[i] = strides.begin()[i];
    return made;
  }
  static Capture number(std::string_view name, double value) { return {.name = name, .scalar = value}; }
};

/// Device memory lent for one call, until its kernels have ended on the stream. It may hold anything: a call
/// initializes what it uses. Calls on one stream may share it, whatever their specs and passes; calls on
/// several streams need one each. Too little is refused with the number of bytes (invalid_argument).
struct Workspace {
  void* data = nullptr;  ///< 256-byte aligned
  std::size_t bytes = 0;
};

/// With spec.partial.dropout_place: where a call is in the problem whose dropout mask it gets. Its pair (b,
/// h, i, j) is there (batch + b, head + h, q + q_step * i, kv + kv_step * j). Where the steps are 1 and q and
/// kv multiples of 16 it costs nothing; else each random number is drawn eight times.
struct DropoutPlace {
  std::int64_t batch = 0, head = 0;
  std::int64_t heads = 0;  ///< of a batch entry there; 0: as many as here
  std::int64_t q = 0, kv = 0;
  std::int64_t q_step = 1, kv_step = 1;

  bool operator==(const DropoutPlace&) const = default;
};

}  // namespace flashjit
