#include "plan/tiles.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <queue>

#include "plan/family.hpp"
#include "templates/common/params.cuh"

namespace flashjit::plan {

std::int64_t blocks_at_once(const Entry& entry, const DeviceInfo& device) {
  return std::max<std::int64_t>(1, std::int64_t{device.multiprocessors} * entry.min_blocks / entry.cluster);
}

namespace {

constexpr int kPackedRows = 64;  // of Q: a warpgroup's

/// How many of the `shared` heads of a head of K and V have rows in one Q tile: all of them, or as many as
/// make equal sets, so that a warpgroup has a row of each.
int heads_of_set(int shared) {
  const auto sets = static_cast<int>(tiles(shared, kPackedRows));
  return sets > 0 ? static_cast<int>(tiles(shared, sets)) : 1;
}

}  // namespace

int most_queries(const KernelSpec& spec, const TileConfig& config) {
  if (config.join_lists) return kMostJoinedQueries;
  return spec.indices ? 1 : kPackedRows;
}

PackedHeadsParam packed_heads(const AttentionShape& shape, int most_queries) {
  if (shape.heads_kv == 0) return {};
  const auto shared = static_cast<int>(shape.heads_q / shape.heads_kv);
  const int heads = heads_of_set(shared);
  return {.heads = heads,
          .sets = static_cast<int>(tiles(shared, heads)),
          .queries = std::min(kPackedRows / heads, most_queries),
          .inverse = static_cast<unsigned>(((1 << 16) + heads - 1) / heads),
          .shared = shared};
}

ForwardTiles forward_tiles(const KernelSpec& spec, const AttentionShape& shape, const TileConfig& config) {
  if (shape.heads_kv == 0) return {config.br, 0};
  if (spec.indices && !config.pack_gqa)
    return {1, shape.heads_kv * tiles(shape.heads_q / shape.heads_kv, config.br)};
  if (!config.pack_gqa) return {config.br, shape.heads_q};
  const PackedHeadsParam packed = packed_heads(shape, most_queries(spec, config));
  return {std::int64_t{config.br} / kPackedRows * packed.queries, shape.heads_kv * packed.sets};
}

std::vector<Range> keys_of_tiles(const AnalysedSpec& spec, const AttentionShape& shape,
                                 std::int64_t queries) {
  std::vector<Range> all;
  for (std::int64_t begin = 0; begin < shape.seqlen_q; begin += queries) {
    const std::int64_t end = std::min(begin + queries, shape.seqlen_q);
    all.push_back(spec.key_bounds->of({static_cast<int>(begin), static_cast<int>(end)},
                                      static_cast<int>(shape.seqlen_q), static_cast<int>(shape.seqlen_kv)));
  }
  return all;
}

std::int64_t rows_to_estimate(const AttentionShape& shape, std::int64_t queries) {
  constexpr std::int64_t kMostTiles = 1 << 15;
  return queries * std::max<std::int64_t>(1, tiles(tiles(shape.seqlen_q, queries), kMostTiles));
}

double makespan(std::vector<double> blocks, std::int64_t copies, std::int64_t slots) {
  std::sort(blocks.begin(), blocks.end(), std::greater<>());
  std::priority_queue<double, std::vector<double>, std::greater<>> free_at(
      std::greater<>(), std::vector<double>(static_cast<std::size_t>(slots)));
  double end = 0;
  for (const double block : blocks) {
    for (std::int64_t i = 0; i < copies; ++i) {
      const double done = free_at.top() + block;
      free_at.pop();
      free_at.push(done);
      end = std::max(end, done);
    }
  }
  return end;
}

ListsDiffer lists_differ(const AnalysedSpec& spec) {
  return {.by_batch = spec.varlen || spec.kv.has_lengths() || spec.programs.mask.uses_batch,
          .by_head = spec.programs.mask.uses_head};
}

std::int64_t list_sets(const KernelPlan& kernel, const AttentionShape& shape) {
  const AnalysedSpec& spec = kernel.spec;
  if (!kernel.schedule.tile_lists) return 0;
  const auto [by_batch, by_head] = lists_differ(spec);
  const bool map = spec.has_block_map();
  return (by_batch || map ? shape.batch : 1) * (by_head || map ? shape.heads_q : 1);
}

bool has_term_bounds(const AnalysedSpec& spec) {
  return spec.programs.mask.q_reads + spec.programs.mask.kv_reads > 0;
}

namespace {

/// As many as fill the device, where all Q tiles have the same keys.
std::int64_t kv_splits(const AttentionShape& shape, const TileConfig& config, std::int64_t blocks,
                       std::int64_t slots) {
  const std::int64_t to_fill = slots / std::max<std::int64_t>(blocks, 1);
  return std::max<std::int64_t>(1, std::min(to_fill, tiles(shape.seqlen_kv, config.bc)));
}

/// The most parts that a sequence of up to so many keys has: shorter ones may have more.
std::int64_t most_parts(std::int64_t most_keys, int bc) {
  constexpr std::int64_t kInHalves = 4 * kKeysOfSplit;
  const auto parts = [&](std::int64_t keys) {
    return tiles(keys, std::int64_t{tiles_of_part(bc, static_cast<int>(keys))} * bc);
  };
  return std::max({std::int64_t{1}, parts(most_keys), parts(std::min(most_keys, kInHalves))});
}

/// The rows of Q, of one query head, that the KV tiles meet: the most of one, and of all together.
struct MetRows {
  std::int64_t longest = 0, all = 0;
};
MetRows met_rows(const AnalysedSpec& spec, const AttentionShape& shape, const TileConfig& config) {
  std::vector<std::int64_t> change(static_cast<std::size_t>(tiles(shape.seqlen_kv, config.bc)) + 1);
  std::int64_t left = shape.seqlen_q;
  const std::int64_t together = rows_to_estimate(shape, config.br);
  for (const Range& keys : keys_of_tiles(spec, shape, together)) {
    const std::int64_t rows = std::min(together, left);
    left -= rows;
    if (keys.begin >= keys.end) continue;
    change[static_cast<std::size_t>(keys.begin / config.bc)] += rows;
    change[static_cast<std::size_t>(tiles(keys.end, config.bc))] -= rows;
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
/// work end at unlike times, and what splits leave is combined. Splits of few rows are worth it where all
/// blocks run at once, and none are where there are enough KV tiles.
std::int64_t q_splits(const AnalysedSpec& spec, const AttentionShape& shape, const TileConfig& config,
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
  const auto cost = [&](std::int64_t splits) {
    const auto rows = static_cast<double>(tiles(q_tiles, splits) * config.br * group);
    const double rounds = static_cast<double>(heads * kv_tiles * splits) / static_cast<double>(slots);
    const double computing = equal ? std::ceil(rounds) * rows : std::max(rows, fair + kShareOfEnd * rows);
    return computing + (splits > 1 ? kRowsOfJoining + rounds * kRowsOfJoiningRound : 0);
  };
  std::int64_t best = 1;
  for (std::int64_t splits = 2; splits <= std::min(q_tiles, std::int64_t{kMaxQuerySplits}); ++splits) {
    const bool at_once = fair * static_cast<double>(splits) <= static_cast<double>(longest);
    const std::int64_t fewest = at_once ? kFewestRowsAtOnce : kFewestRows;
    if (longest >= fewest * splits && cost(splits) < cost(best)) best = splits;
  }
  return best;
}

}  // namespace

std::int64_t joining_clusters_at_once(const DeviceInfo& device) {
  return std::int64_t{device.multiprocessors} * 10 / 11 / kJoiningCtas;
}

std::int64_t num_splits(const KernelPlan& kernel, const AttentionShape& shape, const DeviceInfo& device) {
  const AnalysedSpec& spec = kernel.spec;
  const TileConfig& config = kernel.config;
  if (!config.split || config.cluster) return 1;
  const std::int64_t slots = blocks_at_once(kernel.main(), device);
  if (kernel.schedule.stream_k) return slots;
  if (kernel.schedule.fixed_parts) return most_parts(shape.seqlen_kv, config.bc);
  if (spec.reproducible.batch_invariant)
    return std::max<std::int64_t>(1, tiles(tiles(shape.seqlen_kv, config.bc), tiles_of_split(config.bc)));
  if (spec.pass == Pass::backward) return q_splits(spec, shape, config, slots);
  const std::vector<Launch> launches = launches_of(kernel, shape);
  return kv_splits(shape, config, main_launch(kernel, launches).blocks, slots);
}

std::int64_t num_splits(const AnalysedSpec& spec, const AttentionShape& shape, const TileConfig& config,
                        const DeviceInfo& device) {
  if (!config.split) return 1;
  return num_splits(traits(config.family).kernel(spec, config), shape, device);
}

std::int64_t head_groups(const KernelPlan& kernel, const AttentionShape& shape, std::int64_t segments) {
  constexpr std::int64_t kBytesOfRow = 1024;
  const auto [queries, heads_of_q_tile] = forward_tiles(kernel.spec, shape, kernel.config);
  const std::int64_t heads =
      heads_of_q_tile * (kernel.schedule.q_tiles_as_heads ? tiles(shape.seqlen_q, queries) : 1);
  // With more rows for each head of K and V products take longer than memory, and no share may be lost.
  constexpr std::int64_t kRowsOfMemory = 256;
  const bool waits_for_memory =
      kernel.schedule.q_tiles_as_heads || shape.seqlen_q * shape.heads_q <= kRowsOfMemory * shape.heads_kv;
  const std::int64_t most_lost = waits_for_memory ? segments / 32 : 0;
  const std::int64_t bytes = std::int64_t{2} * std::min(kernel.spec.head_dim, kernel.spec.v_dim());
  std::int64_t found = 1;
  for (std::int64_t groups = 2;
       groups <= std::min(heads, segments) && found * bytes * shape.heads_kv < kBytesOfRow * heads; ++groups)
    if (heads % groups == 0 && segments % groups <= most_lost) found = groups;
  return found;
}

}  // namespace flashjit::plan
