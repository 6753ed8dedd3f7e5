// O and its tangent by family sm80's templates, with this family's instructions.
#pragma once

#include "flashjit/sm75/instructions.cuh"
#include "flashjit/sm80/jvp.cuh"

namespace flashjit::sm75 {

using sm80::jvp;

}  // namespace flashjit::sm75
