// What the tensor-core families (sm80, sm90) share: the kernels around the main one, and what all of them
// need.
#pragma once

#include "plan/family.hpp"

namespace flashjit::plan {

/// The main kernel of a family: templates/<family>/{forward, backward}.cuh.
Entry main_entry(Family family, const AnalysedSpec& spec, int threads, int shared_bytes);

/// The main kernel among those that a call launches with it: row sums and sink gradients before a
/// backward pass, lists of tiles where there are some, dQ's conversion or the combine entry after it.
KernelPlan tensor_core_kernel(const AnalysedSpec& spec, const TileConfig& config, const Entry& main,
                              const Schedule& schedule);

WorkspaceNeeds tensor_core_workspace(const KernelPlan& kernel, const AttentionShape& shape);

}  // namespace flashjit::plan
