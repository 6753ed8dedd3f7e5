// Family simt: plain fused multiply-adds, for any GPU from sm_75 and every type.
#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>

#include "plan/tiles.hpp"
#include "plan/workspace.hpp"
#include "templates/simt/layout.cuh"

namespace flashjit::plan {
namespace {

constexpr int kOldestCapability = 75;
/// More than any GPU runs at once; each block takes tiles until there are no more.
constexpr std::int64_t kMostOrderedBlocks = 4096;

int shared_bytes(const AttentionSpec& spec, const TileConfig& config) {
  const int by_queries = simt::shared_bytes(config.br, config.bc);
  if (spec.pass == Pass::forward) return by_queries;
  return std::max(by_queries, simt::shared_bytes(config.bc, config.br));
}

/// In the backward pass each side of the tile is the rows of one entry.
bool shares_tile(const AttentionSpec& spec, const TileConfig& config) {
  return simt::shares_tile(config.br, config.bc, config.warps) &&
         (spec.pass == Pass::forward || simt::shares_tile(config.bc, config.br, config.warps));
}

bool is_one_of(int value, std::initializer_list<int> allowed) {
  return std::ranges::count(allowed, value) > 0;
}

Support check_switches(const TileConfig& config) {
  const TileConfig plain{.family = Family::simt, .br = config.br, .bc = config.bc, .warps = config.warps};
  if (config == plain) return Support::yes();
  return Support::no(fmt::format("{} sets a switch that family simt does not have; give {}",
                                 to_string(config), to_string(plain)));
}

Support check_tile(const AttentionSpec& spec, const TileConfig& config) {
  if (!is_one_of(config.br, {16, 32, 64}) || !is_one_of(config.bc, {16, 32, 64})) {
    return Support::no(
        fmt::format("Br {} and Bc {} are given; family simt takes 16, 32 or 64", config.br, config.bc));
  }
  if (!is_one_of(config.warps, {4, 8})) {
    return Support::no(fmt::format("{} warps are given; family simt takes 4 or 8", config.warps));
  }
  if (!shares_tile(spec, config)) {
    return Support::no(
        fmt::format("{} gives a thread more than {} rows of a tile, which spills; give 8 warps",
                    to_string(config), simt::kMaxRowsPerThread));
  }
  return Support::yes();
}

Support supports(const AttentionSpec& spec, const DeviceInfo& device) {
  if (device.compute_capability >= kOldestCapability) return Support::yes();
  return Support::no(fmt::format("{} has compute capability {}.{}; {} needs 7.5 or newer", device.name,
                                 device.compute_capability / 10, device.compute_capability % 10,
                                 to_string(spec)));
}

Support admits(const AttentionSpec& spec, const TileConfig& config, const DeviceInfo& device) {
  if (const Support able = supports(spec, device); !able) return able;
  if (const Support switches = check_switches(config); !switches) return switches;
  if (const Support tile = check_tile(spec, config); !tile) return tile;
  if (const int bytes = shared_bytes(spec, config); bytes > device.shared_per_block) {
    return Support::no(fmt::format("{} needs {} bytes of shared memory and {} has {}; give smaller tiles",
                                   to_string(config), bytes, device.name, device.shared_per_block));
  }
  return Support::yes();
}

/// The largest tiles, unless they would leave multiprocessors idle or reach far beyond the lengths.
TileConfig heuristic(const AttentionSpec& spec, const AttentionShape& shape, const DeviceInfo& device) {
  TileConfig config{.family = Family::simt, .br = 64, .bc = 64, .warps = 8};
  const bool few_blocks = shape.batch * shape.heads_q * tiles(shape.seqlen_q, 64) < device.multiprocessors;
  if (shape.seqlen_q <= 32 || few_blocks) config.br = 32;
  if (shape.seqlen_kv <= 32 || (few_blocks && spec.pass == Pass::backward)) config.bc = 32;
  if (config.br == 32 && config.bc == 32) config.warps = 4;
  return config;
}

std::vector<TileConfig> search_space(const AttentionSpec& spec, const DeviceInfo& device) {
  std::vector<TileConfig> space;
  for (const int br : {16, 32, 64}) {
    for (const int bc : {16, 32, 64}) {
      for (const int warps : {4, 8}) {
        const TileConfig config{.family = Family::simt, .br = br, .bc = bc, .warps = warps};
        if (admits(spec, config, device)) space.push_back(config);
      }
    }
  }
  return space;
}

Entry entry(const char* name, const char* header, const TileConfig& config, int bytes) {
  Entry made = family_entry(Family::simt, name, header, config.warps * 32);
  made.shared_bytes = bytes;
  made.hot = true;
  return made;
}

std::vector<Entry> entries(const AttentionSpec& spec, const TileConfig& config) {
  const int by_queries = simt::shared_bytes(config.br, config.bc);
  const int by_keys = simt::shared_bytes(config.bc, config.br);
  if (spec.pass == Pass::forward) return {entry("forward", "forward", config, by_queries)};
  std::vector<Entry> all{auxiliary_entry("preprocess"), entry("backward_dkdv", "backward", config, by_keys),
                         entry("backward_dq", "backward", config, by_queries)};
  if (spec.sinks) all.push_back(auxiliary_entry("sink_grads"));
  if (orders_capture_grads(spec)) all.push_back(entry("capture_grads", "capture_grads", config, by_queries));
  return all;
}

std::vector<Launch> launches(const AttentionSpec& spec, const AttentionShape& shape,
                             const TileConfig& config) {
  const std::int64_t q_blocks = shape.batch * shape.heads_q * tiles(shape.seqlen_q, config.br);
  if (spec.pass == Pass::forward) return {{0, q_blocks}};
  const std::int64_t kv_blocks = shape.batch * shape.heads_kv * tiles(shape.seqlen_kv, config.bc);
  const std::int64_t row_blocks = shape.batch * shape.heads_q * (padded_seqlen_q(shape) / kAuxiliaryThreads);
  std::vector<Launch> all{{0, row_blocks}, {1, kv_blocks}, {2, q_blocks}};
  if (spec.sinks) all.push_back({all.size(), shape.heads_q});
  if (orders_capture_grads(spec))
    all.push_back({all.size(), std::min(q_blocks * tiles(shape.seqlen_kv, config.bc), kMostOrderedBlocks)});
  return all;
}

WorkspaceNeeds workspace(const AttentionSpec& spec, const AttentionShape& shape, const TileConfig& config) {
  return {.row_stats = spec.pass == Pass::backward,
          .semaphores = orders_capture_grads(spec),
          .ordered_q_tiles = tiles(shape.seqlen_q, config.br)};
}

std::optional<TensorBoxes> tensor_boxes(const AttentionSpec&, const TileConfig&) { return {}; }

}  // namespace

const FamilyTraits& simt_traits() {
  static const FamilyTraits kTraits{Family::simt, supports, admits,    heuristic,   search_space,
                                    entries,      launches, workspace, tensor_boxes};
  return kTraits;
}

}  // namespace flashjit::plan
