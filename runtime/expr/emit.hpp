// Score and mask programs as the generated members of a Problem.
#pragma once

#include <string>

#include "expr/program_analysis.hpp"

namespace flashjit::expr {

/// The static member functions that templates/common/problem.cuh says are generated. Every name of the
/// templates is qualified, so that a Problem may be in any namespace; it must have an Element.
std::string emit_functions(const Trees& programs, const EmitOptions& options = {});

/// The constants of the programs' facts, then emit_functions(): all that a kernel of programs alone needs.
std::string emit_hooks(const Trees& programs, const EmitOptions& options = {});

}  // namespace flashjit::expr
