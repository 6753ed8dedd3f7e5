// Which configurations a problem is tuned over, in which order they are tried, and which fall out once
// compiled.
#pragma once

#include <string>
#include <vector>

#include "flashjit/runtime.hpp"
#include "flashjit/spec.hpp"

namespace flashjit::autotune {

/// What is tuned: one spec at one shape.
struct Problem {
  AttentionSpec spec;
  AttentionShape shape;

  bool operator==(const Problem&) const = default;
};

/// The one order in which equally fast configurations are preferred: family, then each field ascending.
bool canonical_less(const TileConfig& a, const TileConfig& b);

/// Relative time a configuration is expected to take: only good for ordering configurations of one problem.
double expected_cost(const Problem& problem, const TileConfig& config, const DeviceInfo& device);

/// The families' search spaces for the problem, each configuration once: the heuristic's choice first, so
/// that a search cut short has at least that, then by expected_cost(). With `families`, those only. Throws
/// Error(unsupported) with every family's reason when none can do the problem.
std::vector<TileConfig> candidates(const Problem& problem, const DeviceInfo& device,
                                   const std::vector<Family>& families = {});

/// Why a compiled candidate is not worth measuring ("spills 32 bytes in forward", ...); empty when it is.
std::string disqualified(const AttentionSpec& spec, const KernelReport& kernel, const DeviceInfo& device);

}  // namespace flashjit::autotune
