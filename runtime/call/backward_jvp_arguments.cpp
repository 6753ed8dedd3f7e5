#include "call/backward_jvp_arguments.hpp"

#include <algorithm>
#include <array>
#include <cstdint>

#include "call/captures.hpp"
#include "call/jvp_arguments.hpp"
#include "call/parameters.hpp"
#include "call/tensor_checks.hpp"
#include "support/refuse.hpp"

namespace flashjit {
namespace {

/// The backward pass's; `out`, which is not read, as if it were given.
BackwardArgs backward_of(const BackwardJvpArgs& args) {
  BackwardArgs backward = args;
  backward.out = args.dout;
  backward.lists = nullptr;
  return backward;
}

/// A capture whose gradient has a tangent has one itself.
void check_capture_tangents(const BackwardJvpArgs& args) {
  const auto given = args.capture_tangents;
  if (!given.empty() && given.size() != args.captures.size())
    refuse("capture_tangents has {} pointers, but captures has {}: give one for each.", given.size(),
           args.captures.size());
  for (std::size_t i = 0; i < args.captures.size(); ++i) {
    const Capture& capture = args.captures[i];
    const float* tangent = given.empty() ? nullptr : given[i];
    if (capture.grad && !tangent)
      refuse("{} has a grad, but capture_tangents has none for it: give fp32 memory of its sizes.",
             capture.name);
    if (reinterpret_cast<std::uintptr_t>(tangent) % alignof(float) != 0)
      refuse("the tangent of {} is at {}, which is no multiple of 4 bytes: align its memory.", capture.name,
             static_cast<const void*>(tangent));
  }
}

/// Results and tangents, which they must not overwrite.
void check_tangents_apart(const AttentionSpec& spec, const BackwardJvpArgs& args) {
  const int of_grads = size_of(spec.grad_type());
  const std::array written = {Placed{"dq", args.dq, of_grads}, Placed{"dk", args.dk, of_grads},
                              Placed{"dv", args.dv, of_grads}};
  std::vector<Placed> read = placed_tangents(spec, tangent_inputs(args));
  if (args.dout_tangent.data) read.emplace_back("dout_tangent", args.dout_tangent, size_of(spec.dtype));
  check_apart(written, read);
}

}  // namespace

AttentionShape check_arguments(const AttentionSpec& spec, const BackwardJvpArgs& args) {
  KernelSpec{spec, Pass::backward_jvp}.validate();
  AttentionSpec of_backward = spec;
  of_backward.partial.fp32_out = false;  // O is not read
  const AttentionShape shape = check_arguments(of_backward, backward_of(args));
  check_tangents(spec, tangent_inputs(args));
  check_tangent("dout_tangent", args.dout_tangent, args.dout, "dout", spec.dtype);
  check_rows("dlse_tangent", args.dlse_tangent, args.lse_strides, rows_of(args.q), Access::read);
  check_capture_tangents(args);
  check_tangents_apart(spec, args);
  if (args.lists)
    refuse("lists are given, but the pass {} walks none: leave them out.", to_string(Pass::backward_jvp));
  return shape;
}

std::vector<NamedPointer> pointers_of(const BackwardJvpArgs& args) {
  std::vector<NamedPointer> pointers =
      with_tangents(pointers_of(static_cast<const BackwardArgs&>(args)), tangent_inputs(args),
                    {{"dout_tangent", memory_of(args.dout_tangent)}, {"dlse_tangent", args.dlse_tangent}});
  for (const float* tangent : args.capture_tangents)
    if (tangent) pointers.push_back({"the tangent of a capture", tangent});
  return pointers;
}

BackwardJvpParams make_params(const plan::ExecutionPlan& plan, const BackwardJvpArgs& args) {
  BackwardJvpParams params{};
  static_cast<Params&>(params) = make_params(plan, static_cast<const BackwardArgs&>(args));
  set_tangents(params, tangent_inputs(args));
  params.dout_tangent = tensor_param(args.dout_tangent);
  params.dlse_tangent = args.dlse_tangent;
  params.row_tangents =
      reinterpret_cast<float*>(static_cast<char*>(args.workspace.data) + plan.workspace.row_tangents);
  // As of the jvp pass a capture's grad is its tangent; the results are apart.
  std::array<Capture, kMaxCaptures + kMaxScalars> tangents;
  for (std::size_t i = 0; i < args.captures.size(); ++i) {
    tangents[i] = args.captures[i];
    if (i < args.capture_tangents.size()) tangents[i].grad = const_cast<float*>(args.capture_tangents[i]);
  }
  for (int i = 0; i < kMaxCaptures; ++i) params.grads[i] = params.captures[i].grad;
  set_captures(params, plan.spec.programs.declarations, {tangents.data(), args.captures.size()},
               Pass::backward_jvp);
  return params;
}

}  // namespace flashjit
