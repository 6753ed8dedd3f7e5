// What the families share: counting tiles, of Q, of K and V, and of lists.
#pragma once

#include <vector>

#include "plan/launches.hpp"
#include "templates/common/params.cuh"

namespace flashjit::plan {

constexpr std::int64_t tiles(std::int64_t length, std::int64_t tile) { return (length + tile - 1) / tile; }

/// Threads of the kernels around the main one, and rows of one head that each block of them takes.
constexpr int kAuxiliaryThreads = 128;

/// Bytes of a multiprocessor's shared memory that the driver keeps for each block.
constexpr int kReservedSharedBytes = 1024;

/// How many blocks, or clusters, of an entry the device holds.
std::int64_t blocks_at_once(const Entry& entry, const DeviceInfo& device);

/// The most queries whose heads a warpgroup packs: one, if each has its own list of keys.
int most_queries(const KernelSpec& spec, const TileConfig& config);

/// How the heads that share K and V are packed, where they are; nothing without heads.
PackedHeadsParam packed_heads(const AttentionShape& shape, int most_queries);

/// Q tiles of the forward pass: so many queries each, of so many sets of heads of a batch entry. A set is one
/// head, or all heads of a tile where heads are packed or queries have lists of keys.
struct ForwardTiles {
  std::int64_t queries, heads;
};
ForwardTiles forward_tiles(const KernelSpec& spec, const AttentionShape& shape, const TileConfig& config);

/// The keys that the queries of each Q tile of `queries` rows may attend to, as far as the mask's bounds
/// tell.
std::vector<Range> keys_of_tiles(const AnalysedSpec& spec, const AttentionShape& shape, std::int64_t queries);
/// Rows that an estimate takes as one Q tile of `queries` rows: several tiles where a sequence has very many,
/// as planning would otherwise take seconds.
std::int64_t rows_to_estimate(const AttentionShape& shape, std::int64_t queries);

/// When the last of some blocks ends, if each of `slots` takes the longest that is left (LPT order). Each
/// entry of `blocks`, a time, stands for `copies`.
double makespan(std::vector<double> blocks, std::int64_t copies, std::int64_t slots);

/// Into how many splits the keys of a Q tile are divided, backward the queries of a KV tile: as many as fill
/// the device and are worth it, if the configuration splits, else 1.
std::int64_t num_splits(const AnalysedSpec& spec, const AttentionShape& shape, const TileConfig& config,
                        const DeviceInfo& device);
std::int64_t num_splits(const KernelPlan& kernel, const AttentionShape& shape, const DeviceInfo& device);

/// How many clusters of kJoiningCtas run at once: parts of a device have multiprocessors left over.
std::int64_t joining_clusters_at_once(const DeviceInfo& device);

/// Stream-K by so many segments: how many heads are computed at a time, which lie side by side where a
/// token's heads do. A row of memory in DRAM (1 KB) is then opened once for all of them.
std::int64_t head_groups(const KernelPlan& kernel, const AttentionShape& shape, std::int64_t segments);

/// Whether mask and lengths give batch entries, or heads, lists of tiles of their own. A block map may, too,
/// which only the call knows.
struct ListsDiffer {
  bool by_batch, by_head;
};
ListsDiffer lists_differ(const AnalysedSpec& spec);
/// How many sets of lists there are at most: one where all share it; none where tiles are not listed.
std::int64_t list_sets(const KernelPlan& kernel, const AttentionShape& shape);
/// Whether the mask is classed by the bounds of what it reads over each tile.
bool has_term_bounds(const AnalysedSpec& spec);

}  // namespace flashjit::plan
