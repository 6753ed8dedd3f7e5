#include "plan/tiles.hpp"

#include <fmt/format.h>

namespace flashjit::plan {

Entry family_entry(Family family, const std::string& name, const std::string& header, int threads) {
  return {.name = name,
          .header = fmt::format("flashjit/{}/{}.cuh", to_string(family), header),
          .function = fmt::format("flashjit::{}::{}", to_string(family), name),
          .threads = threads};
}

Entry auxiliary_entry(const std::string& name, const std::string& header) {
  return {.name = name,
          .header = fmt::format("flashjit/auxiliary/{}.cuh", header.empty() ? name : header),
          .function = "flashjit::auxiliary::" + name,
          .threads = kAuxiliaryThreads};
}
namespace {

std::int64_t hot_blocks(const FamilyTraits& family, const AttentionSpec& spec, const AttentionShape& shape,
                        const TileConfig& config) {
  const std::vector<Entry> entries = family.entries(spec, config);
  std::int64_t blocks = 0;
  for (const Launch& launch : family.launches(spec, shape, config)) {
    if (entries[launch.entry].hot) blocks += launch.blocks;
  }
  return blocks;
}

}  // namespace

TileConfig first_that_fills(std::span<const TileConfig> good, const FamilyTraits& family,
                            const AttentionSpec& spec, const AttentionShape& shape,
                            const DeviceInfo& device) {
  TileConfig best;
  std::int64_t most = -1;
  for (const TileConfig& config : good) {
    if (!family.admits(spec, config, device)) continue;
    const std::int64_t blocks = hot_blocks(family, spec, shape, config);
    if (blocks > most) {
      best = config;
      most = blocks;
    }
    if (blocks * 10 >= device.multiprocessors * std::int64_t{9}) break;
  }
  return best;
}

}  // namespace flashjit::plan
