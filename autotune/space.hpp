// Which configurations a problem is tuned over, in which order they are tried, and which fall out once
// compiled.
#pragma once

#include <string>
#include <vector>

#include "autotune/model.hpp"
#include "flashjit/runtime.hpp"

namespace flashjit::autotune {

/// The one order in which equally fast configurations are preferred: family, then each field ascending.
bool canonical_less(const TileConfig& a, const TileConfig& b);

/// The families' search spaces for the problem, each configuration once: the heuristic's choice first, so
/// that a search cut short has at least that, then by predicted time. With `families`, those only. Throws
/// Error(unsupported) with every family's reason when none can do the problem.
std::vector<TileConfig> candidates(const Model& model, const std::vector<Family>& families = {});

/// Why a compiled candidate is not worth measuring ("spills 32 bytes in forward", ...); empty when it is.
std::string disqualified(const KernelSpec& spec, const KernelReport& kernel, const DeviceInfo& device);

}  // namespace flashjit::autotune
