// Scalars that programs read as floats alone.
#pragma once

#include "flashjit/programs.hpp"
#include "flashjit/spec.hpp"

namespace flashjit::expr {

/// Declares such scalars as float where they are int, so that one kernel serves 50 and 50.0: to_float(cap)
/// becomes cap. What one program needs as an int stays one in all.
void declare_float_scalars(ScoreProgram& score, MaskProgram& mask, OutProgram& out_mod, Prologue& prologue);

}  // namespace flashjit::expr
