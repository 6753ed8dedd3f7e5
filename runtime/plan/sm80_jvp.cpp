#include "plan/sm80_jvp.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "templates/sm80/layout.cuh"

namespace flashjit::plan::sm80_jvp {
namespace {

constexpr int kRowsOfWarp = 16;

TileConfig config(Family family, int warps, int bc, int min_blocks = 1) {
  return {.family = family, .br = kRowsOfWarp * warps, .bc = bc, .warps = warps, .min_blocks = min_blocks};
}

int shared_bytes(const AnalysedSpec& spec, const TileConfig& c) {
  return sm80::JvpLayout{c.br, c.bc, spec.head_dim, spec.v_dim()}.bytes();
}

/// fp32 values that a thread keeps: S and O, and their tangents.
int kept_values(const AnalysedSpec& spec, const TileConfig& c) {
  return c.bc + sm80::round_up(spec.v_dim(), 16);
}

}  // namespace

Support supports(const AnalysedSpec& spec) {
  if (spec.v_dim() > sm80::kMostJvpColumns || spec.head_dim > sm80::kMostNarrowColumns)
    return Support::no(fmt::format("O's tangent is for up to {} columns of Q and {} of V, not {} and {}",
                                   sm80::kMostNarrowColumns, sm80::kMostJvpColumns, spec.head_dim,
                                   spec.v_dim()));
  if (spec.partial.fp32_out) return Support::no("O's tangent is of Q's type, not fp32");
  return Support::yes();
}

Support admits(const AnalysedSpec& spec, const TileConfig& c, const DeviceInfo& device) {
  const bool plain = c == config(c.family, c.warps, c.bc, c.min_blocks);
  const auto one_of = [](int value, auto... allowed) { return ((value == allowed) || ...); };
  if (!plain || !one_of(c.warps, 4, 8) || !one_of(c.bc, 16, 32, 64) || !one_of(c.min_blocks, 1, 2))
    return Support::no(
        fmt::format("O's tangent has tiles such as {} and {}: 4 or 8 warps of 16 rows, Bc of 16, "
                    "32 or 64 and min_blocks of 1 or 2, not {}",
                    to_string(config(c.family, 4, 64)), to_string(config(c.family, 8, 32)), to_string(c)));
  if (const int bytes = shared_bytes(spec, c); bytes > device.shared_per_block)
    return Support::no(fmt::format("{} needs {} bytes of shared memory, {} has {}", to_string(c), bytes,
                                   device.arch, device.shared_per_block));
  constexpr int kOthers = 60;  // addresses, fragments, statistics
  const int limit = std::min(255, device.registers_per_sm / (c.warps * 32 * c.min_blocks));
  if (const int values = kept_values(spec, c); values > limit - kOthers)
    return Support::no(
        fmt::format("{} keeps {} values a thread, {} registers are too few", to_string(c), values, limit));
  return Support::yes();
}

std::vector<TileConfig> preferences(Family family, const AnalysedSpec& spec) {
  // Random numbers, and what scores read of pairs, take registers: larger tiles spill.
  const bool takes_more = spec.dropout || spec.programs.score_reads_pairs || spec.programs.capture_grads > 0;
  if (spec.v_dim() > 64)
    return {config(family, 8, takes_more ? 16 : 32), config(family, 4, takes_more ? 16 : 32)};
  if (takes_more) return {config(family, 8, 32), config(family, 4, 32)};
  return {config(family, 8, 64), config(family, 4, 64), config(family, 4, 32)};
}

std::vector<TileConfig> search_space(Family family, const AnalysedSpec& spec, const DeviceInfo& device) {
  std::vector<TileConfig> found;
  for (const int warps : {4, 8})
    for (const int bc : {16, 32, 64})
      for (const int min_blocks : {1, 2})
        if (const TileConfig c = config(family, warps, bc, min_blocks); admits(spec, c, device))
          found.push_back(c);
  return found;
}

KernelPlan kernel(const AnalysedSpec& spec, const TileConfig& c) {
  Entry main = family_entry(c.family, "jvp", "jvp", c.warps * 32);
  main.shared_bytes = shared_bytes(spec, c);
  main.hot = true;
  main.params = "JvpParams";
  main.min_blocks = c.min_blocks;
  KernelPlan kernel = tensor_core_kernel(spec, c, main, {.tile_lists = spec.has_tile_lists});
  kernel.constants.push_back({"kListedRows", c.br});
  return kernel;
}

}  // namespace flashjit::plan::sm80_jvp
