// Arguments of O's tangent: their checks, and the parameters of its kernels.
#pragma once

#include <initializer_list>
#include <vector>

#include "call/apart.hpp"
#include "call/arguments.hpp"
#include "call/tensor_checks.hpp"
#include "flashjit/runtime.hpp"
#include "plan/plan.hpp"
#include "templates/common/jvp_params.cuh"

namespace flashjit {

/// As of ForwardArgs; the tangents, too.
AttentionShape check_arguments(const AttentionSpec& spec, const JvpArgs& args);
std::vector<NamedPointer> pointers_of(const JvpArgs& args);
JvpParams make_params(const plan::ExecutionPlan& plan, const JvpArgs& args);

/// The inputs of both passes with tangents: of O, and of the gradients.
struct TangentInputs {
  ConstTensorView q, k, v, q_tangent, k_tangent, v_tangent;
  const float* sinks_tangent;
};
template <class Args>
TangentInputs tangent_inputs(const Args& args) {
  return {args.q, args.k, args.v, args.q_tangent, args.k_tangent, args.v_tangent, args.sinks_tangent};
}
/// Refuses tangents that are not like their tensors; null: zero.
void check_tangents(const AttentionSpec& spec, const TangentInputs& inputs);
/// The tangents that are given, which results must not overwrite.
std::vector<Placed> placed_tangents(const AttentionSpec& spec, const TangentInputs& inputs);
/// `pointers`, the tangents and `others`, every pointer that is not null.
std::vector<NamedPointer> with_tangents(std::vector<NamedPointer> pointers, const TangentInputs& inputs,
                                        std::initializer_list<NamedPointer> others);
void set_tangents(JvpParams& params, const TangentInputs& inputs);

/// Refuses a tangent that is not like its tensor; null: zero.
void check_tangent(const char* name, const ConstTensorView& tangent, const ConstTensorView& tensor,
                   const char* tensor_name, DType type);

}  // namespace flashjit
