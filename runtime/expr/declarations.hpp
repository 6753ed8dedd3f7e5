// What a spec's programs declare: the names that a call must give values for.
#pragma once

#include <string>
#include <vector>

#include "flashjit/programs.hpp"
#include "flashjit/types.hpp"

namespace flashjit::expr {

/// "slopes: fp32 1d", "bias: bf16 4d grad", "window: int".
struct Declaration {
  std::string name;
  ElementType type = ElementType::fp32;  ///< of a scalar: int32 or fp32
  int rank = 0;                          ///< 0: a scalar
  bool wants_grad = false;

  bool is_scalar() const { return rank == 0; }
  bool operator==(const Declaration&) const = default;
};

/// As in the language.
std::string to_string(const Declaration& declaration);

/// The score's declarations, then those of the mask that it has not; a tensor's place among the tensors is
/// its place in Params::captures, a scalar's among the scalars that in Params::scalars.
std::vector<Declaration> declarations(const ScoreProgram& score, const MaskProgram& mask);

/// Whether the kernels visit the mask's tiles by lists rather than by bounds.
bool is_listed(const MaskProgram& mask);

}  // namespace flashjit::expr
