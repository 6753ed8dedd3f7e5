// The arguments of O as codes: out_scale and out_block_scale.
#pragma once

#include "flashjit/runtime.hpp"
#include "templates/common/params.cuh"

namespace flashjit {

void check_out_scales(const AttentionSpec& spec, const ForwardArgs& args);
/// Swizzled scales of these codes.
TensorView swizzled_scales_of(const AttentionSpec& spec, const TensorView& out, void* data);
void set_out_scales(Params& params, const AttentionSpec& spec, const ForwardArgs& args);

}  // namespace flashjit
