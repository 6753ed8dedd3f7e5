// Arguments of the gradients' tangents: their checks, and the parameters of their kernels.
#pragma once

#include <vector>

#include "call/arguments.hpp"
#include "flashjit/runtime.hpp"
#include "plan/plan.hpp"
#include "templates/common/backward_jvp_params.cuh"

namespace flashjit {

/// As of BackwardArgs; the tangents, too.
AttentionShape check_arguments(const AttentionSpec& spec, const BackwardJvpArgs& args);
std::vector<NamedPointer> pointers_of(const BackwardJvpArgs& args);
BackwardJvpParams make_params(const plan::ExecutionPlan& plan, const BackwardJvpArgs& args);

}  // namespace flashjit
