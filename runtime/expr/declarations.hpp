// What a spec's programs declare: the names that a call must give values for.
#pragma once

#include <string>
#include <vector>

#include "flashjit/expr.hpp"
#include "flashjit/programs.hpp"

namespace flashjit::expr {

/// As in the language: "slopes: fp32 1d", "bias: bf16 4d grad", "window: int".
std::string to_string(const Declaration& declaration);

/// The score's declarations, then those of the mask that it has not; a tensor's place among the tensors is
/// its place in Params::captures, a scalar's among the scalars that in Params::scalars.
std::vector<Declaration> declarations(const ScoreProgram& score, const MaskProgram& mask);

/// Whether the kernels visit the mask's tiles by lists rather than by bounds.
bool is_listed(const MaskProgram& mask);

}  // namespace flashjit::expr
