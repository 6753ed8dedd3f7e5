#include "autotune/space.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "plan/decoded_cache.hpp"
#include "plan/family.hpp"
#include "plan/joined_lists.hpp"
#include "plan/tiles.hpp"

namespace flashjit::autotune {
namespace {

auto canonical_key(const TileConfig& c) {
  return std::tuple(static_cast<int>(c.family), c.br, c.bc, c.warps, c.stages, c.q_in_registers, c.d_split,
                    c.min_blocks, c.split, c.pack_gqa, c.cluster, c.tma, c.decode_cache, c.join_lists);
}

std::vector<const plan::FamilyTraits*> able_families(const plan::AnalysedSpec& spec, const DeviceInfo& device,
                                                     const std::vector<Family>& wanted) {
  std::vector<const plan::FamilyTraits*> able;
  std::string reasons;
  for (const plan::FamilyTraits& traits : plan::families()) {
    const bool chosen =
        wanted.empty() || std::find(wanted.begin(), wanted.end(), traits.family) != wanted.end();
    const Support support =
        chosen ? traits.supports(spec, device) : Support::no("left out by the choice of families");
    if (support) {
      able.push_back(&traits);
    } else {
      reasons += fmt::format("; {}: {}", to_string(traits.family), support.reason);
    }
  }
  if (able.empty()) {
    throw Error(ErrorCode::unsupported, fmt::format("no kernel family can do {} on {}{}", to_string(spec),
                                                    to_string(device), reasons));
  }
  return able;
}

/// Whether clusters that share the keys of a Q tile are more than run at once.
bool clusters_wait(const plan::KernelPlan& kernel, const AttentionShape& shape, const DeviceInfo& device) {
  const auto [queries, heads] = plan::forward_tiles(kernel.spec, shape, kernel.config);
  return shape.batch * heads * plan::tiles(shape.seqlen_q, queries) > plan::joining_clusters_at_once(device);
}

/// Whether a switch of the configuration does nothing for the problem: heads packed that share no K and V,
/// one part of the keys, a cache decoded once or lists joined for few queries, two Q tiles at a time where
/// there is a block for each, KV tiles of a cluster that are not of whole rows, or of more blocks than
/// rows have keys for, or clusters that share keys and wait for each other.
bool is_in_vain(const plan::KernelPlan& kernel, const AttentionShape& shape, const DeviceInfo& device) {
  const TileConfig& config = kernel.config;
  if (config.decode_cache && plan::gain_by_decoded_cache(kernel.spec, shape) < plan::kGainThatMayBe)
    return true;
  if (config.join_lists && !plan::gains_by_joined_lists(kernel.spec, shape)) return true;
  if (kernel.schedule.sums_dq)
    return shape.seqlen_kv > config.bc || (config.bc > 256 && shape.seqlen_kv <= config.bc / 2);
  if (config.pack_gqa && shape.heads_q == shape.heads_kv) return true;
  if (config.cluster) return clusters_wait(kernel, shape, device) || shape.seqlen_kv <= config.bc;
  if (config.pack_gqa) return false;
  if (config.split) return plan::num_splits(kernel, shape, device) == 1;
  return kernel.schedule.q_tiles_per_cta > 1 &&
         shape.batch * shape.heads_q * plan::tiles(shape.seqlen_q, config.br) <= device.multiprocessors;
}

}  // namespace

bool canonical_less(const TileConfig& a, const TileConfig& b) { return canonical_key(a) < canonical_key(b); }

std::vector<TileConfig> candidates(const Model& model, const std::vector<Family>& families) {
  const plan::AnalysedSpec& spec = model.spec();
  const AttentionShape& shape = model.problem().shape;
  const DeviceInfo& device = model.device();
  const auto able = able_families(spec, device, families);
  const TileConfig heuristic = able.front()->heuristic(spec, shape, device);

  std::vector<TileConfig> all;
  for (const plan::FamilyTraits* traits : able) {
    for (const TileConfig& config : traits->search_space(spec, device)) {
      if (config != heuristic && !is_in_vain(traits->kernel(spec, config), shape, device))
        all.push_back(config);
    }
  }
  std::sort(all.begin(), all.end(), canonical_less);
  all.erase(std::unique(all.begin(), all.end()), all.end());

  std::vector<std::pair<double, TileConfig>> ranked;
  for (const TileConfig& config : all) ranked.emplace_back(model.predict(config).ms, config);
  std::stable_sort(ranked.begin(), ranked.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });

  std::vector<TileConfig> order{heuristic};
  for (const auto& [cost, config] : ranked) order.push_back(config);
  return order;
}

std::string disqualified(const KernelSpec& spec, const KernelReport& kernel, const DeviceInfo& device) {
  for (const plan::Entry& entry : plan::traits(kernel.config.family).kernel(spec, kernel.config).entries) {
    const auto report = std::find_if(kernel.entries.begin(), kernel.entries.end(),
                                     [&](const EntryReport& e) { return e.entry == entry.name; });
    if (report == kernel.entries.end()) continue;
    if (entry.hot && report->spill_bytes > 0) {
      return fmt::format("spills {} bytes in {}", report->spill_bytes, entry.name);
    }
    if (device.registers_per_sm > 0 && report->registers * entry.threads > device.registers_per_sm) {
      return fmt::format("needs {} registers a block in {}; {} has {}", report->registers * entry.threads,
                         entry.name, to_string(device), device.registers_per_sm);
    }
    if (report->shared_bytes > device.shared_per_block) {
      return fmt::format("needs {} bytes of shared memory in {}; {} allows {}", report->shared_bytes,
                         entry.name, to_string(device), device.shared_per_block);
    }
  }
  return {};
}

}  // namespace flashjit::autotune
