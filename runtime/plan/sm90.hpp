// What the parts of family sm90 share.
#pragma once

#include "plan/analysed_spec.hpp"
#include "templates/sm90/layout.cuh"

namespace flashjit::plan {

/// The shared memory of the backward pass, as BackwardSmem in templates/sm90/backward_smem.cuh has it.
sm90::BackwardLayout sm90_backward_layout(const AnalysedSpec& spec, const TileConfig& config);

/// Whether K and V of 8 bits that are converted are multiplied as fp16, though Q may be bf16. Not where V is
/// multiplied with scales of keys, which may be large, nor where a score program, wide rows of O or head
/// dimensions that differ leave no registers to convert Q.
bool multiplies_as_fp16(const AnalysedSpec& spec);

}  // namespace flashjit::plan
