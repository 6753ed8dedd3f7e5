// Skip-softmax: the threshold of a call, and where its tiles are counted.
#pragma once

#include "flashjit/runtime.hpp"
#include "templates/common/params.cuh"

namespace flashjit {

/// Throws Error(invalid_argument) where the spec has no skip_softmax, or the threshold is not from 0 to 1.
void check_skip_softmax(const AttentionSpec& spec, const ForwardArgs& args);
void set_skip_softmax(Params& params, const AttentionSpec& spec, const ForwardArgs& args);

}  // namespace flashjit
