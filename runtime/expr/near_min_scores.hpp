// Whether scores may lie next to the least float.
#pragma once

#include "expr/graph.hpp"

namespace flashjit::expr {

/// Whether a score program may give finite numbers of -1e37 and less, as additive masks of finfo.min do: they
/// are -infinity once they are exponents of 2. The bounds of each operation tell, whatever calls give.
/// Scores, and captured floats that multiply scores, positions or distances (temperatures, ALiBi's slopes),
/// are taken to be 1e6 at most, and divisors that programs compute 1e-6 at least.
bool may_be_near_min(const Graph& graph, int root);

}  // namespace flashjit::expr
