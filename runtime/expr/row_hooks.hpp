// Programs of Q's and K's rows as generated members of a Problem.
#pragma once

#include <string>
#include <vector>

#include "expr/code.hpp"
#include "expr/program_analysis.hpp"

namespace flashjit::expr {

/// A tensor's read in a program of rows, and d element / d read.
struct RowReadGrad {
  NodePtr read, derivative;
};
/// The reads with a gradient that is not zero everywhere; null: none.
std::vector<RowReadGrad> row_read_grads(const NodePtr& program);

/// What templates/common/problem.cuh says of q_mod and k_mod, both where there is one of them; else nothing.
/// Adds operations to the graph.
std::string row_hooks(const Trees& programs, HeadCode& head);

}  // namespace flashjit::expr
