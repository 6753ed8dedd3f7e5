#include "autotune/space.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "plan/family.hpp"

namespace flashjit::autotune {
namespace {

constexpr double kSharedBytesPerClock = 128;  // a multiprocessor
constexpr double kGroupMacsPerClock = 2048;   // wgmma, 16 bit
constexpr double kTensorMacsPerClock = 1024;  // mma.sync, 16 bit
constexpr double kPlainMacsPerClock = 128;    // fused multiply-adds
constexpr double kExponentialsPerClock = 16;
constexpr double kAtomicBytesPerClock = 16;
constexpr double kClocksPerTile = 300;
constexpr int kThreadsPerMultiprocessor = 1536;  // the least of the supported GPUs
constexpr int kReservedSharedBytes = 1024;       // the driver's, each thread block
constexpr double kWarpsThatHideLatency = 8;
constexpr int kGroupWarps = 4;  // warps that read operands together with wgmma

auto canonical_key(const TileConfig& c) {
  return std::tuple(static_cast<int>(c.family), c.br, c.bc, c.warps, c.stages, c.q_in_registers, c.d_split,
                    c.min_blocks);
}

double round_up(std::int64_t value, int step) {
  return static_cast<double>((value + step - 1) / step * step);
}

int blocks_per_multiprocessor(const plan::Entry& entry, const DeviceInfo& device) {
  const int by_shared = device.shared_per_sm / (entry.shared_bytes + kReservedSharedBytes);
  const int by_threads = kThreadsPerMultiprocessor / std::max(entry.threads, 1);
  return std::max(1, std::min(by_shared, by_threads));
}

double macs_per_clock(Family family) {
  if (family == Family::simt) return kPlainMacsPerClock;
  return family == Family::sm90 ? kGroupMacsPerClock : kTensorMacsPerClock;
}

/// Warps, or warp groups, each of which reads the whole streamed tile.
int readers(const TileConfig& config) {
  return std::max(1, config.family == Family::sm90 ? config.warps / kGroupWarps : config.warps);
}

/// Clocks of one multiprocessor for one pair (q, kv): multiply-adds, fragments re-read from shared memory,
/// softmax, dQ's way to global memory, and what every tile costs whatever its size.
double clocks_per_pair(const AttentionSpec& spec, const TileConfig& config) {
  const bool backward = spec.pass == Pass::backward;
  const double dims = spec.head_dim + spec.v_dim();
  // Warps that share columns of dK and dV each compute S and dP.
  const double products = backward ? (2.0 * config.d_split + 3.0) / 2.0 : 1.0;
  // Every reader keeps its own rows of the tile that does not stream.
  const double stationary = backward ? config.bc : config.br;
  const double streamed = backward ? config.br : config.bc;
  const double rows_per_reader = stationary * config.d_split / readers(config);
  const double reread = config.q_in_registers ? 0.0 : spec.head_dim / streamed;
  const double bytes = size_of(spec.dtype) * products * (dims / std::max(rows_per_reader, 1.0) + reread);
  const double dq_bytes = backward ? 4.0 * spec.head_dim / config.bc : 0.0;
  return products * dims / macs_per_clock(config.family) + bytes / kSharedBytesPerClock +
         dq_bytes / kAtomicBytesPerClock + 1.0 / kExponentialsPerClock +
         kClocksPerTile / (static_cast<double>(config.br) * config.bc);
}

std::vector<const plan::FamilyTraits*> able_families(const Problem& problem, const DeviceInfo& device,
                                                     const std::vector<Family>& wanted) {
  std::vector<const plan::FamilyTraits*> able;
  std::string reasons;
  for (const plan::FamilyTraits& traits : plan::families()) {
    const bool chosen =
        wanted.empty() || std::find(wanted.begin(), wanted.end(), traits.family) != wanted.end();
    const Support support =
        chosen ? traits.supports(problem.spec, device) : Support::no("left out by the choice of families");
    if (support) {
      able.push_back(&traits);
    } else {
      reasons += fmt::format("; {}: {}", to_string(traits.family), support.reason);
    }
  }
  if (able.empty()) {
    throw Error(ErrorCode::unsupported, fmt::format("no kernel family can do {} on {}{}",
                                                    to_string(problem.spec), to_string(device), reasons));
  }
  return able;
}

}  // namespace

bool canonical_less(const TileConfig& a, const TileConfig& b) { return canonical_key(a) < canonical_key(b); }

double expected_cost(const Problem& problem, const TileConfig& config, const DeviceInfo& device) {
  const plan::FamilyTraits& traits = plan::traits(config.family);
  const std::vector<plan::Entry> entries = traits.entries(problem.spec, config);
  double waste = 1.0;  // of the last, partly filled wave
  double resident_warps = kWarpsThatHideLatency;
  for (const plan::Launch& launch : traits.launches(problem.spec, problem.shape, config)) {
    const plan::Entry& entry = entries.at(launch.entry);
    if (!entry.hot || launch.blocks == 0) continue;
    const int multiprocessors = std::max(device.multiprocessors, 1);
    // A grid too small to fill the device spreads out.
    const double share = std::ceil(static_cast<double>(launch.blocks) / multiprocessors);
    const double resident = std::min<double>(blocks_per_multiprocessor(entry, device), share);
    const double waves = static_cast<double>(launch.blocks) / (resident * multiprocessors);
    waste = std::max(waste, std::ceil(waves) / waves);
    resident_warps = std::min(resident_warps, resident * entry.threads / 32.0);
  }
  const double padded_pairs =
      round_up(problem.shape.seqlen_q, config.br) * round_up(problem.shape.seqlen_kv, config.bc);
  const double latency = kWarpsThatHideLatency / std::max(resident_warps, 1.0);
  return padded_pairs * clocks_per_pair(problem.spec, config) * latency * waste;
}

std::vector<TileConfig> candidates(const Problem& problem, const DeviceInfo& device,
                                   const std::vector<Family>& families) {
  const auto able = able_families(problem, device, families);
  const TileConfig heuristic = able.front()->heuristic(problem.spec, problem.shape, device);

  std::vector<TileConfig> all;
  for (const plan::FamilyTraits* traits : able) {
    for (const TileConfig& config : traits->search_space(problem.spec, device)) {
      if (config != heuristic && traits->admits(problem.spec, config, device)) all.push_back(config);
    }
  }
  std::sort(all.begin(), all.end(), canonical_less);
  all.erase(std::unique(all.begin(), all.end()), all.end());

  std::vector<std::pair<double, TileConfig>> ranked;
  for (const TileConfig& config : all) ranked.emplace_back(expected_cost(problem, config, device), config);
  std::stable_sort(ranked.begin(), ranked.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });

  std::vector<TileConfig> order{heuristic};
  for (const auto& [cost, config] : ranked) order.push_back(config);
  return order;
}

std::string disqualified(const AttentionSpec& spec, const KernelReport& kernel, const DeviceInfo& device) {
  for (const plan::Entry& entry : plan::traits(kernel.config.family).entries(spec, kernel.config)) {
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
