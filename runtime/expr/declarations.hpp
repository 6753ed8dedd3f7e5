// What a spec's programs declare: the names that a call must give values for.
#pragma once

#include <string>
#include <vector>

#include "flashjit/expr.hpp"
#include "flashjit/programs.hpp"
#include "flashjit/spec.hpp"

namespace flashjit::expr {

/// As in the language: "slopes: fp32 1d", "bias: bf16 4d grad", "window: int".
std::string to_string(const Declaration& declaration);

constexpr int kMaxDeclaredTensors = 16, kMaxDeclaredScalars = 8;

/// The score's declarations, then new ones of the other programs, the mask's last; a tensor's place
/// among the tensors is its place in Params::captures, a scalar's among the scalars that in Params::scalars.
/// Throws Error(invalid_argument) when two declare one name as different things, or all too much.
std::vector<Declaration> declarations(const ScoreProgram& score, const MaskProgram& mask,
                                      const OutProgram& out_mod = {}, const Prologue& prologue = {});

/// Throws Error(invalid_argument) when q_mod or k_mod reads what only the other has.
void check_prologue(const Prologue& prologue);

/// The program's expression; null when the program is empty.
inline NodePtr tree(const ScoreProgram& score) { return score.tree(); }
inline NodePtr tree(const MaskProgram& mask) { return mask.tree(); }

}  // namespace flashjit::expr
