// The formats of K and V in a Problem, from which kernels decode rows.
#pragma once

#include <string>

#include "flashjit/spec.hpp"

namespace flashjit::render {

/// The structs KFormat and VFormat where rows are decoded (templates/common/kv_format.cuh); else nothing.
std::string kv_formats_text(const KernelSpec& spec);
/// The same of any K and V, also of codes that kernels read as they are.
std::string stored_formats_text(const KernelSpec& spec);

}  // namespace flashjit::render
