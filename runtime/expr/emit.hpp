// Score and mask programs as the generated members of a Problem.
#pragma once

#include <string>
#include <vector>

#include "flashjit/expr.hpp"
#include "flashjit/programs.hpp"

namespace flashjit::expr {

/// A problem's programs; null: the identity, and all pairs.
struct Trees {
  NodePtr score = {}, mask = {};
  std::vector<Declaration> declarations = {};  ///< in the order of Params
};

struct EmitOptions {
  bool check_indices = false;  ///< kernels print each index of a captured tensor that is clamped
};

/// The constants and static member functions that templates/common/problem.cuh says are generated. Every name
/// of the templates is qualified, so that a Problem may stand anywhere; it must have an Element.
std::string emit_hooks(const Trees& programs, const EmitOptions& options = {});
std::string emit_hooks(const ScoreProgram& score, const MaskProgram& mask, const EmitOptions& options = {});

}  // namespace flashjit::expr
