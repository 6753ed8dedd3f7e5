// q_mod and k_mod: Q and K before the scores, and how gradients go back through them.
#pragma once

#include <optional>

#include "reference/context.hpp"
#include "reference/matrix.hpp"

namespace flashjit::reference {

/// The problem with Q and K as its programs make them; nothing where it has none of these.
std::optional<Problem> with_modified_rows(const Problem& given, const Arithmetic& arithmetic);

/// Makes the given rows' dQ and dK of the modified rows', and adds what captures get. `given`
/// is of the problem before with_modified_rows().
void through_row_mods(const Context& given, const Arithmetic& arithmetic, Backward& result);

}  // namespace flashjit::reference
