// Arguments of O's tangent: their checks, and the parameters of its kernels.
#pragma once

#include <vector>

#include "call/arguments.hpp"
#include "flashjit/runtime.hpp"
#include "plan/plan.hpp"
#include "templates/common/jvp_params.cuh"

namespace flashjit {

/// As of ForwardArgs; the tangents, too.
AttentionShape check_arguments(const AttentionSpec& spec, const JvpArgs& args);
std::vector<NamedPointer> pointers_of(const JvpArgs& args);
JvpParams make_params(const plan::ExecutionPlan& plan, const JvpArgs& args);

}  // namespace flashjit
