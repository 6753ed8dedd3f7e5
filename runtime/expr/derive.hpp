// Derivatives of score programs, as programs.
#pragma once

#include <vector>

#include "flashjit/expr.hpp"

namespace flashjit::expr {

/// d root / d variable of a float program, where `variable` is any of its float nodes: the score, or the read
/// of a tensor. At kinks: abs'(0) = 0; min and max give it all to the first of equals; floor, comparisons and
/// conversions to int are constant; select follows its condition, whose other arm may be infinite.
NodePtr derivative(const NodePtr& root, const NodePtr& variable);

/// The distinct reads of tensors with a gradient.
std::vector<NodePtr> reads_with_grad(const NodePtr& root);

}  // namespace flashjit::expr
