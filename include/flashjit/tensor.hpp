// Views of device memory. flashjit never owns, copies or moves a tensor.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace flashjit {

/// A four-dimensional view: pointer, sizes and strides in elements, in the order batch, heads, length, dim.
///
/// The last dimension must be contiguous; pointer and other strides must be multiples of 16 bytes. Any memory
/// layout that can be told so works without a copy: the factories below cover the usual ones.
template <class Void>
struct BasicTensorView {
  Void* data = nullptr;
  std::array<std::int64_t, 4> size{};    ///< batch, heads, length, dim
  std::array<std::int64_t, 4> stride{};  ///< in elements, same order

  /// Memory order [batch, heads, length, dim].
  static BasicTensorView bhsd(Void* data, std::int64_t b, std::int64_t h, std::int64_t s, std::int64_t d) {
    return {data, {b, h, s, d}, {h * s * d, s * d, d, 1}};
  }
  /// Memory order [batch, length, heads, dim].
  static BasicTensorView bshd(Void* data, std::int64_t b, std::int64_t s, std::int64_t h, std::int64_t d) {
    return {data, {b, h, s, d}, {s * h * d, d, h * d, 1}};
  }
  /// Part `index` (0: Q, 1: K, 2: V) of a packed tensor [batch, length, 3, heads, dim]. `data` is the whole
  /// one.
  static BasicTensorView packed_qkv(Void* data, std::int64_t b, std::int64_t s, std::int64_t h,
                                    std::int64_t d, int index, std::size_t element_size) {
    using Byte = std::conditional_t<std::is_const_v<Void>, const char, char>;
    return {static_cast<Byte*>(data) + index * h * d * static_cast<std::int64_t>(element_size),
            {b, h, s, d},
            {s * 3 * h * d, d, 3 * h * d, 1}};
  }

  /// A view to write through can be read through.
  operator BasicTensorView<const void>() const requires(!std::is_const_v<Void>) {
    return {data, size, stride};
  }
};

using TensorView = BasicTensorView<void>;
using ConstTensorView = BasicTensorView<const void>;

/// A block map: uint8 [batch or 1, heads_q or 1, ceil(seqlen_q / block.q), ceil(seqlen_kv / block.kv)], in
/// device memory, contiguous; zero: no pair of the block attends.
struct BlockMapView {
  const std::uint8_t* data = nullptr;
  std::array<std::int64_t, 4> size{};  ///< batch or 1, heads or 1, block rows, block columns
};

/// Device memory lent for one call.
struct Workspace {
  void* data = nullptr;  ///< 256-byte aligned
  std::size_t bytes = 0;
};

}  // namespace flashjit
