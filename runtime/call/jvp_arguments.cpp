#include "call/jvp_arguments.hpp"

#include <array>

#include "call/parameters.hpp"
#include "call/tensor_checks.hpp"

namespace flashjit {
namespace {

const ForwardArgs& forward_of(const JvpArgs& args) { return args; }

/// The sizes of a tensor that passed its own check.
Sizes sizes_like(const ConstTensorView& tensor, const char* name) {
  const auto [b, h, s, d] = tensor.size;
  return {Size{b, name}, Size{h, name}, Size{s, name}, Size{d, name}};
}

void check_tangent(const char* name, const ConstTensorView& tangent, const ConstTensorView& tensor,
                   const char* tensor_name, DType type) {
  if (!tangent.data) return;  // zero
  check_tensor(name, tangent, sizes_like(tensor, tensor_name), size_of(type), Access::read);
  check_type(name, tangent, type);
}

/// Results and what they must not overwrite.
void check_apart(const AttentionSpec& spec, const JvpArgs& args) {
  const int of_out = size_of(spec.out_type()), of_inputs = size_of(spec.dtype);
  const std::array written = {Placed{"out_tangent", args.out_tangent, of_out},
                              Placed{"out", args.out, of_out}};
  std::vector<Placed> read;
  const auto add = [&](const char* name, const ConstTensorView& tensor) {
    if (tensor.data) read.emplace_back(name, tensor, of_inputs);
  };
  add("q", args.q), add("k", args.k), add("v", args.v);
  add("q_tangent", args.q_tangent), add("k_tangent", args.k_tangent), add("v_tangent", args.v_tangent);
  check_apart(written, read);
  if (!args.lse || !args.lse_tangent) return;
  const auto rows = [&](const char* name, const float* data) {
    return std::array{Placed{name, rows_view(data, args.lse_strides, rows_of(args.q)), sizeof(float)}};
  };
  check_apart(rows("lse_tangent", args.lse_tangent), rows("lse", args.lse));
}

}  // namespace

AttentionShape check_arguments(const AttentionSpec& spec, const JvpArgs& args) {
  KernelSpec{spec, Pass::jvp}.validate();
  const AttentionShape shape = check_arguments(spec, forward_of(args));
  check_tangent("q_tangent", args.q_tangent, args.q, "q", spec.dtype);
  check_tangent("k_tangent", args.k_tangent, args.k, "k", spec.dtype);
  check_tangent("v_tangent", args.v_tangent, args.v, "v", spec.dtype);
  check_tensor("out_tangent", args.out_tangent, sizes_like(args.out, "out"), size_of(spec.out_type()),
               Access::write);
  check_type("out_tangent", args.out_tangent, spec.out_type());
  check_rows("lse_tangent", args.lse_tangent, args.lse_strides, rows_of(args.q), Access::write);
  check_sinks_tangent(spec, args.sinks_tangent);
  check_apart(spec, args);
  return shape;
}

std::vector<NamedPointer> pointers_of(const JvpArgs& args) {
  std::vector<NamedPointer> pointers = pointers_of(forward_of(args));
  const auto add = [&](const char* name, const void* pointer) {
    if (pointer) pointers.push_back({name, pointer});
  };
  add("q_tangent", memory_of(args.q_tangent));
  add("k_tangent", memory_of(args.k_tangent));
  add("v_tangent", memory_of(args.v_tangent));
  add("out_tangent", memory_of(args.out_tangent));
  add("lse_tangent", args.lse_tangent);
  add("sinks_tangent", args.sinks_tangent);
  for (const Capture& capture : args.captures) add("the tangent of a capture", capture.grad);
  return pointers;
}

JvpParams make_params(const plan::ExecutionPlan& plan, const JvpArgs& args) {
  JvpParams params{};
  static_cast<Params&>(params) = make_params(plan, forward_of(args), Pass::jvp);
  params.q_tangent = tensor_param(args.q_tangent);
  params.k_tangent = tensor_param(args.k_tangent);
  params.v_tangent = tensor_param(args.v_tangent);
  params.o_tangent = tensor_param(args.out_tangent);
  params.lse_tangent = args.lse_tangent;
  params.sinks_tangent = args.sinks_tangent;
  return params;
}

}  // namespace flashjit
