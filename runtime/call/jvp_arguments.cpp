#include "call/jvp_arguments.hpp"

#include <array>

#include "call/parameters.hpp"
#include "call/sink_arguments.hpp"
#include "call/tensor_checks.hpp"

namespace flashjit {
namespace {

const ForwardArgs& forward_of(const JvpArgs& args) { return args; }

/// The sizes of a tensor that passed its own check.
Sizes sizes_like(const ConstTensorView& tensor, const char* name) {
  const auto [b, h, s, d] = tensor.size;
  return {Size{b, name}, Size{h, name}, Size{s, name}, Size{d, name}};
}

/// Results and what they must not overwrite.
void check_apart(const AttentionSpec& spec, const JvpArgs& args) {
  const int of_out = size_of(spec.out_type()), of_inputs = size_of(spec.dtype);
  const std::array written = {Placed{"out_tangent", args.out_tangent, of_out},
                              Placed{"out", args.out, of_out}};
  std::vector<Placed> read = placed_tangents(spec, tangent_inputs(args));
  read.insert(read.begin(), {Placed{"q", args.q, of_inputs}, Placed{"k", args.k, of_inputs},
                             Placed{"v", args.v, of_inputs}});
  check_apart(written, read);
  const Placed lse = placed_rows("lse", args.lse, args.lse_strides, rows_of(args.q));
  const Placed tangent = placed_rows("lse_tangent", args.lse_tangent, args.lse_strides, rows_of(args.q));
  check_apart(std::span(&tangent, 1), std::span(&lse, 1));
}

}  // namespace

void check_tangent(const char* name, const ConstTensorView& tangent, const ConstTensorView& tensor,
                   const char* tensor_name, DType type) {
  if (!tangent.data) return;  // zero
  check_tensor(name, tangent, sizes_like(tensor, tensor_name), size_of(type), Access::read);
  check_type(name, tangent, type);
}

void check_tangents(const AttentionSpec& spec, const TangentInputs& inputs) {
  check_tangent("q_tangent", inputs.q_tangent, inputs.q, "q", spec.dtype);
  check_tangent("k_tangent", inputs.k_tangent, inputs.k, "k", spec.dtype);
  check_tangent("v_tangent", inputs.v_tangent, inputs.v, "v", spec.dtype);
  check_of_sinks(spec, "sinks_tangent", inputs.sinks_tangent);
}

std::vector<Placed> placed_tangents(const AttentionSpec& spec, const TangentInputs& inputs) {
  std::vector<Placed> placed;
  const auto add = [&](const char* name, const ConstTensorView& tangent) {
    if (tangent.data) placed.emplace_back(name, tangent, size_of(spec.dtype));
  };
  add("q_tangent", inputs.q_tangent), add("k_tangent", inputs.k_tangent), add("v_tangent", inputs.v_tangent);
  return placed;
}

std::vector<NamedPointer> with_tangents(std::vector<NamedPointer> pointers, const TangentInputs& inputs,
                                        std::initializer_list<NamedPointer> others) {
  const auto add = [&](std::initializer_list<NamedPointer> more) {
    for (const NamedPointer& named : more)
      if (named.pointer) pointers.push_back(named);
  };
  add({{"q_tangent", memory_of(inputs.q_tangent)},
       {"k_tangent", memory_of(inputs.k_tangent)},
       {"v_tangent", memory_of(inputs.v_tangent)},
       {"sinks_tangent", inputs.sinks_tangent}});
  add(others);
  return pointers;
}

void set_tangents(JvpParams& params, const TangentInputs& inputs) {
  params.q_tangent = tensor_param(inputs.q_tangent);
  params.k_tangent = tensor_param(inputs.k_tangent);
  params.v_tangent = tensor_param(inputs.v_tangent);
  params.sinks_tangent = inputs.sinks_tangent;
}

AttentionShape check_arguments(const AttentionSpec& spec, const JvpArgs& args) {
  KernelSpec{spec, Pass::jvp}.validate();
  const AttentionShape shape = check_arguments(spec, forward_of(args));
  check_tangents(spec, tangent_inputs(args));
  check_tensor("out_tangent", args.out_tangent, sizes_like(args.out, "out"), size_of(spec.out_type()),
               Access::write);
  check_type("out_tangent", args.out_tangent, spec.out_type());
  check_rows("lse_tangent", args.lse_tangent, args.lse_strides, rows_of(args.q), Access::write);
  check_apart(spec, args);
  return shape;
}

std::vector<NamedPointer> pointers_of(const JvpArgs& args) {
  std::vector<NamedPointer> pointers =
      with_tangents(pointers_of(forward_of(args)), tangent_inputs(args),
                    {{"out_tangent", memory_of(args.out_tangent)}, {"lse_tangent", args.lse_tangent}});
  for (const Capture& capture : args.captures)
    if (capture.grad) pointers.push_back({"the tangent of a capture", capture.grad});
  return pointers;
}

JvpParams make_params(const plan::ExecutionPlan& plan, const JvpArgs& args) {
  JvpParams params{};
  static_cast<Params&>(params) = make_params(plan, forward_of(args), Pass::jvp);
  set_tangents(params, tangent_inputs(args));
  params.o_tangent = tensor_param(args.out_tangent);
  params.lse_tangent = args.lse_tangent;
  return params;
}

}  // namespace flashjit
