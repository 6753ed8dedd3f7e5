// The same calls on the CPU, in fp64, slowly: for tests and small sizes.
#pragma once

#include "flashjit/runtime.hpp"

namespace flashjit {

/// Computes what Runtime's functions would, without a GPU: every pointer is the host's, the elements are the
/// spec's, results are rounded to them. Checks arguments as a launch does, and cu_seqlens, which a launch
/// cannot see; looks at no workspace.
FLASHJIT_API void reference_forward(const AttentionSpec& spec, const ForwardArgs& args);
FLASHJIT_API void reference_backward(const AttentionSpec& spec, const BackwardArgs& args);
FLASHJIT_API void reference_jvp(const AttentionSpec& spec, const JvpArgs& args);
FLASHJIT_API void reference_backward_jvp(const AttentionSpec& spec, const BackwardJvpArgs& args);
FLASHJIT_API void reference_append(const AttentionSpec& spec, const AppendArgs& args);
FLASHJIT_API void reference_merge(const AttentionSpec& spec, const MergeArgs& args);
FLASHJIT_API void reference_quantize(const AttentionSpec& spec, const QuantizeArgs& args);

}  // namespace flashjit
