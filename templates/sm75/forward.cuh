// The forward pass of family sm80's templates, with this family's instructions.
#pragma once

#include "flashjit/sm75/instructions.cuh"
#include "flashjit/sm75/kv_loader.cuh"
#include "flashjit/sm80/forward.cuh"

namespace flashjit::sm75 {

using sm80::forward;

}  // namespace flashjit::sm75
