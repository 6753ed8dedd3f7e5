// The sinks of a call, their gradients and tangents.
#pragma once

#include "call/apart.hpp"
#include "call/captures.hpp"
#include "call/tensor_checks.hpp"
#include "flashjit/runtime.hpp"
#include "support/refuse.hpp"
#include "templates/common/params.cuh"

namespace flashjit {

template <class Args>
void check_sinks(const AttentionSpec& spec, const AttentionShape& shape, const Args& args) {
  if (!spec.sinks && args.sinks) refuse("sinks is given, but the spec has none: set spec.sinks.");
  if (spec.sinks && !args.sinks && shape.heads_q > 0)
    refuse("sinks is null, but the spec has them: give one float per head of q in device memory.");
  check_pointer("sinks", args.sinks, alignof(float));
}
/// Refuses dsinks or sinks_tangent that the spec has no room for, or that cannot be read.
inline void check_of_sinks(const AttentionSpec& spec, const char* name, const float* given) {
  if (given && !spec.sinks) refuse("{} is given, but the spec has no sinks: set spec.sinks.", name);
  check_pointer(name, given, alignof(float));
}

template <class Args>
NamedPointer pointer_of_sinks(const Args& args) {
  return {"sinks", args.sinks};
}
template <class Args>
Placed placed_sink(const Args& args, const AttentionShape& shape) {
  return {"sinks", args.sinks, shape.heads_q, sizeof(float)};
}
inline Placed placed_sink_gradient(const BackwardArgs& args, const AttentionShape& shape) {
  return {"dsinks", args.dsinks, shape.heads_q, sizeof(float)};
}
/// Given sinks turn the option on.
template <class Args>
void take_sinks(AttentionSpec& spec, const Args& args) {
  spec.sinks |= args.sinks != nullptr;
}
template <class Args>
void set_sinks(Params& params, const Args& args) {
  params.sinks = args.sinks;
}

}  // namespace flashjit
