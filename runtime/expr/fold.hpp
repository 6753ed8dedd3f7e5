// Smaller trees of the same value.
#pragma once

#include "flashjit/expr.hpp"

namespace flashjit::expr {

/// Computes what is constant and drops what does nothing, such as x * 1. Never changes a value: ints wrap,
/// division by zero gives 0; of floats, only + - * / and comparisons of literals are computed, rounded to
/// fp32 as the kernels do, and nothing is reassociated. A tree in which nothing folds comes back itself.
NodePtr fold(const NodePtr& tree);

}  // namespace flashjit::expr
