// What the parts of family sm90 share.
#pragma once

#include "plan/analysed_spec.hpp"
#include "templates/sm90/layout.cuh"

namespace flashjit::plan {

/// The shared memory of the backward pass, as BackwardSmem in templates/sm90/backward_smem.cuh has it.
sm90::BackwardLayout sm90_backward_layout(const AnalysedSpec& spec, const TileConfig& config);

}  // namespace flashjit::plan
