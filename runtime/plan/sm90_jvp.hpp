// The kernel of O's tangent of family sm90: templates/sm90/jvp.cuh.
#pragma once

#include "plan/family.hpp"

namespace flashjit::plan::sm90_jvp {

/// What the family's own functions say of a spec whose pass is jvp; element types and device are checked.
Support supports(const AnalysedSpec& spec);
Support admits(const AnalysedSpec& spec, const TileConfig& config, const DeviceInfo& device);
TileConfig heuristic(const AnalysedSpec& spec, const DeviceInfo& device);
std::vector<TileConfig> search_space(const AnalysedSpec& spec, const DeviceInfo& device);
KernelPlan kernel(const AnalysedSpec& spec, const TileConfig& config);

}  // namespace flashjit::plan::sm90_jvp
