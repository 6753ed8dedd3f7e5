// Family simt: plain fused multiply-adds, for any GPU from sm_75 and every type.
#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>

#include "plan/family.hpp"
#include "plan/tiles.hpp"
#include "templates/simt/layout.cuh"

namespace flashjit::plan {
namespace {

constexpr int kOldestCapability = 75;
/// For passes other than attention: one kernel of one size.
constexpr TileConfig kWithoutTiles{
    .family = Family::simt, .br = 16, .bc = 16, .warps = kAuxiliaryThreads / 32};

int shared_bytes(const AnalysedSpec& spec, const TileConfig& config) {
  const int by_queries = simt::shared_bytes(config.br, config.bc);
  if (!gives_gradients(spec.pass)) return by_queries;
  return std::max(by_queries, simt::shared_bytes(config.bc, config.br));
}

/// In the backward pass each side of the tile is the rows of one entry: of dQ, and of dK and dV. Jvp has O
/// and its tangent.
bool shares_tile(const AnalysedSpec& spec, const TileConfig& config) {
  const int d = simt::chunks(spec.head_dim), dv = simt::chunks(spec.v_dim());
  if (spec.pass == Pass::forward) return simt::shares_tile(config.br, config.bc, config.warps, dv);
  // And two tiles of scores at a time, which take registers, too.
  if (spec.pass == Pass::jvp) return simt::shares_tile(config.br, config.bc, config.warps, 2 * dv + 2);
  // Their tangents take four tiles at a time.
  const int tiles = spec.pass == Pass::backward_jvp ? 4 : 0;
  return simt::shares_tile(config.br, config.bc, config.warps, d + tiles) &&
         simt::shares_tile(config.bc, config.br, config.warps, d + dv + tiles);
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

Support check_tile(const AnalysedSpec& spec, const TileConfig& config) {
  if (!is_one_of(config.br, {16, 32, 64}) || !is_one_of(config.bc, {16, 32, 64})) {
    return Support::no(
        fmt::format("Br {} and Bc {} are given; family simt takes 16, 32 or 64", config.br, config.bc));
  }
  if (!is_one_of(config.warps, {4, 8})) {
    return Support::no(fmt::format("{} warps are given; family simt takes 4 or 8", config.warps));
  }
  if (!shares_tile(spec, config)) {
    return Support::no(
        fmt::format("{} gives a thread more than {} rows of a tile or {} values of a result, which spills; "
                    "give 8 warps or fewer rows",
                    to_string(config), simt::kMaxRowsPerThread, simt::kMaxResultsPerThread));
  }
  return Support::yes();
}

Support supports(const AnalysedSpec& spec, const DeviceInfo& device) {
  if (spec.orders_capture_grads() && spec.adds_element_grads())
    return Support::no(
        fmt::format("adds gradients of what {} up in any order, the spec says det: leave one of them out",
                    spec.programs.out_mod_grads > 0 ? "out_mod reads" : "q_mod and k_mod read"));
  if (spec.orders_capture_grads() && spec.pass == Pass::backward_jvp)
    return Support::no(
        "adds tangents of captured tensors' gradients up in any order, the spec says det: leave det out");
  if (spec.epilogue.skip_softmax)
    return Support::no("skip_softmax is for the tensor cores' families sm80 and sm90: leave it out");
  if (device.compute_capability >= kOldestCapability) return Support::yes();
  return Support::no(fmt::format("needs compute capability 7.5, the device has {}.{}",
                                 device.compute_capability / 10, device.compute_capability % 10));
}

Support admits(const AnalysedSpec& spec, const TileConfig& config, const DeviceInfo& device) {
  if (const Support able = supports(spec, device); !able) return able;
  if (const Support switches = check_switches(config); !switches) return switches;
  if (!is_attention(spec.pass) && config != kWithoutTiles)
    return Support::no(
        fmt::format("{} has no tiles to choose; give {}", to_string(spec.pass), to_string(kWithoutTiles)));
  if (const Support tile = check_tile(spec, config); !tile) return tile;
  if (const int bytes = shared_bytes(spec, config); bytes > device.shared_per_block) {
    return Support::no(fmt::format("{} needs {} bytes of shared memory and {} has {}; give smaller tiles",
                                   to_string(config), bytes, device.arch, device.shared_per_block));
  }
  return Support::yes();
}

/// A tile has the heads of one query, which are few.
TileConfig heuristic_of_indices(const AnalysedSpec& spec) {
  TileConfig config{.family = Family::simt, .br = 16, .bc = 32, .warps = 4};
  if (!shares_tile(spec, config)) config.warps = 8;
  return config;
}

/// The largest tiles, unless they would leave multiprocessors idle or reach far beyond the lengths.
TileConfig heuristic(const AnalysedSpec& spec, const AttentionShape& shape, const DeviceInfo& device) {
  if (!is_attention(spec.pass)) return kWithoutTiles;
  if (spec.indices) return heuristic_of_indices(spec);
  TileConfig config{.family = Family::simt, .br = 64, .bc = 64, .warps = 8};
  const bool few_blocks = shape.batch * shape.heads_q * tiles(shape.seqlen_q, 64) < device.multiprocessors;
  if (shape.seqlen_q <= 32 || few_blocks) config.br = 32;
  if (shape.seqlen_kv <= 32 || (few_blocks && gives_gradients(spec.pass))) config.bc = 32;
  if (!shares_tile(spec, config)) config.br = config.bc = 32;
  if (config.br == 32 && config.bc == 32) config.warps = 4;
  if (!shares_tile(spec, config)) config.warps = 8;
  return config;
}

std::vector<TileConfig> search_space(const AnalysedSpec& spec, const DeviceInfo& device) {
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

Entry entry_without_tiles(const char* name, const char* params, const char* header = "") {
  Entry made = auxiliary_entry(name, header);
  made.hot = true;
  made.params = params;
  return made;
}

/// Whether a lane may have eight columns of a row: see append_lanes.cuh and kEncodesByLanes.
bool appends_by_lanes(const AnalysedSpec& spec) {
  const auto is_power_of_two = [](int x) { return x > 0 && (x & (x - 1)) == 0; };
  const int dim = spec.head_dim;
  const auto has_lanes = [&](const KvFormat& format) {
    const int block = format.block == 0 ? dim : format.block;
    const bool halves = format.packing == KvFormat::Packing::halves;
    return (format.bits() == 4 || format.bits() == 8 || (format.bits() == 5 && halves)) &&
           format.code != KvFormat::Code::book && format.decode.empty() && format.keys == 0 &&
           format.tail == 0 && is_power_of_two(block) && block >= 16;
  };
  return !spec.kv.hadamard && size_of(spec.dtype) == 2 && is_power_of_two(dim) && dim <= 256 &&
         spec.v_dim() == dim && !spec.kv.shared_kv && !spec.kv.key_scales &&
         (!spec.decodes_kv() || (has_lanes(spec.kv.k_format) && has_lanes(spec.kv.v_format)));
}

/// Groups of keys that share scales, which there is one step for.
Entry entry_of_keys() {
  Entry entry = entry_without_tiles("quantize", "QuantizeParams", "quantize_keys");
  entry.function = "flashjit::auxiliary::quantize_keys";
  return entry;
}

KernelPlan kernel(const AnalysedSpec& spec, const TileConfig& config) {
  KernelPlan kernel{
      .spec = spec, .config = config, .constants = problem_constants(spec, config, spec.has_tile_lists)};
  if (spec.pass == Pass::append) {
    Entry append =
        entry_without_tiles("append", "AppendParams", spec.decodes_kv() ? "append_rows" : "append");
    if (spec.decodes_kv()) append.function = "flashjit::auxiliary::append_rows";
    if (spec.kv.hadamard) {
      append.header = "flashjit/auxiliary/append_hadamard.cuh";
      append.function = "flashjit::auxiliary::append_hadamard";
    }
    // Blocks wait for memory. With scales of 8 bits they spill with so few registers.
    if (!spec.kv.quantized() || spec.decodes_kv()) append.min_blocks = 8;
    kernel.add(Step::append, append);
    if (appends_by_lanes(spec)) {
      Entry lanes = entry_without_tiles("append_lanes", "AppendParams");
      lanes.min_blocks = 8;
      kernel.add(Step::append_lanes, lanes);
    }
  }
  if (spec.pass == Pass::merge) kernel.add(Step::merge, entry_without_tiles("merge", "MergeParams"));
  if (spec.pass == Pass::quantize) {
    const std::pair<Step, const char*> entries[] = {{Step::clear_scales, "clear_scales"},
                                                    {Step::find_scales, "find_scales"},
                                                    {Step::quantize, "quantize"}};
    for (const auto& [step, name] : entries) {
      if (step != Step::quantize && !spec.kv.k_format.has_argument()) continue;  // no scales but the rows'
      Entry entry = entry_without_tiles(name, "QuantizeParams", "quantize");
      if (step == Step::quantize && spec.decodes_kv()) entry.function = "flashjit::auxiliary::quantize_rows";
      if (spec.kv.k_format.keys > 0) entry = entry_of_keys();
      kernel.add(step, entry);
    }
  }
  if (!is_attention(spec.pass)) return kernel;
  kernel.constants.push_back({"kLseLog2", false});
  kernel.constants.push_back({"kFindsRowStats", false});
  kernel.constants.push_back({"kClaimsTiles", false});
  kernel.constants.push_back({"kListedRows", config.br});
  const int by_queries = simt::shared_bytes(config.br, config.bc);
  const int by_keys = simt::shared_bytes(config.bc, config.br);
  add_row_mods(kernel);
  if (spec.pass == Pass::jvp) {
    Entry jvp = entry("jvp", "jvp", config, by_queries);
    jvp.params = "JvpParams";
    kernel.add(Step::main, jvp);
    return kernel;
  }
  if (spec.pass == Pass::backward_jvp) {
    for (const bool of_keys : {false, true}) {  // which read what the other stores
      Entry tangents = entry(of_keys ? "backward_jvp_dkdv" : "backward_jvp_dq", "backward_jvp", config,
                             of_keys ? by_keys : by_queries);
      tangents.params = "BackwardJvpParams";
      kernel.add(of_keys ? Step::main : Step::main_of_dq, tangents);
    }
    add_sink_grads(kernel);
    return kernel;
  }
  if (spec.pass == Pass::forward) {
    const char* name = spec.indices ? "forward_of_indices" : "forward";
    kernel.add(Step::main, entry(name, name, config, by_queries));
    return kernel;
  }
  if (!spec.epilogue.out_mod.empty()) kernel.add(Step::out_grads, auxiliary_entry("out_grads"));
  kernel.add(Step::preprocess, auxiliary_entry("preprocess"));
  if (spec.indices) {
    kernel.add(Step::main,
               entry("backward_of_indices", "backward_of_indices", config, std::max(by_queries, by_keys)));
    kernel.add(Step::combine_dkdv, auxiliary_entry("convert_dkdv"));
    add_sink_grads(kernel);
    return kernel;
  }
  kernel.add(Step::main, entry("backward_dkdv", "backward", config, by_keys));
  kernel.add(Step::main_of_dq, entry("backward_dq", "backward", config, by_queries));
  add_sink_grads(kernel);
  if (spec.orders_capture_grads())
    kernel.add(Step::ordered_capture_grads, entry("capture_grads", "capture_grads", config, by_queries));
  add_row_mod_grads(kernel);
  return kernel;
}

WorkspaceNeeds workspace(const KernelPlan& kernel, const AttentionShape& shape) {
  const bool tangents = kernel.spec.pass == Pass::backward_jvp;
  return {.row_stats = kernel.spec.pass == Pass::backward || (tangents && finds_sink_grads(kernel.spec)),
          .dout = kernel.spec.pass == Pass::backward && !kernel.spec.epilogue.out_mod.empty(),
          .row_tangents = tangents,
          .semaphores = kernel.spec.orders_capture_grads(),
          .ordered_q_tiles = tiles(shape.seqlen_q, kernel.config.br),
          .num_splits = kernel.spec.indices && kernel.spec.pass == Pass::backward ? 1 : 0};
}

std::string functions(const AnalysedSpec& /*spec*/, const TileConfig& /*config*/) { return {}; }

}  // namespace

const FamilyTraits& simt_traits() {
  static constexpr FamilyTraits kTraits{Family::simt, ComputedBy::threads, supports,
                                        admits,       heuristic,           search_space,
                                        kernel,       workspace,           functions};
  return kTraits;
}

}  // namespace flashjit::plan
