// The kernels of gradients' tangents of family sm80: templates/sm80/backward_jvp.cuh.
#pragma once

#include "plan/family.hpp"

namespace flashjit::plan::sm80_backward_jvp {

/// What the family's own functions say of a spec whose pass is backward_jvp; element types and device are
/// checked.
Support supports(const AnalysedSpec& spec);
Support admits(const AnalysedSpec& spec, const TileConfig& config, const DeviceInfo& device);
TileConfig heuristic(const AnalysedSpec& spec, const AttentionShape& shape, const DeviceInfo& device);
std::vector<TileConfig> search_space(const AnalysedSpec& spec, const DeviceInfo& device);
KernelPlan kernel(const AnalysedSpec& spec, const TileConfig& config);
WorkspaceNeeds workspace(const AnalysedSpec& spec);

}  // namespace flashjit::plan::sm80_backward_jvp
