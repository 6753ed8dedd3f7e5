// Second derivatives of a score program, as generated members of a Problem.
#pragma once

#include <string>

#include "expr/code.hpp"
#include "expr/program_analysis.hpp"

namespace flashjit::expr {

/// score_grad_tangent() and add_capture_grad_tangents(): derivatives of score_grad() and add_capture_grads()
/// along tangents of the score before the program and of captured tensors. Adds operations to the graph.
std::string gradient_tangent_hooks(ProgramAnalysis& analysis, HeadCode& head);

}  // namespace flashjit::expr
