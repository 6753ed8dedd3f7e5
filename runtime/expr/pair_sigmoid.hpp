// What kernels use of programs of weights: that they are finite; and of one sigmoid, which they find for
// several pairs by one reciprocal.
#pragma once

#include "expr/graph.hpp"

namespace flashjit::expr {

/// A program of weights that is sums and products of the score, positions, values that all pairs share, and
/// one sigmoid: finite for finite scores, and so is its derivative.
struct PairSigmoid {
  int place = -1;              ///< of the sigmoid; -1: the program is another
  int exponent = -1;           ///< the sigmoid is 1 / (1 + exp2(exponent))
  int score = -1, slope = -1;  ///< the program and its derivative: as the given ones but for rounding
  bool silu = false;           ///< it is SiLU of the score, or that times a factor
};
/// `graph` gets what the program needs.
PairSigmoid pair_sigmoid_of(Graph& graph, int score);

/// Whether the value is finite for finite scores, as far as its operations tell; it reads no tensor by
/// positions.
bool is_finite(const Graph& graph, int place);
/// Whether the program names the score once.
bool names_score_once(const NodePtr& program);

}  // namespace flashjit::expr
