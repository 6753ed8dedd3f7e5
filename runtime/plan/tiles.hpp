// What the families share: counting tiles, and choosing among good ones.
#pragma once

#include <span>

#include "plan/family.hpp"

namespace flashjit::plan {

constexpr std::int64_t tiles(std::int64_t length, int tile) { return (length + tile - 1) / tile; }

/// Threads of the kernels around the main one, and rows of one head that each block of them takes.
constexpr int kAuxiliaryThreads = 128;

/// An entry from templates/<family>/<header>.cuh.
Entry family_entry(Family family, const std::string& name, const std::string& header, int threads);
/// An entry from templates/auxiliary/<header>.cuh, by default of its own name.
Entry auxiliary_entry(const std::string& name, const std::string& header = {});

/// Of good configurations, best first, the first whose main loops give nine multiprocessors of ten a block,
/// else the one with the most blocks. Those that the family does not admit are passed over.
TileConfig first_that_fills(std::span<const TileConfig> good, const FamilyTraits& family,
                            const AttentionSpec& spec, const AttentionShape& shape, const DeviceInfo& device);

}  // namespace flashjit::plan
