// The backward pass of family sm80's templates, with this family's instructions.
#pragma once

#include "flashjit/sm75/instructions.cuh"
#include "flashjit/sm75/q_tile_loader.cuh"
#include "flashjit/sm80/backward.cuh"

namespace flashjit::sm75 {

using sm80::backward;

}  // namespace flashjit::sm75
