// Calls whose Q and K programs change first: where the changed rows lie in the workspace.
#pragma once

#include "flashjit/runtime.hpp"
#include "plan/plan.hpp"

namespace flashjit {

/// Throws Error(invalid_argument) where packed tensors have more rows than the workspace has room for.
void check_modified_rows(const AttentionSpec& spec, const AttentionShape& shape, const ConstTensorView& q,
                         const ConstTensorView& k);

/// The arguments as all kernels but the entries of q_mod and k_mod see them: with Q, K, dQ and dK that these
/// make and read in the workspace, contiguous.
ForwardArgs args_of_kernels(const plan::ExecutionPlan& plan, ForwardArgs args);
BackwardArgs args_of_kernels(const plan::ExecutionPlan& plan, BackwardArgs args);

}  // namespace flashjit
