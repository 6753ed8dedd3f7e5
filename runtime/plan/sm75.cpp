// Family sm75: mma.sync of 8 columns and ldmatrix, without cp.async, within 64 KB of shared memory. It
// has the kernels of templates/sm80 with the instructions of templates/sm75.
#include <fmt/format.h>

#include <algorithm>

#include "plan/mma_sync.hpp"
#include "plan/sm80_jvp.hpp"
#include "templates/sm80/layout.cuh"

namespace flashjit::plan {
namespace {

constexpr int kTuringCapability = 75, kAmpereCapability = 80;

TileConfig turing_config(int br, int bc, int warps, int stages, int d_split = 1) {
  return mma_sync::config(Family::sm75, br, bc, warps, stages, false, d_split);
}

// Best first: measured on Hopper with as many blocks a multiprocessor as 64 KB of shared memory allow. What
// spills on sm_75 is left out.

std::vector<TileConfig> turing_forward(const AnalysedSpec& spec) {
  const int d = std::max(spec.head_dim, spec.v_dim());
  if (d <= 64)
    return {turing_config(128, 32, 4, 1), turing_config(64, 64, 4, 1), turing_config(64, 32, 4, 1)};
  if (d <= 128)  // a map's tests take registers
    return mma_sync::good_of({{turing_config(128, 48, 8, 1), !spec.has_block_map()},
                              {turing_config(64, 64, 4, 1), !spec.has_block_map()},
                              {turing_config(64, 32, 4, 1)}});
  if (d <= sm80::kMostNarrowColumns)
    return {turing_config(64, 32, 4, 1), turing_config(64, 16, 4, 1), turing_config(32, 16, 2, 1)};
  if (!mma_sync::is_wide(spec))
    return {turing_config(32, 32, 2, 1), turing_config(32, 16, 2, 1), turing_config(16, 16, 1, 1)};
  return {turing_config(32, 16, 4, 1, 2), turing_config(16, 16, 4, 1, 4)};
}

std::vector<TileConfig> turing_backward(const AnalysedSpec& spec) {
  const int d = std::max(spec.head_dim, spec.v_dim());
  if (d <= 64)
    return {turing_config(32, 128, 8, 1), turing_config(32, 64, 4, 2), turing_config(16, 64, 8, 1, 2),
            turing_config(16, 32, 4, 1, 2)};
  if (d <= 128)
    return {turing_config(32, 64, 4, 1), turing_config(16, 64, 8, 1, 2), turing_config(16, 32, 4, 1, 2)};
  if (d <= sm80::kMostNarrowColumns) return {turing_config(32, 32, 4, 1, 2), turing_config(16, 32, 4, 1, 2)};
  return {turing_config(16, 16, 4, 1, 4)};
}

std::vector<TileConfig> turing_preferences(const AnalysedSpec& spec) {
  if (spec.pass == Pass::jvp) return sm80_jvp::preferences(Family::sm75, spec);
  return spec.pass == Pass::forward ? turing_forward(spec) : turing_backward(spec);
}

/// What a tile must have beside its size: one tile at a time is on its way, in registers.
Support check_turing_tile(const AnalysedSpec& spec, const TileConfig& c, const DeviceInfo& device) {
  if (c.family != Family::sm75) return Support::no("the configuration is of another family");
  if (spec.pass == Pass::forward && c.stages != 1)
    return Support::no(fmt::format("the forward pass has one stage, not {}", c.stages));
  if (c.stages > 2) return Support::no(fmt::format("the backward pass has 1 or 2 stages, not {}", c.stages));
  return mma_sync::admits(spec, c, device);
}

Support supports_turing(const AnalysedSpec& spec, const DeviceInfo& device) {
  if (!is_attention(spec.pass)) return Support::no(kNoProducts);
  if (spec.score.is_weight()) return Support::no(kNeedsSoftmax);
  if (spec.epilogue.skip_softmax) return Support::no("skip_softmax needs max.NaN of sm_80");
  if (spec.dtype != DType::fp16)
    return Support::no(fmt::format("tensor cores of sm_75 multiply fp16, the spec has {}: give fp16 tensors",
                                   to_string(spec.dtype)));
  if (device.compute_capability < kTuringCapability)
    return Support::no(fmt::format("needs mma.m16n8k8 of sm_75, the device is {}", device.arch));
  if (const Support able = mma_sync::supports(spec); !able) return able;
  const bool fits = std::ranges::any_of(turing_preferences(spec), [&](const TileConfig& c) {
    return static_cast<bool>(check_turing_tile(spec, c, device));
  });
  if (!fits)
    return Support::no(
        fmt::format("no tile of head dimensions {} and {} fits {} bytes of shared memory and the registers",
                    spec.head_dim, spec.v_dim(), device.shared_per_block));
  return Support::yes();
}

Support admits_turing(const AnalysedSpec& spec, const TileConfig& c, const DeviceInfo& device) {
  if (const Support able = supports_turing(spec, device); !able) return able;
  if (c.decode_cache) return Support::no("decode_cache is for families sm80 and sm90");
  return check_turing_tile(spec, c, device);
}

TileConfig turing_heuristic(const AnalysedSpec& spec, const AttentionShape& shape, const DeviceInfo& device) {
  return mma_sync::heuristic(
      spec, shape, device,
      {.tiles = turing_preferences(spec), .keys_of_one_warp = 32, .stages_of_one_warp = 1});
}

/// Nothing on newer devices, where sm80 is faster with every tile.
std::vector<TileConfig> turing_space(const AnalysedSpec& spec, const DeviceInfo& device) {
  if (device.compute_capability >= kAmpereCapability) return {};
  if (spec.pass == Pass::jvp) return sm80_jvp::search_space(Family::sm75, spec, device);
  std::vector<TileConfig> found;
  const auto consider = [&](const TileConfig& c) {
    if (admits_turing(spec, c, device)) found.push_back(c);
  };
  const bool wide = mma_sync::is_wide(spec), forward = spec.pass == Pass::forward;
  for (const int warps : {1, 2, 4, 8})
    for (const int br : {16, 32, 64, 128})
      for (const int bc : {16, 32, 48, 64, 96, 128})
        for (const int stages : {1, 2})
          for (const int d_split : {1, 2, 4}) {
            if (d_split > (wide ? 4 : forward ? 1 : 2)) continue;
            const TileConfig c = turing_config(br, bc, warps, stages, d_split);
            consider(c);
            if (forward && br <= 64 && bc % 32 == 0) consider(mma_sync::with_split(spec, c, device));
          }
  if (!forward)
    for (const TileConfig& c : turing_preferences(spec)) consider(mma_sync::with_split(spec, c, device));
  return found;
}

std::string turing_functions(const AnalysedSpec& /*spec*/, const TileConfig& /*config*/) {
  return "  using Mma = sm75::Mma16x8x8;\n  using Copies = sm75::RegisterCopies;\n";
}

}  // namespace

const FamilyTraits& sm75_traits() {
  static constexpr FamilyTraits kTraits{Family::sm75,     ComputedBy::warps,     supports_turing,
                                        admits_turing,    turing_heuristic,      turing_space,
                                        mma_sync::kernel, tensor_core_workspace, turing_functions};
  return kTraits;
}

}  // namespace flashjit::plan
