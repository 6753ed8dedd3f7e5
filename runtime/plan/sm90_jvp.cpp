#include "plan/sm90_jvp.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "plan/sm90.hpp"
#include "plan/tensor_core.hpp"

namespace flashjit::plan::sm90_jvp {
namespace {

/// Two groups, beside the producer's. One alone spilled.
constexpr int kWarps = 8;

/// What shared memory and registers hold.
constexpr int kMostColumns = 192, kMostColumnsOfV = 128;

/// Keys of a KV tile, at most: a thread's registers have accumulators of S and O and of their tangents, and S
/// and its tangent as operands beside the next ones (templates/sm90/NOTES.md#os-tangent).
int most_keys(const AnalysedSpec& spec) {
  if (spec.head_dim > 128) return 32;
  return std::min((200 - spec.v_dim()) * 2 / 3 / 16 * 16, 80);
}

/// The most keys of a tile that do not spill. They divide the blocks of a map.
int preferred_keys(const AnalysedSpec& spec) {
  const bool reads =
      spec.programs.score_reads_pairs || spec.programs.column_term || spec.programs.mask_reads_tensors;
  const int most = most_keys(spec);
  if (spec.has_block_map()) return most < 80 ? 32 : 64;
  return std::max(most - (reads || (spec.dropout && spec.v_dim() > 64) ? 16 : 0), 32);
}

/// Shared memory: a tensor and its tangent are one of twice as many columns.
int shared_bytes(const AnalysedSpec& spec, const TileConfig& c) {
  sm90::ForwardLayout layout = hopper::forward_layout(spec, c);
  layout.head_dim = sm90::jvp_columns(spec.head_dim);
  layout.head_dim_v = sm90::jvp_columns(spec.v_dim());
  layout.q_tiles_per_cta = 1;
  layout.reads_bias_tile = layout.reads_column_terms = false;  // scores are found pair by pair
  layout.lists = spec.has_tile_lists;
  return layout.bytes();
}

}  // namespace

Support supports(const AnalysedSpec& spec) {
  if (spec.head_dim > kMostColumns || spec.v_dim() > kMostColumnsOfV)
    return Support::no(fmt::format("O's tangent is for up to {} columns of Q and {} of V, not {} and {}",
                                   kMostColumns, kMostColumnsOfV, spec.head_dim, spec.v_dim()));
  if (spec.head_dim > 64 && spec.programs.score_reads_pairs)
    return Support::no(
        "O's tangent with a score that reads tensors pair by pair is for head dimensions up to 64: above, "
        "registers do not suffice");
  if (spec.programs.column_term && spec.programs.mask_reads_tensors)
    return Support::no(
        "O's tangent with a score that reads tensors by keys is for masks that read none: registers do not "
        "suffice");
  if (spec.head_dim != spec.v_dim() && spec.programs.mask_reads_tensors)
    return Support::no(
        "O's tangent with a mask that reads tensors is for V as wide as Q: the producer's registers do not "
        "suffice");
  if (spec.partial.fp32_out) return Support::no("O's tangent is of Q's type, not fp32");
  return Support::yes();
}

Support admits(const AnalysedSpec& spec, const TileConfig& c, const DeviceInfo& device) {
  const bool plain = c == hopper::forward_config(kWarps, c.bc, c.stages);
  if (!plain || c.bc < 32 || c.bc % 16 != 0 || c.stages < 2 || c.stages > 4)
    return Support::no(
        fmt::format("O's tangent has tiles such as {}: 8 warps, Bc a multiple of 16, 2 to 4 stages, not {}",
                    to_string(hopper::forward_config(kWarps, 48, 2)), to_string(c)));
  if (c.bc > most_keys(spec))
    return Support::no(
        fmt::format("{} has {} keys a tile, registers are for {}", to_string(c), c.bc, most_keys(spec)));
  if (const int bytes = shared_bytes(spec, c); bytes > device.shared_per_block)
    return Support::no(fmt::format("{} needs {} bytes of shared memory, {} has {}", to_string(c), bytes,
                                   device.arch, device.shared_per_block));
  return Support::yes();
}

TileConfig heuristic(const AnalysedSpec& spec, const DeviceInfo& device) {
  // A third stage is worth more than a second buffer of Q, by 1%.
  const TileConfig three = hopper::forward_config(kWarps, preferred_keys(spec), 3);
  return admits(spec, three, device) ? three : hopper::forward_config(kWarps, preferred_keys(spec), 2);
}

std::vector<TileConfig> search_space(const AnalysedSpec& spec, const DeviceInfo& device) {
  std::vector<TileConfig> found;
  for (const int bc : {32, 48, 64, 80})
    for (const int stages : {2, 3, 4})
      if (const TileConfig c = hopper::forward_config(kWarps, bc, stages); admits(spec, c, device))
        found.push_back(c);
  return found;
}

KernelPlan kernel(const AnalysedSpec& spec, const TileConfig& c) {
  Entry main = family_entry(Family::sm90, "jvp", "jvp", c.warps * 32 + hopper::kProducerThreads);
  main.shared_bytes = shared_bytes(spec, c);
  main.hot = true;
  main.params = "JvpParams";
  main.tensor_maps = true;
  main.persistent = hopper::shares_tiles_out(spec);
  KernelPlan kernel = tensor_core_kernel(spec, c, main, {.tile_lists = spec.has_tile_lists});
  kernel.tensor_boxes = {.q_rows = sm90::kWarpgroupRows, .kv_rows = c.bc};
  kernel.constants.push_back({"kListedRows", c.br});
  return kernel;
}

}  // namespace flashjit::plan::sm90_jvp
