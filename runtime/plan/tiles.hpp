// What the families share: counting tiles, and choosing among good ones.
#pragma once

#include <span>

#include "plan/family.hpp"

namespace flashjit::plan {

constexpr std::int64_t tiles(std::int64_t length, int tile) { return (length + tile - 1) / tile; }

/// Of good configurations, best first, the first whose main loops give every multiprocessor a block, else the
/// one with the most blocks. Those that the family does not admit are passed over.
TileConfig first_that_fills(std::span<const TileConfig> good, const FamilyTraits& family,
                            const AttentionSpec& spec, const AttentionShape& shape, const DeviceInfo& device);

}  // namespace flashjit::plan
