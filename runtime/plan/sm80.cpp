// Family sm80: mma.sync, ldmatrix and cp.async. Device side in templates/sm80.
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "plan/decoded_cache.hpp"
#include "plan/mma_sync.hpp"
#include "plan/sm80_backward_jvp.hpp"
#include "plan/sm80_jvp.hpp"
#include "templates/sm80/layout.cuh"

namespace flashjit::plan {
namespace {

constexpr int kKeysOfCodes = 32;  // of a product of codes
/// Whether Q, too, is multiplied as codes; else it is converted.
bool multiplies_codes(const AnalysedSpec& spec, const DeviceInfo& device) {
  return sm80::multiplies_codes(spec.prologue.q_codes, spec.has_key_scales(), device.compute_capability);
}

Support supports(const AnalysedSpec& spec, const DeviceInfo& device) {
  if (!is_attention(spec.pass)) return Support::no(kNoProducts);
  if (spec.dtype != DType::fp16 && spec.dtype != DType::bf16)
    return Support::no(fmt::format("its kernels take fp16 and bf16, the spec has {}", to_string(spec.dtype)));
  if (device.compute_capability < 80)
    return Support::no(
        fmt::format("needs mma.m16n8k16 and cp.async of sm_80, the device is {}", device.arch));
  if (spec.pass == Pass::backward_jvp) return sm80_backward_jvp::supports(spec);
  return mma_sync::supports(spec);
}

Support admits(const AnalysedSpec& spec, const TileConfig& c, const DeviceInfo& device) {
  if (c.family != Family::sm80) return Support::no("the configuration is of another family");
  if (Support s = supports(spec, device); !s) return s;
  if (spec.pass == Pass::backward_jvp) return sm80_backward_jvp::admits(spec, c, device);
  if (multiplies_codes(spec, device) && c.bc % kKeysOfCodes != 0)
    return Support::no(
        fmt::format("products of 8 bits have {} keys, Bc is a multiple, not {}", kKeysOfCodes, c.bc));
  return mma_sync::admits(spec, c, device);
}

TileConfig config(int br, int bc, int warps, int stages, bool keep_q = false, int d_split = 1) {
  return mma_sync::config(Family::sm80, br, bc, warps, stages, keep_q, d_split);
}

/// Whether registers are spared: no score, no packed sequences, no pages, one head dimension. On Hopper, as
/// ptxas keeps more for other architectures.
bool is_lean_on_hopper(const AnalysedSpec& spec, const DeviceInfo& device) {
  return device.compute_capability == 90 && spec.head_dim == spec.v_dim() && spec.score.empty() &&
         !spec.varlen && !spec.kv.is_paged();
}
/// And nothing but lengths of keys, a causal mask or an order of additions asked for: the fewest registers.
bool is_plain_on_hopper(const AnalysedSpec& spec, const DeviceInfo& device) {
  return is_lean_on_hopper(spec, device) && (spec.mask.empty() || spec.is_causal) && !spec.dropout &&
         !spec.has_block_map();
}

/// As sm_86, 89 and 120 have: one block of the larger tiles a multiprocessor, whose eight warps hide each
/// other's waits.
bool has_small_memory(const DeviceInfo& device) { return device.shared_per_block <= 100 * 1024; }

// Good tiles, best first, by the wider head dimension; the last of each fits every device. Measured on
// Hopper, also with one block a multiprocessor, as smaller devices have. What spills is left out, but for a
// few words with programs that are faster with it all the same (softcap at d64).

/// With K and V of 8 bits, whose conversion takes registers, and time for each warp that does it: warps of
/// many rows.
std::vector<TileConfig> forward_preferences_of_codes(const AnalysedSpec& spec, const DeviceInfo& device) {
  const int d = std::max(spec.head_dim, spec.v_dim());
  const bool by_instruction = device.compute_capability >= 89, map = spec.has_block_map();
  const bool lean = !spec.has_key_scales() && !spec.varlen && !spec.kv.is_paged() && spec.score.empty() &&
                    !(spec.prologue.q_codes && (map || spec.dropout));
  const bool spare = by_instruction || !(spec.prologue.q_codes || spec.dropout || spec.varlen);
  return mma_sync::good_of(
      {{config(128, 64, 4, 1), d <= 64 && lean && spec.mask.empty()},
       {config(128, 32, 4, 1), d <= 96 || (d <= 128 && lean && !spec.dropout)},
       {config(128, 64, 8, 1), d <= 128 && !(map && spec.dropout) && (spec.score.empty() || by_instruction)},
       {config(64, 64, 4, 1), d <= 128 || (d <= 192 && !map && spare)},
       {config(64, 32, 4, 1), (d <= 192 && !(map && spec.has_key_scales())) || (d > 192 && by_instruction)},
       {config(64, 16, 4, 1), d > 128}});
}

/// Where Q is of 8 bits, too: nothing is converted.
std::vector<TileConfig> forward_preferences_of_products_of_codes(const AnalysedSpec& spec) {
  const int d = std::max(spec.head_dim, spec.v_dim());
  return mma_sync::good_of({{config(128, 64, 8, 2), d <= 128},
                            {config(64, 64, 4, 2), d <= 128},
                            {config(64, 32, 4, 2), d <= 192},
                            {config(64, 32, 4, 1)}});
}

// Above 256 columns the largest that fits a device comes first.
std::vector<TileConfig> wide_forward_preferences(const AnalysedSpec& spec) {
  if (!mma_sync::is_wide(spec)) return {config(64, 64, 4, 1), config(64, 32, 4, 1), config(32, 32, 2, 1)};
  return mma_sync::good_of({{config(64, 64, 8, 1, false, 4), !(spec.kv.shared_kv && spec.varlen)},
                            {config(64, 32, 8, 1, false, 2)},
                            {config(32, 32, 4, 1, false, 2)},
                            {config(32, 16, 4, 1, false, 2), !spec.kv.shared_kv}});
}
std::vector<TileConfig> wide_backward_preferences(const AnalysedSpec& spec) {
  // Above 304 columns masks, lengths and fewer columns of V than of K spill 8 to 124 bytes.
  const bool few = std::max(spec.head_dim, spec.v_dim()) <= 304,
             plain = spec.mask.empty() && !spec.kv.has_lengths() && spec.v_dim() == spec.head_dim;
  const bool spare =
      (few || plain) && spec.score.empty() && !spec.dropout && !spec.varlen && !spec.has_block_map();
  return mma_sync::good_of({{config(32, 64, 8, 1, false, 2), spare},
                            {config(64, 32, 8, 1, false, 4)},
                            {config(32, 32, 8, 1, false, 4)},
                            {config(16, 32, 8, 1, false, 4)},
                            {config(16, 16, 4, 1, false, 4)}});
}

/// With P as two elements, whose second ones take registers.
std::vector<TileConfig> forward_preferences_of_two_terms(const AnalysedSpec& spec, const DeviceInfo& device) {
  const int d = std::max(spec.head_dim, spec.v_dim());
  const bool plain = is_plain_on_hopper(spec, device) && spec.epilogue.out_mod.empty();
  return mma_sync::good_of({{config(128, 64, 4, 2), d <= 64 && plain},
                            {config(128, 48, 4, 1), d > 64 && d <= 128 && plain},
                            {config(64, 64, 4, 1), d <= 128},
                            {config(64, 32, 4, 1)}});
}

std::vector<TileConfig> forward_preferences(const AnalysedSpec& spec, const DeviceInfo& device) {
  if (spec.partial.two_terms) return forward_preferences_of_two_terms(spec, device);
  if (multiplies_codes(spec, device)) return forward_preferences_of_products_of_codes(spec);
  if (spec.has_scales()) return forward_preferences_of_codes(spec, device);
  const int d = std::max(spec.head_dim, spec.v_dim());
  const bool large = device.compute_capability < 100;
  const bool roomy = device.shared_per_block > 200 * 1024;  // two blocks of the tiles that need most
  if (d <= 64) {
    const int stages = device.shared_per_block > 120 * 1024 ? 2 : 1;
    // A weight program that reads a tensor keeps its elements beside S.
    const bool spills = spec.score.is_weight() && !spec.programs.declarations.empty();
    return mma_sync::good_of({{config(128, 64, 4, stages), !spills},
                              {config(64, 128, 4, 1), large && !spills},
                              {config(64, 64, 4, 1)}});
  }
  if (d <= 128) {
    const bool lengths_spill =
        (spec.varlen || spec.kv.is_paged()) &&
        (spec.has_block_map() || spec.partial.fp32_out || device.compute_capability == 90);
    // A mask beside lengths spills there by some words.
    const bool masks_lengths = spec.kv.has_lengths() && !spec.mask.empty();
    const bool modifies_out = !spec.epilogue.out_mod.empty();
    return mma_sync::good_of(
        {{config(128, 64, 8, 1), d > 96 && has_small_memory(device)},
         {config(128, 64, 4, 1),
          d == 128 && is_plain_on_hopper(spec, device) && !masks_lengths && !modifies_out},
         {config(128, 48, 4, 1), large && !lengths_spill},
         {config(128, 32, 4, 1), large || !(spec.partial.fp32_out && spec.has_block_map())},
         {config(64, 64, 4, 1)},
         {config(64, 32, 4, 1)}});
  }
  if (d > sm80::kMostNarrowColumns) return wide_forward_preferences(spec);
  // Spills by some words with a map, and on Blackwell.
  const bool keeps_q = d > 192 && has_small_memory(device) && large && !spec.has_block_map();
  const bool packed_map_spills = spec.varlen && spec.has_block_map() && device.compute_capability == 90;
  return mma_sync::good_of({{config(128, 128, 8, 1), d <= 192 && spec.v_dim() <= 128},
                            {config(128, 80, 8, 2), d <= 160},
                            {config(128, 48, 8, 2, true), d <= 192 && !packed_map_spills},
                            {config(128, 32, 8, 1, true), keeps_q},
                            {config(128, 32, 8, 1), d > 192 && has_small_memory(device)},
                            {config(64, 64, 4, 1), roomy},
                            {config(128, 64, 8, 1)},
                            {config(64, 64, 4, 1)},
                            {config(64, 32, 4, 1)}});
}

/// Eight warps. Each two of them share rows.
TileConfig pairs(int br, int bc, int stages) { return config(br, bc, 8, stages, false, 2); }

/// The largest spill with gradients of captured tensors, which keep S and their addresses until dS is known,
/// and slopes as many values again.
std::vector<TileConfig> backward_preferences_of_one_term(const AnalysedSpec& spec, const DeviceInfo& device) {
  const int d = std::max(spec.head_dim, spec.v_dim());
  const bool capture_grads = spec.has_capture_grads;
  const bool and_slopes = capture_grads && spec.programs.has_slope;
  const bool plain = is_plain_on_hopper(spec, device);
  if (d <= 64) {
    const bool large = device.compute_capability < 100 && !capture_grads;
    return mma_sync::good_of({{config(64, 128, 8, 1), has_small_memory(device) && !capture_grads},
                              {config(32, 128, 4, 2), large},
                              {pairs(64, 64, 2), large},  // of few keys, for all multiprocessors
                              {config(64, 64, 4, 2), !and_slopes},
                              {config(32, 64, 4, 2)}});
  }
  if (d <= 128 && capture_grads) {
    const bool wide_pairs = !and_slopes && !spec.dropout && !spec.has_block_map();
    return mma_sync::good_of({{pairs(32, 128, 2), wide_pairs},
                              {config(32, 128, 8, 1), !and_slopes},
                              {pairs(64, 64, 2)},
                              {pairs(32, 64, 2)},
                              {config(32, 64, 4, 1), !and_slopes},
                              {pairs(32, 64, 1)}});
  }
  if (d <= 128) {
    return mma_sync::good_of(
        {{config(32, 128, 8, 1), d > 96 && has_small_memory(device)},
         {pairs(64, 128, 2), d <= 96 ? is_lean_on_hopper(spec, device) : d == 128 && plain},
         {pairs(32, 128, 2), d > 112},
         {config(64, 128, 8, 1)},
         {pairs(64, 64, 2)},
         {pairs(32, 64, 2)},
         {config(32, 64, 4, 1)}});
  }
  if (d > sm80::kMostNarrowColumns) return wide_backward_preferences(spec);
  return mma_sync::good_of({{pairs(64, 64, 2), d <= 192 || (d <= 240 && plain)},
                            {pairs(32, 64, 2)},
                            {pairs(32, 64, 1), !and_slopes},
                            {pairs(16, 64, 1)}});
}

/// Tiles that have no registers for second terms.
bool spills_second_terms(const AnalysedSpec& spec, const DeviceInfo& device, const TileConfig& c) {
  const int d = std::max(spec.head_dim, spec.v_dim());
  if (d <= 64) return c == config(32, 128, 4, 2) && !is_plain_on_hopper(spec, device);
  if (d <= 128) return c == config(64, 128, 8, 1) && !spec.score.empty();
  return c == pairs(32, 64, 2) && spec.has_block_map();
}

std::vector<TileConfig> backward_preferences(const AnalysedSpec& spec, const DeviceInfo& device) {
  std::vector<TileConfig> all = backward_preferences_of_one_term(spec, device);
  if (spec.partial.two_terms)
    std::erase_if(all, [&](const TileConfig& c) { return spills_second_terms(spec, device, c); });
  return all;
}

std::vector<TileConfig> preferences(const AnalysedSpec& spec, const DeviceInfo& device) {
  if (spec.pass == Pass::jvp) return sm80_jvp::preferences(Family::sm80, spec);
  return spec.pass == Pass::forward ? forward_preferences(spec, device) : backward_preferences(spec, device);
}

/// Above 256 columns.
std::vector<TileConfig> wide_space() {
  std::vector<TileConfig> space;
  for (const int warps : {4, 8})
    for (const int stages : {1, 2})
      for (const int d_split : {1, 2, 4})
        for (const int br : {16, 32, 64, 128})
          for (const int bc : {16, 32, 64}) space.push_back(config(br, bc, warps, stages, false, d_split));
  return space;
}

std::vector<TileConfig> search_space(const AnalysedSpec& spec, const DeviceInfo& device) {
  if (spec.pass == Pass::jvp) return sm80_jvp::search_space(Family::sm80, spec, device);
  if (spec.pass == Pass::backward_jvp) return sm80_backward_jvp::search_space(spec, device);
  const bool forward = spec.pass == Pass::forward;
  std::vector<TileConfig> found;
  const auto consider = [&](TileConfig c) {
    if (admits(spec, c, device)) found.push_back(c);
  };
  if (std::max(spec.head_dim, spec.v_dim()) > sm80::kMostNarrowColumns) {
    for (const TileConfig& c : wide_space()) {
      consider(c);
      if (forward && c.br <= 64) consider(mma_sync::with_split(spec, c, device));
    }
    return found;
  }
  constexpr std::array kForwardRows{64, 128, 192};
  constexpr std::array kForwardColumns{32, 48, 64, 80, 96, 128};
  constexpr std::array kBackwardRows{16, 32, 64, 128};
  constexpr std::array kBackwardColumns{32, 64, 96, 128};
  for (const int warps : {4, 8})
    for (const int stages : {1, 2, 3}) {
      if (forward) {
        for (const int br : kForwardRows)
          for (const int bc : kForwardColumns)
            for (const bool keep_q : {false, true}) consider(config(br, bc, warps, stages, keep_q));
        for (const int bc : {32, 64})
          consider(mma_sync::with_split(spec, config(64, bc, warps, stages), device));
      } else {
        for (const int br : kBackwardRows)
          for (const int bc : kBackwardColumns)
            for (const int d_split : {1, 2}) consider(config(br, bc, warps, stages, false, d_split));
      }
    }
  if (forward && device.compute_capability >= 120)  // a block of TMA's own, as on Hopper, but no wgmma
    for (TileConfig c : std::vector(found)) {
      c.tma = true;
      consider(c);
    }
  if (!forward)
    for (const TileConfig& c : preferences(spec, device)) consider(mma_sync::with_split(spec, c, device));
  if (spec.has_scales())
    for (const int bc : {32, 64})
      for (const int stages : {2, 3, 4})
        for (const bool split : {false, true}) {
          TileConfig c = mma_sync::one_warp_tile(Family::sm80, spec, device, bc, stages);
          c.split = split;
          consider(c);
        }
  return found;
}

std::string functions(const AnalysedSpec& /*spec*/, const TileConfig& /*config*/) {
  return "  using Mma = sm80::Mma16x8x16;\n  using Copies = sm80::AsyncCopies;\n";
}

TileConfig heuristic(const AnalysedSpec& spec, const AttentionShape& shape, const DeviceInfo& device) {
  if (spec.pass == Pass::backward_jvp) return sm80_backward_jvp::heuristic(spec, shape, device);
  const int d = std::max(spec.head_dim, spec.v_dim());
  const bool converts = spec.has_scales() && device.compute_capability < 89;
  const bool spills = d > 192 ? converts || spec.dropout || spec.has_key_scales() || !spec.score.empty()
                              : d > 128 && spec.dropout && spec.has_key_scales();
  return mma_sync::heuristic(spec, shape, device,
                             {.tiles = preferences(spec, device),
                              .keys_of_one_warp = spills && !multiplies_codes(spec, device) ? 16 : 32,
                              .stages_of_one_warp = 2});
}

KernelPlan kernel(const AnalysedSpec& spec, const TileConfig& c) {
  return spec.pass == Pass::backward_jvp ? sm80_backward_jvp::kernel(spec, c) : mma_sync::kernel(spec, c);
}

WorkspaceNeeds workspace(const KernelPlan& kernel, const AttentionShape& shape) {
  return kernel.spec.pass == Pass::backward_jvp ? sm80_backward_jvp::workspace(kernel.spec)
                                                : tensor_core_workspace(kernel, shape);
}

constexpr FamilyTraits kPlainSm80Traits{
    Family::sm80, ComputedBy::warps, supports, admits, heuristic, search_space, kernel, workspace, functions};

}  // namespace

const FamilyTraits& sm80_traits() { return WithDecodedCache<kPlainSm80Traits, false>::kTraits; }

}  // namespace flashjit::plan
