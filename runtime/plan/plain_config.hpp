// A configuration that is compiled sooner than the best one.
#pragma once

#include <optional>

#include "flashjit/spec.hpp"
#include "plan/plan.hpp"

namespace flashjit::plan {

/// For the first call of a spec, while `better` is compiled: mma.sync in small tiles in place of wgmma takes
/// a third of the forward pass's time to compile and half of the backward pass's. None where no such kernel
/// can do the spec, or where `better` is none of wgmma.
std::optional<TileConfig> plain_config(const ExecutionPlan& better, const DeviceInfo& device);

}  // namespace flashjit::plan
