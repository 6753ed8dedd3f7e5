#include "plan/tiles.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace flashjit::plan {

std::int64_t blocks_at_once(const Entry& entry, const DeviceInfo& device) {
  return std::max<std::int64_t>(1, std::int64_t{device.multiprocessors} * entry.min_blocks / entry.cluster);
}

std::int64_t parts_of_keys(const AttentionSpec& spec, const AttentionShape& shape, const TileConfig& config,
                           const DeviceInfo& device) {
  if (!config.splits_keys) return 1;
  const FamilyTraits& family = traits(config.family);
  const std::vector<Entry> entries = family.entries(spec, config);
  const std::vector<Launch> launches = family.launches(spec, shape, config);
  const auto hot = std::ranges::find_if(launches, [&](const Launch& l) { return entries[l.entry].hot; });
  const std::int64_t to_fill =
      blocks_at_once(entries[hot->entry], device) / std::max<std::int64_t>(hot->blocks, 1);
  return std::max<std::int64_t>(1, std::min(to_fill, tiles(shape.seqlen_kv, config.bc)));
}

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

}  // namespace flashjit::plan
