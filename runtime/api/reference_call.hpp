// The CPU reference behind the same arguments as a launch: for NumPy, for tensors on the CPU, for tests.
#pragma once

#include "flashjit/runtime.hpp"

namespace flashjit {

/// Computes what Runtime's functions would, in fp64 on the CPU: every pointer is the host's, the elements are
/// the spec's, results are rounded to them. Checks arguments as a launch does, and cu_seqlens, which a launch
/// cannot see; looks at no workspace.
void reference_forward(const AttentionSpec& spec, const ForwardArgs& args);
void reference_backward(const AttentionSpec& spec, const BackwardArgs& args);
void reference_append(const AttentionSpec& spec, const AppendArgs& args);
void reference_merge(const AttentionSpec& spec, const MergeArgs& args);

}  // namespace flashjit
