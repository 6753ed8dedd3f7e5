// dQ's conversion of family sm80's templates, with this family's instructions.
#pragma once

#include "flashjit/sm80/convert_dq.cuh"

namespace flashjit::sm75 {

using sm80::convert_dq;

}  // namespace flashjit::sm75
