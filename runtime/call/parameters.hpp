// From a call's checked arguments to a kernel's parameters. No driver, no allocation.
#pragma once

#include "flashjit/runtime.hpp"
#include "plan/plan.hpp"
#include "templates/common/params.cuh"

namespace flashjit {

/// Arguments of one query a head that were checked, with the heads that share K and V as the queries of one:
/// see plan::fold_gqa().
ForwardArgs fold_gqa(ForwardArgs args);

/// The dO that all kernels but the out_grads entry read: with out_mod in the workspace, contiguous.
ConstTensorView dout_of_kernels(const plan::ExecutionPlan& plan, const BackwardArgs& args);

/// Takes arguments, captures and a workspace that were checked.
Params make_params(const plan::ExecutionPlan& plan, const ForwardArgs& args, Pass pass = Pass::forward);
Params make_params(const plan::ExecutionPlan& plan, const BackwardArgs& args);
Params make_params(const plan::ExecutionPlan& plan, const ListArgs& args);

}  // namespace flashjit
