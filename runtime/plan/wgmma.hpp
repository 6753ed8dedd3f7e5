// The products of the sm90 family: one asm statement each, whose text depends on its width and depth.
#pragma once

#include <string>

#include "plan/analysed_spec.hpp"

namespace flashjit::plan {

/// The Problem's functions. Forward, each over a depth of 16, or all of it with has_whole_products():
/// multiply_scores, S (+)= Q K^T, and multiply_output, O (+)= P V with P in registers; where warpgroups share
/// rows, multiply_scores over a depth of 16, as is multiply_output_of_tile, with P in shared memory. O's
/// tangent has the first two. Backward, each over all of its depth: multiply_scores, S^T (+)= K Q^T;
/// multiply_dp, dP^T (+)= V dO^T; multiply_dv and multiply_dk, dV += P^T dO and dK += dS^T Q with the left
/// operand in registers where a group's keys are its own; multiply_dq, dQ (+)= dS K.
std::string wgmma_functions(const AnalysedSpec& spec, const TileConfig& config);

}  // namespace flashjit::plan
