// The kernel of O's tangent of the families of mma.sync: templates/sm80/jvp.cuh.
#pragma once

#include "plan/tensor_core.hpp"

namespace flashjit::plan::sm80_jvp {

/// What the family's own functions say of a spec whose pass is jvp; element types and device are checked.
Support supports(const AnalysedSpec& spec);
Support admits(const AnalysedSpec& spec, const TileConfig& config, const DeviceInfo& device);
/// Good tiles, best first; the last fits every device.
std::vector<TileConfig> preferences(Family family, const AnalysedSpec& spec);
std::vector<TileConfig> search_space(Family family, const AnalysedSpec& spec, const DeviceInfo& device);
KernelPlan kernel(const AnalysedSpec& spec, const TileConfig& config);

}  // namespace flashjit::plan::sm80_jvp
