#include "plan/plain_config.hpp"

#include "plan/family.hpp"

namespace flashjit::plan {

std::optional<TileConfig> plain_config(const ExecutionPlan& better, const DeviceInfo& device) {
  if (traits(better.config.family).computed_by != ComputedBy::warp_groups) return {};
  for (const FamilyTraits& family : families()) {
    if (family.computed_by != ComputedBy::warps || !family.supports(better.spec, device)) continue;
    for (const int rows : {64, 32}) {
      const TileConfig config{.family = family.family, .br = rows, .bc = rows, .warps = rows / 16};
      if (family.admits(better.spec, config, device)) return config;
    }
  }
  return {};
}

}  // namespace flashjit::plan
