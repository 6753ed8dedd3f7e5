#include "plan/tiles.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "expr/key_bounds.hpp"
#include "templates/common/params.cuh"

namespace flashjit::plan {

std::int64_t blocks_at_once(const Entry& entry, const DeviceInfo& device) {
  return std::max<std::int64_t>(1, std::int64_t{device.multiprocessors} * entry.min_blocks / entry.cluster);
}

const Launch& main_launch(const std::vector<Entry>& entries, const std::vector<Launch>& launches) {
  return *std::ranges::find_if(launches, [&](const Launch& launch) { return entries[launch.entry].hot; });
}

namespace {

/// As many as fill the device, where all Q tiles have the same keys.
std::int64_t key_parts(const AttentionShape& shape, const TileConfig& config, std::int64_t blocks,
                       std::int64_t slots) {
  const std::int64_t to_fill = slots / std::max<std::int64_t>(blocks, 1);
  return std::max<std::int64_t>(1, std::min(to_fill, tiles(shape.seqlen_kv, config.bc)));
}

/// The rows of Q, of one query head, that the KV tiles meet: the most of one, and of all together.
struct MetRows {
  std::int64_t longest = 0, all = 0;
};
MetRows met_rows(const AttentionSpec& spec, const AttentionShape& shape, const TileConfig& config) {
  const expr::KeyBounds bounds(spec.mask, static_cast<int>(shape.seqlen_q),
                               static_cast<int>(shape.seqlen_kv));
  std::vector<std::int64_t> change(static_cast<std::size_t>(tiles(shape.seqlen_kv, config.bc)) + 1);
  for (std::int64_t begin = 0; begin < shape.seqlen_q; begin += config.br) {
    const std::int64_t end = std::min(begin + config.br, shape.seqlen_q);
    const Range keys = bounds.of({static_cast<int>(begin), static_cast<int>(end)});
    if (keys.begin >= keys.end) continue;
    change[static_cast<std::size_t>(keys.begin / config.bc)] += end - begin;
    change[static_cast<std::size_t>(tiles(keys.end, config.bc))] -= end - begin;
  }
  MetRows met;
  std::int64_t rows = 0;
  for (const std::int64_t more : change) {
    rows += more;
    met.longest = std::max(met.longest, rows);
    met.all += rows;
  }
  return met;
}

/// So many that they take least, in rows of Q that a block computes meanwhile, as measured: blocks of unequal
/// work end at unlike times, and what parts leave is joined. Parts of few rows are worth it where all blocks
/// run at once, and none are where there are enough KV tiles.
std::int64_t query_parts(const AttentionSpec& spec, const AttentionShape& shape, const TileConfig& config,
                         std::int64_t slots) {
  constexpr double kShareOfEnd = 0.15, kRowsOfJoining = 250, kRowsOfJoiningRound = 300;
  constexpr std::int64_t kFewestRows = 2048, kFewestRowsAtOnce = 256, kEnoughRounds = 4;
  const std::int64_t heads = shape.batch * shape.heads_kv, kv_tiles = tiles(shape.seqlen_kv, config.bc);
  if (heads == 0 || heads * kv_tiles >= kEnoughRounds * slots) return 1;
  const MetRows met = met_rows(spec, shape, config);
  if (met.all == 0) return 1;
  const std::int64_t q_tiles = tiles(met.longest, config.br), group = shape.heads_q / shape.heads_kv;
  const bool equal = met.all == met.longest * kv_tiles;
  const double fair = static_cast<double>(heads * met.all * group) / static_cast<double>(slots);
  const std::int64_t longest = met.longest * group;
  const auto cost = [&](std::int64_t parts) {
    const auto rows = static_cast<double>(tiles(q_tiles, parts) * config.br * group);
    const double rounds = static_cast<double>(heads * kv_tiles * parts) / static_cast<double>(slots);
    const double computing = equal ? std::ceil(rounds) * rows : std::max(rows, fair + kShareOfEnd * rows);
    return computing + (parts > 1 ? kRowsOfJoining + rounds * kRowsOfJoiningRound : 0);
  };
  std::int64_t best = 1;
  for (std::int64_t parts = 2; parts <= std::min(q_tiles, std::int64_t{kMaxQuerySplits}); ++parts) {
    const bool at_once = fair * static_cast<double>(parts) <= static_cast<double>(longest);
    const std::int64_t fewest = at_once ? kFewestRowsAtOnce : kFewestRows;
    if (longest >= fewest * parts && cost(parts) < cost(best)) best = parts;
  }
  return best;
}

}  // namespace

std::int64_t tile_parts(const AttentionSpec& spec, const AttentionShape& shape, const TileConfig& config,
                        const DeviceInfo& device) {
  if (!config.in_parts) return 1;
  const FamilyTraits& family = traits(config.family);
  const std::vector<Entry> entries = family.entries(spec, config);
  const std::vector<Launch> launches = family.launches(spec, shape, config);
  const Launch& main = main_launch(entries, launches);
  const std::int64_t slots = blocks_at_once(entries[main.entry], device);
  return spec.pass == Pass::forward ? key_parts(shape, config, main.blocks, slots)
                                    : query_parts(spec, shape, config, slots);
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
