// Derivatives of programs of floats, as programs.
#pragma once

#include <vector>

#include "flashjit/expr.hpp"

namespace flashjit::expr {

/// d root / d variable of a float program, where `variable` is any of its float nodes: the score, or the read
/// of a tensor. At kinks: abs'(0) = 0; min and max give it all to the first of equals, or to a number next to
/// NaN; floor, comparisons and conversions to int are constant; select follows its condition. An operand that
/// is not taken gets zero, though its own slope, or that of the function around it, is infinite.
NodePtr derivative(const NodePtr& root, const NodePtr& variable);

/// The distinct reads of tensors with a gradient.
std::vector<NodePtr> reads_with_grad(const NodePtr& root);
/// The distinct element_at() of a program of Q or K.
std::vector<NodePtr> reads_of_row(const NodePtr& root);

}  // namespace flashjit::expr
