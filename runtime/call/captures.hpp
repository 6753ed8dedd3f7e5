// The values of the names that a spec's programs declare: checked, and as the kernels are handed them.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "expr/declarations.hpp"
#include "flashjit/tensor.hpp"
#include "flashjit/types.hpp"
#include "templates/common/params.cuh"

namespace flashjit {

/// Throws Error(invalid_argument) unless every declared name has one value that fits, and no other name has.
void check_captures(std::span<const expr::Declaration> declared, std::span<const Capture> given, Pass pass);

/// Takes captures that were checked. Gradients are handed on in the backward pass alone.
void set_captures(Params& params, std::span<const expr::Declaration> declared, std::span<const Capture> given,
                  Pass pass);

struct NamedPointer {
  std::string_view name;
  const void* pointer;
};
/// These and the captures, without nulls.
std::vector<NamedPointer> with_captures(std::vector<NamedPointer> pointers,
                                        std::span<const Capture> captures);

}  // namespace flashjit
