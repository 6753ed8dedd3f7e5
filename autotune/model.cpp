#include "autotune/model.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "expr/graph.hpp"
#include "plan/family.hpp"
#include "plan/tiles.hpp"
#include "support/dtypes.hpp"

namespace flashjit::autotune {
namespace {

using plan::ComputedBy;

// Clocks and bytes of one multiprocessor. Fitted to the H100's figures in tools/bench/results and
// templates/sm90/NOTES.md; tools/bench/tuner_study.py shows how well they order candidates.
constexpr double kSharedBytesPerClock = 128;
constexpr double kL2BytesPerClock = 40;
constexpr double kReducedBytesPerClock = 16;  // dQ's additions in global memory
constexpr double kLanes = 128;                // plain instructions a clock
constexpr double kForwardInstructions = 7;    // of a pair, besides products and exponential
constexpr double kBackwardInstructions = 18;
constexpr double kGroupEfficiency = 0.88;   // of wgmma's peak, for what it waits for shared memory and power
constexpr double kClocksPerTile = 150;      // barriers
constexpr double kWarpClocksPerTile = 200;  // the same and addresses, where each warp loads and computes
constexpr double kClocksPerBlock = 5000;    // first loads, a softmax that nothing hides, last stores
constexpr double kLaunchMs = 0.003;
constexpr double kCombinedRowMs = 2.2e-6;  // O of all splits of the keys, written and read once more
constexpr int kGroupWarps = 4;
constexpr int kSchedulers = 4;                   // of a multiprocessor
constexpr int kThreadsPerMultiprocessor = 1536;  // the least of the supported GPUs
constexpr int kOtherRegisters = 70;              // of a thread, besides accumulators
constexpr int kRegisterUnit = 8;                 // in which a thread has them
constexpr double kManyWaves = 40;                // from here on the order of the blocks does not matter

double round_up(int value, int unit) {
  const int units = (value + unit - 1) / unit;
  return units * unit;
}

/// How long each unit of a multiprocessor is busy with one tile.
struct TileClocks {
  double products = 0, exponentials = 0, arithmetic = 0, shared = 0, l2 = 0, reductions = 0;
  double overhead = 0;

  std::array<std::pair<double, const char*>, 6> units() const {
    return {{{products, "products"},
             {exponentials, "exponentials"},
             {arithmetic, "arithmetic"},
             {shared, "shared memory"},
             {l2, "L2 cache"},
             {reductions, "reductions"}}};
  }
  double sum() const { return products + exponentials + arithmetic + shared + l2 + reductions; }
};

bool is_backward(const KernelSpec& spec) { return spec.pass == Pass::backward; }

/// What is modelled: a kernel, by what computes its tiles.
struct Candidate {
  const plan::KernelPlan& kernel;
  ComputedBy by;

  const KernelSpec& spec() const { return kernel.spec; }
  const TileConfig& config() const { return kernel.config; }
};

double macs_per_clock(ComputedBy by, const Rates& rates) {
  switch (by) {
    case ComputedBy::threads:
      return rates.plain_macs / 2;  // operands come from shared memory
    case ComputedBy::warps:
      return rates.tensor_macs;
    case ComputedBy::warp_groups:
      break;
  }
  return rates.group_macs * kGroupEfficiency;
}

/// Warps, or warpgroups, that each read the whole streamed tile.
int readers(const Candidate& of) {
  const int warps = of.config().warps;
  const int all = of.by == ComputedBy::warp_groups ? warps / kGroupWarps : warps;
  return std::max(1, all / of.kernel.schedule.q_tiles_per_cta);
}

double multiply_adds(const KernelSpec& spec, const TileConfig& c) {
  const double d = round_up(spec.head_dim, 16), dv = round_up(spec.v_dim(), 16);
  if (spec.pass == Pass::jvp) return 3 * (d + dv);
  // Warps that share columns of dK and dV each compute S and dP.
  return is_backward(spec) ? c.d_split * (d + dv) + 2 * d + dv : d + dv;
}

/// Bytes that the products read from shared memory for one tile.
double shared_bytes(const Candidate& of) {
  const KernelSpec& spec = of.spec();
  const TileConfig& c = of.config();
  const double dims = spec.head_dim + spec.v_dim();
  const double element = of.by == ComputedBy::threads ? 4 : size_of(spec.q_type());
  if (!is_backward(spec)) {
    const double q = c.q_in_registers ? 0 : c.br * static_cast<double>(spec.head_dim);
    const double of_kv = of.by == ComputedBy::threads ? element : size_of(spec.kv_type());
    return of_kv * readers(of) * c.bc * dims + element * q;
  }
  // K and V by the rows that own them; Q and dO twice by everyone; dS once more for dQ, with K.
  const double own = c.bc * dims, streamed = 2.0 * readers(of) * c.br * dims / c.d_split;
  return element * (own * c.d_split + streamed + c.bc * static_cast<double>(spec.head_dim + 2 * c.br));
}

TileClocks tile_clocks(const Candidate& of, const Rates& rates, double program_operations) {
  const KernelSpec& spec = of.spec();
  const TileConfig& c = of.config();
  const double pairs = static_cast<double>(c.br) * c.bc;
  const double instructions = is_backward(spec) ? kBackwardInstructions : kForwardInstructions;
  const double streamed_rows = is_backward(spec) ? c.br : c.bc;
  TileClocks clocks;
  clocks.products = pairs * multiply_adds(spec, c) / macs_per_clock(of.by, rates);
  clocks.exponentials = pairs * c.d_split / rates.exponentials;
  clocks.arithmetic = pairs * c.d_split * (instructions + program_operations) / kLanes;
  clocks.shared = shared_bytes(of) / kSharedBytesPerClock;
  clocks.l2 = streamed_rows * (spec.head_dim + spec.v_dim()) * size_of(spec.kv_type()) / kL2BytesPerClock;
  if (is_backward(spec) && of.by != ComputedBy::threads)
    clocks.reductions = 4.0 * c.br * spec.head_dim / kReducedBytesPerClock;
  clocks.overhead = of.by == ComputedBy::warp_groups ? kClocksPerTile : kWarpClocksPerTile;
  return clocks;
}

/// A tile's time when units work side by side as far as the warps of as many resident tiles let them.
double overlapped(const TileClocks& clocks, const Candidate& of, int resident) {
  const KernelSpec& spec = of.spec();
  const TileConfig& c = of.config();
  double busiest = 0;
  for (const auto& [unit, name] : clocks.units()) busiest = std::max(busiest, unit);
  if (of.by == ComputedBy::warp_groups) {
    // Loads have their own warps; products run under the softmax of the same and of other groups.
    const double hidden_loads = is_backward(spec) ? 0 : clocks.shared;
    const double rest = std::max(0.0, clocks.sum() - busiest - clocks.l2 - hidden_loads);
    const int groups = readers(of) * resident;
    const double exposed = is_backward(spec) ? 0.12 : groups <= 1 ? 0.5 : groups == 2 ? 0.15 : 0.07;
    const double late = c.stages == 1 ? clocks.l2 : 0;
    return busiest + exposed * rest + late + clocks.overhead;
  }
  // Each scheduler's warps take turns; one warp alone does one thing after another.
  const double turns = std::max(1.0, static_cast<double>(c.warps) * resident / kSchedulers);
  const double serial = (clocks.sum() - (c.stages > 1 ? clocks.l2 : 0) + clocks.overhead) / turns;
  constexpr double kSharpness = 4;
  return std::pow(std::pow(busiest, kSharpness) + std::pow(serial, kSharpness), 1 / kSharpness);
}

int registers_a_thread(const Candidate& of, const plan::Entry& entry, const DeviceInfo& device) {
  const KernelSpec& spec = of.spec();
  const TileConfig& c = of.config();
  // setmaxnreg shares out what the block has: all that there are.
  if (of.by == ComputedBy::warp_groups)
    return device.registers_per_sm / (entry.threads * entry.min_blocks) / kRegisterUnit * kRegisterUnit;
  const double threads = c.warps * 32.0;
  const double kept = is_backward(spec) ? c.d_split * 2.0 * c.br * c.bc / threads +
                                              c.bc * (spec.head_dim + spec.v_dim()) / threads
                                        : c.br * (c.bc + spec.v_dim()) / threads;
  const double q = c.q_in_registers ? c.br * spec.head_dim / 2.0 / threads : 0;
  return static_cast<int>(std::min(255.0, kept + q + kOtherRegisters));
}

int resident_blocks(const Candidate& of, const plan::Entry& entry, const DeviceInfo& device) {
  const int by_shared = device.shared_per_sm / (entry.shared_bytes + plan::kReservedSharedBytes);
  const int by_threads = kThreadsPerMultiprocessor / std::max(entry.threads, 1);
  const int by_registers =
      device.registers_per_sm / std::max(1, registers_a_thread(of, entry, device) * entry.threads);
  return std::max(1, std::min({by_shared, by_threads, by_registers}));
}

/// When the last of the blocks ends. Each entry of `blocks` stands for `copies`.
double end_of_blocks(std::vector<double> blocks, std::int64_t copies, double slots) {
  double total = 0;
  for (const double block : blocks) total += block * static_cast<double>(copies);
  if (blocks.empty()) return 0;
  const double count = static_cast<double>(blocks.size()) * static_cast<double>(copies);
  if (count >= kManyWaves * slots) return total / slots + total / count / 2;
  return plan::makespan(std::move(blocks), copies, static_cast<std::int64_t>(slots));
}

double operations_of(const KernelSpec& spec) {
  expr::Graph graph;
  if (!spec.score.empty()) graph.add(spec.score.tree());
  const bool derived = is_backward(spec) && !spec.score.empty();
  double operations = graph.size() * (derived ? 2.0 : 1.0);
  if (spec.dropout) operations += 12;  // Philox, shared by neighbours
  return operations;
}

}  // namespace

Rates rates_of(const DeviceInfo& device) {
  const int capability = device.compute_capability;
  if (capability >= 120) return {2.4e6, 1024, 512, 128, 16, 1.8e9};
  if (capability >= 100) return {1.9e6, 4096, 1024, 128, 16, 8.0e9};
  if (capability >= 90) return {1.65e6, 2048, 1024, 128, 16, 3.0e9};
  if (capability >= 86) return {1.8e6, 512, 512, 128, 16, 0.9e9};
  if (capability >= 80) return {1.4e6, 1024, 1024, 64, 16, 1.9e9};
  return {1.5e6, 512, 512, 64, 16, 0.3e9};
}

double roofline_ms(const KernelSpec& spec, const Work& work, const DeviceInfo& device) {
  const Rates rates = rates_of(device);
  const double multiprocessors = std::max(device.multiprocessors, 1);
  const double macs = dtype_info(spec.dtype).mma_name.empty() ? rates.plain_macs
                                                              : std::max(rates.tensor_macs, rates.group_macs);
  const double products = work.operations / 2 / macs / multiprocessors / rates.clocks_per_ms;
  const double exponentials = work.pairs / rates.exponentials / multiprocessors / rates.clocks_per_ms;
  return std::max({products, exponentials, work.bytes / rates.bytes_per_ms});
}

Model::Model(const Problem& problem, const DeviceInfo& device, double map_density)
    : problem_{problem.spec.normalized(), problem.shape},
      spec_(problem.spec),
      device_(device),
      rates_(rates_of(device)),
      program_operations_(operations_of(problem_.spec)),
      coverage_(problem_.spec, problem_.shape, plausible_map(problem_.spec, problem_.shape, map_density)),
      work_(work_of(problem_.spec, problem_.shape,
                    plausible_map(problem_.spec, problem_.shape, map_density))) {}

Prediction Model::predict(const TileConfig& config) const {
  const KernelSpec& spec = problem_.spec;
  const AttentionShape& shape = problem_.shape;
  const plan::FamilyTraits& traits = plan::traits(config.family);
  const plan::KernelPlan kernel = traits.kernel(spec_, config);
  const Candidate candidate{kernel, traits.computed_by};
  const TileClocks clocks = tile_clocks(candidate, rates_, program_operations_);
  const auto splits = static_cast<double>(plan::num_splits(kernel, shape, device_));
  const double parts = config.cluster ? kJoiningCtas : splits;  // of the keys of a Q tile

  Prediction out;
  double busiest = 0;
  for (const auto& [unit, name] : clocks.units()) {
    if (unit <= busiest) continue;
    busiest = unit;
    out.bound = name;
  }
  for (const plan::Launch& launch : plan::launches_of(kernel, shape)) {
    if (launch.blocks == 0) continue;
    out.ms += kLaunchMs;
    const plan::Entry& entry = kernel.entries.at(launch.entry);
    if (!entry.hot) continue;
    // A grid too small to fill the device spreads out.
    const double multiprocessors = std::max(device_.multiprocessors, 1);
    const double share = std::ceil(static_cast<double>(launch.blocks) * splits / multiprocessors);
    const int resident = static_cast<int>(std::min<double>(
        resident_blocks(candidate, entry, device_) * kernel.schedule.q_tiles_per_cta, share));
    const double tile = overlapped(clocks, candidate, resident);

    const plan::ForwardTiles rows = plan::forward_tiles(spec, shape, config);
    // Backward, a block owns keys, but for the kernel of simt that computes dQ.
    const bool by_columns = is_backward(spec) && kernel.steps.at(launch.entry) == plan::Step::main;
    const std::vector<std::int64_t> visited =
        by_columns ? coverage_.tiles_of_columns(config.br, config.bc)
                   : coverage_.tiles_of_rows(static_cast<int>(rows.queries), config.bc);
    const std::int64_t heads = by_columns ? shape.heads_kv : rows.heads;
    const double group = by_columns ? static_cast<double>(shape.heads_q) /
                                          static_cast<double>(std::max<std::int64_t>(heads, 1))
                                    : 1;
    std::vector<double> blocks;
    for (const std::int64_t tiles : visited) {
      out.tiles += static_cast<double>(tiles * shape.batch * shape.heads_q);
      const double own_tiles = std::ceil(static_cast<double>(tiles) * group / parts);
      blocks.push_back(resident * (own_tiles * tile + kClocksPerBlock));
    }
    const double slots = resident * multiprocessors;
    const auto copies = static_cast<double>(shape.batch * heads) * parts;
    out.ms +=
        end_of_blocks(std::move(blocks), static_cast<std::int64_t>(copies), slots) / rates_.clocks_per_ms;
    out.tile_clocks = std::max(out.tile_clocks, tile);
    out.waves = std::max(out.waves, static_cast<double>(launch.blocks) * splits / slots);
    out.blocks_resident = resident;
  }
  // The passes around the main loop: D, zeroing and conversion of dQ.
  out.ms += (is_backward(spec) ? 2 : 0) * work_.bytes / 2 / rates_.bytes_per_ms;
  if (config.split && !config.cluster) {
    const std::int64_t rows =
        is_backward(spec) ? shape.heads_kv * shape.seqlen_kv : shape.heads_q * shape.seqlen_q;
    out.ms += kCombinedRowMs * static_cast<double>(shape.batch * rows);
  }
  out.ms = std::max(out.ms, work_.bytes / rates_.bytes_per_ms);
  return out;
}

}  // namespace flashjit::autotune
