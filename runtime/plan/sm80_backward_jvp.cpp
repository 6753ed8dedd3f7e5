#include "plan/sm80_backward_jvp.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "plan/tiles.hpp"
#include "templates/sm80/layout.cuh"

namespace flashjit::plan::sm80_backward_jvp {
namespace {

constexpr int kMostColumns = 128;  ///< of each of Q and V, whose gradients a warp's registers hold

TileConfig config_of_warps(int warps) {
  return {.family = Family::sm80, .br = 16 * warps, .bc = 16 * warps, .warps = warps};
}

int bytes_of(const AnalysedSpec& spec, const TileConfig& c) {
  return sm80::BackwardJvpLayout{c.br, spec.head_dim, spec.v_dim()}.bytes();
}

}  // namespace

Support supports(const AnalysedSpec& spec) {
  if (std::max(spec.head_dim, spec.v_dim()) > kMostColumns)
    return Support::no(fmt::format("gradients' tangents are for up to {} columns, not {} and {}",
                                   kMostColumns, spec.head_dim, spec.v_dim()));
  if (spec.orders_capture_grads()) return Support::no(kUnorderedGrads);
  return Support::yes();
}

Support admits(const AnalysedSpec& spec, const TileConfig& c, const DeviceInfo& device) {
  const bool known = c.warps == 2 || c.warps == 4 || c.warps == 8;
  if (!known || c != config_of_warps(c.warps))
    return Support::no(fmt::format("gradients' tangents have tiles of {}, {} and {}, not {}",
                                   to_string(config_of_warps(2)), to_string(config_of_warps(4)),
                                   to_string(config_of_warps(8)), to_string(c)));
  if (const int bytes = bytes_of(spec, c); bytes > device.shared_per_block)
    return Support::no(fmt::format("{} needs {} bytes of shared memory, {} has {}", to_string(c), bytes,
                                   device.arch, device.shared_per_block));
  return Support::yes();
}

/// Smaller tiles where larger ones leave multiprocessors idle, and of more than 64 columns: on an H200 (2 x
/// 16 x 4k, causal) 124 TFLOP/s with 2 warps and 97 with 4, of 64 columns 108 and 122.
TileConfig heuristic(const AnalysedSpec& spec, const AttentionShape& shape, const DeviceInfo& device) {
  const TileConfig whole = config_of_warps(4);
  const bool few_blocks =
      shape.batch * shape.heads_kv * tiles(shape.seqlen_kv, whole.bc) < device.multiprocessors;
  const bool wide = std::max(spec.head_dim, spec.v_dim()) > 64;
  return wide || few_blocks || !admits(spec, whole, device) ? config_of_warps(2) : whole;
}

std::vector<TileConfig> search_space(const AnalysedSpec& spec, const DeviceInfo& device) {
  std::vector<TileConfig> found;
  for (const int warps : {2, 4, 8})
    if (admits(spec, config_of_warps(warps), device)) found.push_back(config_of_warps(warps));
  return found;
}

KernelPlan kernel(const AnalysedSpec& spec, const TileConfig& c) {
  KernelPlan kernel{.spec = spec, .config = c, .constants = problem_constants(spec, c, spec.has_tile_lists)};
  for (const char* off : {"kLseLog2", "kFindsRowStats", "kClaimsTiles"})
    kernel.constants.push_back({off, false});
  kernel.constants.push_back({"kSharedBytes", bytes_of(spec, c)});
  kernel.constants.push_back({"kListedRows", c.br});
  for (const bool of_keys : {false, true}) {  // which read what the other stores
    Entry entry = family_entry(c.family, of_keys ? "backward_jvp_dkdv" : "backward_jvp_dq", "backward_jvp",
                               c.warps * 32);
    entry.shared_bytes = bytes_of(spec, c);
    entry.hot = true;
    entry.params = "BackwardJvpParams";
    kernel.add(of_keys ? Step::main : Step::main_of_dq, entry);
  }
  add_sink_grads(kernel);
  return kernel;
}

WorkspaceNeeds workspace(const AnalysedSpec& spec) {
  return {.row_stats = finds_sink_grads(spec), .row_tangents = true};
}

}  // namespace flashjit::plan::sm80_backward_jvp
