// The products of the sm90 family: one wgmma instruction each, whose text depends on its width.
#pragma once

#include <string>

#include "flashjit/spec.hpp"

namespace flashjit::render {

/// The Problem's functions, each over a depth of 16. Forward: multiply_scores, S (+)= Q K^T, and
/// multiply_output, O += P V with P in registers. Backward: multiply_scores, S^T (+)= K Q^T and dP^T (+)= V
/// dO^T; multiply_dv and multiply_dk, dV += P^T dO and dK += dS^T Q with the left operand in registers;
/// multiply_dq, dQ (+)= dS K.
std::string wgmma_functions(const AttentionSpec& spec, const TileConfig& config);

}  // namespace flashjit::render
