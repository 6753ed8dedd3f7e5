// The element types of tensors: what differs from one to the other, wherever it is needed.
#pragma once

#include <optional>
#include <span>
#include <string_view>

#include "flashjit/types.hpp"

namespace flashjit {

struct DTypeInfo {
  DType dtype;
  std::string_view name;               ///< in specs and records: "bf16"
  std::string_view cuda_name;          ///< in templates: "bf16", "float"
  std::string_view mma_name;           ///< in PTX's mma and wgmma; empty: tensor cores do not multiply it
  std::optional<ElementType> element;  ///< of a captured tensor of the same floats
  double unit_roundoff;                ///< half the distance from 1 to the next number
  double largest;                      ///< that scales are made from
  double (*round)(double);             ///< to the nearest number of the type, ties to even
  void (*encode)(double value, void* to);
  double (*decode)(const void* from);
};

std::span<const DTypeInfo> dtypes();
/// Throws Error(internal) for a number that a cast made a DType.
const DTypeInfo& dtype_info(DType dtype);

}  // namespace flashjit
