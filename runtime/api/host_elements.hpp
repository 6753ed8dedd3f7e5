// Elements of tensors in the host's memory, as the CPU reference reads and writes them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "expr/kv_codec.hpp"
#include "flashjit/error.hpp"
#include "flashjit/kv_format.hpp"
#include "flashjit/tensor.hpp"
#include "support/dtypes.hpp"
#include "support/refuse.hpp"
#include "support/small_float.hpp"

namespace flashjit {

inline double read_element(ElementType type, const void* data, std::int64_t index) {
  const auto as = [&]<class T>(T) { return static_cast<double>(static_cast<const T*>(data)[index]); };
  switch (type) {
    case ElementType::fp32:
      return as(float{});
    case ElementType::fp16:
      return Fp16::decode(static_cast<const std::uint16_t*>(data)[index]);
    case ElementType::bf16:
      return Bf16::decode(static_cast<const std::uint16_t*>(data)[index]);
    case ElementType::int32:
      return as(std::int32_t{});
    case ElementType::int64:
      return as(std::int64_t{});
    case ElementType::int16:
      return as(std::int16_t{});
    case ElementType::int8:
      return as(std::int8_t{});
    case ElementType::uint8:
      return as(std::uint8_t{});
    case ElementType::boolean:
      return as(std::uint8_t{}) != 0;
  }
  throw Error(ErrorCode::internal, "an ElementType that cannot be read");
}

inline double read_element(DType dtype, const void* data, std::int64_t index) {
  return dtype_info(dtype).decode(static_cast<const std::byte*>(data) + index * size_of(dtype));
}
/// A key's row of the scales' tensor, whose keys may share it; null where the format has none.
template <class Void>
auto* block_scale_row(const KvFormat& format, const BasicTensorView<Void>& scales, std::int64_t b,
                      std::int64_t h, std::int64_t s) {
  using Byte = std::conditional_t<std::is_const_v<Void>, const std::uint8_t, std::uint8_t>;
  if (!format.has_block_scales()) return static_cast<Byte*>(nullptr);
  const std::int64_t row = s / std::max(format.keys, 1);
  return static_cast<Byte*>(scales.data) +
         (b * scales.stride[0] + h * scales.stride[1] + row * scales.stride[2]) * size_of(format.scale_type);
}
/// Where a key's scale is, in elements.
template <class Float>
std::int64_t offset_of_scale(const BasicScaleView<Float>& scales, std::int64_t b, std::int64_t page,
                             std::int64_t h, std::int64_t row) {
  const std::int64_t at[] = {b, page, h, row};
  std::int64_t offset = 0;
  for (std::size_t i = 0; i < scales.size.size(); ++i)
    if (scales.size[i] > 1) offset += at[i] * scales.stride[i];
  return offset;
}

/// A scale of Q, K or V, which only the reference sees.
inline double checked_scale(const char* name, double scale, std::int64_t b, std::int64_t page, std::int64_t h,
                            std::int64_t row) {
  if (!(scale > 0 && std::isfinite(scale)))
    refuse("{} is {} in sequence {}, page {}, head {}, row {}: scales are finite and above 0.", name, scale,
           b, page, h, row);
  return scale;
}

inline void write_element(DType dtype, void* data, std::int64_t index, double value) {
  dtype_info(dtype).encode(value, static_cast<std::byte*>(data) + index * size_of(dtype));
}

}  // namespace flashjit
