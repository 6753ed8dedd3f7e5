// Score and mask programs as the generated members of a Problem.
#pragma once

#include <string>

#include "expr/program_analysis.hpp"

namespace flashjit::expr {

/// The static member functions that templates/common/problem.cuh says are generated. Every name of the
/// templates is qualified, so that a Problem may be in any namespace; it must have an Element.
std::string emit_functions(const Trees& programs, const EmitOptions& options = {});

/// Those behind the constants of the programs' facts: all that a kernel of nothing but programs needs.
std::string emit_hooks(const Trees& programs, const EmitOptions& options = {});

}  // namespace flashjit::expr
