// Whether scores may lie next to the least float.
#pragma once

#include "expr/graph.hpp"

namespace flashjit::expr {

/// Whether a score program may give numbers that are -infinity once they are exponents of 2, as additive
/// masks of finfo.min do: by a literal, or by a tensor of fp32 or bf16 or a float scalar that is added to the
/// score or chosen instead of it.
bool may_be_far(const Graph& graph, int root);

}  // namespace flashjit::expr
