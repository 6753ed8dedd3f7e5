// Family sm90: wgmma and TMA. Device side in templates/sm90.
#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "plan/sm90.hpp"
#include "plan/tensor_core.hpp"
#include "plan/tiles.hpp"
#include "plan/wgmma.hpp"
#include "templates/sm90/layout.cuh"

namespace flashjit::plan {
namespace {

constexpr int kGroupWarps = 4;  // of a warpgroup, which computes together
constexpr int kProducerThreads = 128;
constexpr int kMostBlocks = 3;             // on a multiprocessor
constexpr int kMostColumns = 256;          // of a warpgroup's rows of O
constexpr int kMostBackwardColumns = 512;  // of two blocks that split them

bool is_forward(const AnalysedSpec& spec) { return spec.pass == Pass::forward; }

bool has_bias_tile(const AnalysedSpec& spec) { return spec.programs.bias_tile.has_value(); }

/// Whether producer warps copy K and V row by row: boxes of TMA are of whole periods of the swizzle, and of
/// keys in order.
bool gathers(const AnalysedSpec& spec) { return spec.indices || spec.pages % sm90::kSwizzledRows != 0; }

/// Warpgroups that convert K and V, which are of 8 bits and Q is not.
int converters(const AnalysedSpec& spec) { return spec.has_scales() && !spec.q_codes ? 1 : 0; }

/// Q tiles that a CTA of the forward pass computes at a time.
int q_tiles_per_cta(const AnalysedSpec& spec, const TileConfig& c) {
  return is_forward(spec) ? c.warps / kGroupWarps / c.d_split * sm90::kWarpgroupRows / c.br : 1;
}

sm90::ForwardLayout forward_layout(const AnalysedSpec& spec, const TileConfig& c) {
  return {c.br,
          c.bc,
          spec.head_dim,
          spec.v_dim(),
          c.stages,
          has_bias_tile(spec),
          spec.programs.column_term,
          spec.has_tile_lists,
          q_tiles_per_cta(spec, c),
          c.d_split,
          spec.shared_kv,
          spec.has_scales(),
          spec.q_codes,
          spec.key_scales,
          c.split,
          spec.indices,
          c.min_blocks};
}

/// Whether O leaves through shared memory and TMA. Packed sequences have each other's rows behind
/// their last; splits of the keys have O in fp32.
bool tma_stores_o(const AnalysedSpec& spec, const TileConfig& c) {
  return forward_layout(spec, c).has_o_tile() && !spec.varlen && !c.split && !c.pack_gqa && !spec.fp32_out;
}

/// Whether all CTAs have equal shares of all work: only the device knows what the sequences of a cache cost,
/// and a query's list of keys may be long or short. Parts keep neither the largest score nor scores near the
/// least float, and depend on other sequences.
bool is_stream_k(const AnalysedSpec& spec, const TileConfig& c) {
  return is_forward(spec) && (spec.cache || spec.indices) && c.split && !spec.has_tile_lists &&
         !spec.row_max && !spec.batch_invariant && !spec.programs.far_scores;
}

/// Whether the Q tiles of a sequence count as heads, which are in lanes: 128 heads over one of latents are
/// two Q tiles, which then read its latents at a time.
bool counts_q_tiles_as_heads(const AnalysedSpec& spec, const TileConfig& c) {
  return is_stream_k(spec, c) && c.d_split > 1 && spec.mask.empty() && !spec.varlen && !spec.indices;
}

/// Whether the prefix that all sequences share is read once. Its queries are those of all sequences, which
/// have scales of their own where Q is of 8 bits, and positions that programs would have to see. Where two
/// warpgroups share rows, ptxas serialised their products.
bool is_cascade(const AnalysedSpec& spec, const TileConfig& c) {
  return is_stream_k(spec, c) && spec.shared_prefix && (spec.mask.empty() || spec.mask == causal()) &&
         spec.score.empty() && !spec.dropout && !spec.indices && !spec.q_codes && c.d_split == 1;
}

int shared_bytes(const AnalysedSpec& spec, const TileConfig& c) {
  if (is_forward(spec)) return forward_layout(spec, c).bytes();
  return sm90_backward_layout(spec, c).bytes();
}

bool is_narrow(const AnalysedSpec& spec) {
  return std::max(spec.head_dim, spec.v_dim()) <= sm90::kSliceColumns;
}
bool is_wide(const AnalysedSpec& spec) { return sm90::is_wide(spec.head_dim, spec.v_dim()); }
/// Whether the backward pass has more columns than blocks that do not share them.
bool exceeds_cta(const AnalysedSpec& spec) { return sm90::exceeds_cta(spec.head_dim, spec.v_dim()); }
/// Whether tiles of 128 keys may have these columns: gradients in fp32, as of splits, spill then.
bool fits_long_tile(const AnalysedSpec& spec) {
  return sm90::fits_long_tile(spec.head_dim, spec.v_dim()) && !spec.fp32_grads;
}

/// A consumer thread's values of S, P, O, what finds the bias tile, and the gradients: what cannot be traded
/// away by the compiler.
int kept_values(const AnalysedSpec& spec, const TileConfig& c) {
  if (spec.q_codes) {  // P V begins when S is P
    const int parts = sm90::pv_parts(spec.v_dim(), true, true);
    const int at_a_time = sm90::pv_parts_at_a_time(parts, c.warps / kGroupWarps);
    const int products = at_a_time * spec.v_dim() / parts / 2;
    return spec.v_dim() / 2 + std::max(c.bc / 2, c.bc / 4 + products) + (has_bias_tile(spec) ? 8 : 0) +
           (spec.key_scales ? 8 : 0);
  }
  if (is_forward(spec)) {
    return c.bc / 2 + sm90::own_columns(spec.v_dim(), c.d_split) / 2 + c.bc / 4 +
           (has_bias_tile(spec) ? 8 : 0);
  }
  const sm90::BackwardLayout layout = sm90_backward_layout(spec, c);
  const int gradients = (layout.wg_dim() + layout.wg_dim_v()) / 2;
  return gradients + (layout.wide() ? layout.dq_columns() / 2 : c.br);
}

/// How many of them fit, besides addresses and the rows' state. The loop of products of codes keeps little
/// of that while P V runs.
int kept_limit(const AnalysedSpec& spec, const TileConfig& c) {
  return sm90::consumer_registers(c.warps / kGroupWarps, c.min_blocks, converters(spec), c.d_split) -
         (!spec.q_codes                ? 32
          : c.warps / kGroupWarps == 3 ? 24
                                       : 8);
}

/// With a converting warpgroup: the most columns of a product of the forward pass, and of one whose
/// accumulators ptxas lets an instruction have, which it counts against the registers at the start.
int largest_product(const AnalysedSpec& spec, const TileConfig& c) {
  return std::max(c.bc, spec.v_dim() / sm90::pv_parts(spec.v_dim(), spec.has_scales(), false));
}
int launched_limit(const AnalysedSpec& spec, const TileConfig& c) {
  constexpr int kOthers = 30;
  return 2 * (sm90::launch_registers(c.warps / kGroupWarps, c.min_blocks, converters(spec)) - kOthers);
}

/// The forward pass shares its Q tiles out beforehand, but for lists: where lengths differ that only the
/// kernel knows, the device's own scheduler is fairer.
bool shares_tiles_out(const AnalysedSpec& spec) {
  return !spec.has_tile_lists && !spec.varlen && !spec.has_lengths();
}

/// Whether blocks take Q tiles from a counter: where tiles differ in cost as only the device knows, and are
/// so long that a block's start and end are better hidden.
bool counts_tiles(const AnalysedSpec& spec, const TileConfig& c) {
  return is_forward(spec) && (spec.has_tile_lists || (spec.cache && !c.split));
}

/// Whether the Q tiles of the forward pass's tail wave are split by warpgroups among more CTAs: without a
/// mask all cost the same. A warpgroup without rows ends there, so a CTA must not get a tile after it, as
/// from a counter.
bool splits_tail_wave(const AnalysedSpec& spec, const TileConfig& c) {
  return !spec.programs.has_mask && !counts_tiles(spec, c) && !c.split && !c.pack_gqa &&
         c.br > sm90::kWarpgroupRows;
}

/// Whether a block may compute two Q tiles at a time: not of a cache, whose keys are often split.
bool suits_two_q_tiles(const AnalysedSpec& spec) { return spec.has_tile_lists || shares_tiles_out(spec); }

/// Whether blocks take one Q tile after the other, instead of one each.
bool takes_tiles_in_turn(const AnalysedSpec& spec, const TileConfig& c) {
  return counts_tiles(spec, c) || shares_tiles_out(spec);
}

/// For how many rows of a Q tile its list says whether they meet a KV tile: all together, or in the forward
/// pass each warpgroup's, where the blocks of a map divide into those but not into whole tiles.
int listed_rows(const AnalysedSpec& spec, const TileConfig& c) {
  const bool whole = !is_forward(spec) || !spec.has_block_map() || spec.block_map.q % c.br == 0 ||
                     spec.block_map.q % sm90::kWarpgroupRows != 0 || spec.block_map.kv % c.bc != 0;
  // What lies behind the last key is cleared by all groups, what masks and scores read is waited for by all.
  const bool plain = !spec.q_codes && spec.mask.empty() && !spec.has_lengths() && !spec.varlen &&
                     !has_bias_tile(spec) && !spec.programs.column_term;
  return whole || !plain || c.stages < 2 || q_tiles_per_cta(spec, c) > 1 ? c.br : sm90::kWarpgroupRows;
}

/// Blocks of the forward pass that take neighbouring Q tiles: two where a mask makes tiles unlike and the
/// kernel shares them out, else one.
int forward_cluster(const AnalysedSpec& spec, const TileConfig& c) {
  return !spec.mask.empty() && shares_tiles_out(spec) && c.min_blocks == 1 && q_tiles_per_cta(spec, c) == 1 &&
                 !c.split
             ? 2
             : 1;
}

/// The list of a query has no positions left where scores are computed, and all heads of a tile share it.
Support supports_indices(const AnalysedSpec& spec) {
  const bool plain = is_forward(spec) && spec.score.empty() && !spec.row_max && !spec.batch_invariant &&
                     !spec.has_scales() && !spec.programs.mask.uses_head;
  if (!spec.indices || plain) return Support::yes();
  return Support::no(
      "indices are for the forward pass, without a score program, row_max, batch_invariant, K and V of 8 "
      "bits, and h in a mask");
}

Support supports_q_codes(const AnalysedSpec& spec) {
  if (!spec.q_codes) return Support::yes();
  if (spec.key_scales && (spec.row_max || spec.programs.column_term))
    return Support::no(
        "Q of 8 bits beside scales of keys is for specs without row_max and what scores read of keys");
  if (gathers(spec))
    return Support::no(
        fmt::format("Q of 8 bits beside pages whose rows are no multiple of {}, from which TMA "
                    "cannot copy",
                    sm90::kSwizzledRows));
  return Support::yes();
}

Support supports(const AnalysedSpec& spec, const DeviceInfo& device) {
  if (device.arch != "sm_90a")
    return Support::no(fmt::format("needs wgmma and TMA of sm_90a, the device is {}", device.arch));
  if (!is_attention(spec.pass)) return Support::no(kNoProducts);
  if (spec.dtype != DType::fp16 && spec.dtype != DType::bf16)
    return Support::no(fmt::format("its kernels take fp16 and bf16, the spec has {}", to_string(spec.dtype)));
  if (Support able = supports_q_codes(spec); !able) return able;
  if (spec.has_scales() && std::max(spec.head_dim, spec.v_dim()) > kMostColumns)
    return Support::no(fmt::format("K and V of 8 bits are for head dimensions up to {}, not {} and {}",
                                   kMostColumns, spec.head_dim, spec.v_dim()));
  if (is_forward(spec) && spec.v_dim() > kMostColumns && has_bias_tile(spec))
    return Support::no(
        fmt::format("a dense bias beside more than {} columns of V is not for this family", kMostColumns));
  if (spec.running_state && spec.v_dim() > kMostColumns)
    return Support::no(
        fmt::format("a running state is for up to {} columns of V, not {}", kMostColumns, spec.v_dim()));
  if (spec.shared_kv && spec.has_tile_lists) return Support::no("shared_kv is not for lists of tiles");
  if (!is_forward(spec) && std::max(spec.head_dim, spec.v_dim()) > kMostBackwardColumns)
    return Support::no(fmt::format("the backward pass is for head dimensions up to {}, not {} and {}",
                                   kMostBackwardColumns, spec.head_dim, spec.v_dim()));
  if (!is_forward(spec) && exceeds_cta(spec) && spec.has_capture_grads)
    return Support::no(
        fmt::format("gradients of captured tensors are for head dimensions up to {}, not {} and {}",
                    sm90::kMostCtaColumns, spec.head_dim, spec.v_dim()));
  if (Support able = supports_indices(spec); !able) return able;
  if (gathers(spec) && (spec.has_tile_lists || has_bias_tile(spec) || spec.programs.column_term))
    return Support::no(
        fmt::format("rows of pages that are no multiple of {} rows are for specs without lists of tiles, a "
                    "dense bias, or what scores read of keys",
                    sm90::kSwizzledRows));
  if (is_forward(spec)) return Support::yes();
  if (spec.orders_capture_grads()) return Support::no(kUnorderedGrads);
  return Support::yes();
}

Support check_pack_gqa(const AnalysedSpec& spec, const TileConfig& c) {
  if (!c.pack_gqa) return Support::yes();
  if (!is_forward(spec) || (!c.split && (!spec.cache || spec.row_max)))
    return Support::no("pack_gqa is for split keys, in the forward pass: give split, too");
  const bool alike = !spec.dropout && !spec.has_tile_lists && !has_bias_tile(spec) &&
                     !spec.programs.score_uses_head && !spec.programs.mask.uses_head;
  if (alike) return Support::yes();
  return Support::no(
      "pack_gqa is for specs to which the heads that share K and V are alike: without dropout, lists of "
      "tiles, a dense bias, or h in a program");
}

/// KV tiles of the backward pass that are of a cluster whose blocks sum up dQ.
Support check_long_tile(const AnalysedSpec& spec, const TileConfig& c) {
  if (is_wide(spec)) return Support::no("Bc above 128 is for up to 128 columns");
  if (c.warps != 8 || (c.br != 64 && c.br != 128) || (c.bc != 256 && c.bc != 512))
    return Support::no(
        fmt::format("above 128 Bc is 256 or 512, with 8 warps and Br 64 or 128, not {}", to_string(c)));
  if (c.split) return Support::no("split is not for the KV tiles of clusters that sum up dQ");
  if (spec.has_tile_lists || spec.deterministic || spec.has_capture_grads)
    return Support::no(
        "Bc above 128 is for specs without lists of tiles, ordered additions and gradients of captured "
        "tensors");
  return Support::yes();
}

/// Whether producer warps have registers to copy rows, and two of them nothing else to do.
bool may_gather(const AnalysedSpec& spec, const TileConfig& c) {
  constexpr int kFewestRegisters = 40;
  return q_tiles_per_cta(spec, c) == 1 &&
         sm90::producer_registers(c.warps / kGroupWarps, c.min_blocks, c.d_split) >= kFewestRegisters;
}

Support check_tile(const AnalysedSpec& spec, const TileConfig& c) {
  if (is_forward(spec)) {
    if (c.warps != 4 && c.warps != 8 && c.warps != 12 && c.warps != 16)
      return Support::no(fmt::format("warps is 4, 8, 12 or 16, not {}", c.warps));
    if (c.d_split != (spec.v_dim() > kMostColumns ? 2 : 1) ||
        (c.d_split == 2 && (c.warps != 8 || c.br != sm90::kWarpgroupRows)))
      return Support::no(
          fmt::format("up to {} columns of V d_split is 1, above two groups of warps share 64 rows, with 8 "
                      "warps, Br 64 and d_split2, not {}",
                      kMostColumns, to_string(c)));
    const int rows = c.warps / kGroupWarps / c.d_split * sm90::kWarpgroupRows;
    if (c.br < sm90::kWarpgroupRows || (c.br != rows && c.br * 2 != rows))
      return Support::no(fmt::format(
          "{} warps compute {} rows, of one Q tile or, with 8 or 16, of two, Br is {}", c.warps, rows, c.br));
    if (q_tiles_per_cta(spec, c) > 1 && (c.split || !suits_two_q_tiles(spec)))
      return Support::no(
          "two Q tiles at a time are for blocks that take one after the other, not for split keys, "
          "nor for packed sequences or lengths of keys without lists of tiles");
    if (q_tiles_per_cta(spec, c) > 1 && spec.has_scales())
      return Support::no("two Q tiles at a time are not for K and V of 8 bits");
    if (q_tiles_per_cta(spec, c) > 1 && spec.programs.column_term)
      return Support::no("two Q tiles at a time leave no warp to find what the score reads of the keys");
    if (spec.indices && (c.br != sm90::kWarpgroupRows || !c.pack_gqa || c.bc % 32 != 0))
      return Support::no(
          fmt::format("with indices a tile is of one query, with Br 64, split, pack_gqa and Bc a multiple of "
                      "32, not {}",
                      to_string(c)));
    if (gathers(spec) && !may_gather(spec, c))
      return Support::no(
          fmt::format("{} leaves no second producer warp to copy rows, or too few registers", to_string(c)));
    if (c.bc < 16 || c.bc > 256 || c.bc % 16 != 0)
      return Support::no(fmt::format("Bc is a multiple of 16 up to 256, not {}", c.bc));
    if (spec.q_codes && c.bc % 32 != 0)
      return Support::no(fmt::format("with Q of 8 bits Bc is a multiple of 32, not {}", c.bc));
  } else if (const bool long_tile = c.bc == 128 && fits_long_tile(spec) && !c.split;
             exceeds_cta(spec) && (c.br != 64 || (c.bc != 64 && !long_tile) || c.warps != 8)) {
    return Support::no(fmt::format(
        "above {} columns the backward pass has 8 warps, Br 64 and Bc 64, or 128 where K has up to {} "
        "and V up to {}, without split and gradients in fp32, not {}",
        sm90::kMostCtaColumns, sm90::kMostCtaColumns + sm90::kSliceColumns, sm90::kMostCtaColumns,
        to_string(c)));
  } else if (c.bc > sm90::kMostKeys) {
    if (Support able = check_long_tile(spec, c); !able) return able;
  } else if (c.warps != 8 || (c.bc != 64 && c.bc != 128) ||
             (c.br != 64 && (c.br != 128 || sm90_backward_layout(spec, c).wide()))) {
    return Support::no(fmt::format(
        "the backward pass has 8 warps and Bc 64 or 128, and Br 64, with Bc 128 up to head dimension 128 "
        "also 128, not {}",
        to_string(c)));
  }
  if (spec.shared_kv && c.stages < 2)
    return Support::no("with shared_kv stages is 2 to 4, as K is read until P V of a step later");
  if (c.stages < 1 || c.stages > 4) return Support::no(fmt::format("stages is 1 to 4, not {}", c.stages));
  if (c.q_in_registers || (c.d_split != 1 && !is_forward(spec)))
    return Support::no(
        fmt::format("q_in_registers is not for this family, nor d_split for its backward pass, {} has one",
                    to_string(c)));
  if (Support packed = check_pack_gqa(spec, c); !packed) return packed;
  if (const int most = is_forward(spec) ? kMostBlocks : 1; c.min_blocks < 1 || c.min_blocks > most)
    return Support::no(
        fmt::format("min_blocks is 1 to {}, in the backward pass 1, not {}", kMostBlocks, c.min_blocks));
  return Support::yes();
}

Support admits(const AnalysedSpec& spec, const TileConfig& c, const DeviceInfo& device) {
  if (c.family != Family::sm90) return Support::no("the configuration is of another family");
  if (Support able = supports(spec, device); !able) return able;
  if (Support tile = check_tile(spec, c); !tile) return tile;
  const int most_bytes =
      std::min(device.shared_per_block, device.shared_per_sm / c.min_blocks - kReservedSharedBytes);
  if (const int bytes = shared_bytes(spec, c); bytes > most_bytes)
    return Support::no(fmt::format("{} needs {} bytes of shared memory a block, {} has {}", to_string(c),
                                   bytes, device.arch, most_bytes));
  if (converters(spec) > 0 && largest_product(spec, c) > launched_limit(spec, c))
    return Support::no(fmt::format("{} has products of {} columns, a thread begins with registers for {}",
                                   to_string(c), largest_product(spec, c), launched_limit(spec, c)));
  if (const int values = kept_values(spec, c); values > kept_limit(spec, c))
    return Support::no(
        fmt::format("{} keeps {} values a thread, {} fit", to_string(c), values, kept_limit(spec, c)));
  return Support::yes();
}

TileConfig config(int br, int bc, int warps, int stages) {
  return {.family = Family::sm90, .br = br, .bc = bc, .warps = warps, .stages = stages};
}

/// The forward pass's: a warpgroup computes 64 rows.
TileConfig forward_config(int warps, int bc, int stages, int blocks = 1) {
  TileConfig c = config(warps / kGroupWarps * sm90::kWarpgroupRows, bc, warps, stages);
  c.min_blocks = blocks;
  return c;
}

/// Two Q tiles at a time, of 128 rows each.
TileConfig two_q_tiles_config(int bc, int stages) { return config(2 * sm90::kWarpgroupRows, bc, 16, stages); }

TileConfig with_split(TileConfig c, bool pack_gqa) {
  c.split = true;
  c.pack_gqa = pack_gqa;
  return c;
}

/// Above 256 columns; the largest that fit.
std::vector<TileConfig> wide_preferences(const AnalysedSpec& spec) {
  const DeviceInfo hopper = DeviceInfo::parse("sm_90a");
  std::vector<TileConfig> choices;
  const auto consider = [&](TileConfig c) {
    if (choices.empty() && admits(spec, c, hopper)) choices.push_back(c);
  };
  if (spec.v_dim() > kMostColumns) {
    for (const auto& [bc, stages] : {std::pair{64, 2}, {48, 2}, {64, 1}, {32, 2}, {32, 1}}) {
      TileConfig c = config(sm90::kWarpgroupRows, bc, 8, stages);
      c.d_split = 2;
      consider(c);
    }
  } else {
    for (const auto& [bc, stages] : {std::pair{64, 2}, {48, 2}, {32, 2}, {32, 1}})
      consider(forward_config(8, bc, stages));
  }
  return choices;
}

/// With K and V of 8 bits, whose conversion takes registers and shared memory: the largest that are admitted.
std::vector<TileConfig> code_preferences(const AnalysedSpec& spec) {
  const DeviceInfo hopper = DeviceInfo::parse("sm_90a");
  std::vector<TileConfig> choices;
  for (const int warps : {8, 4})
    for (const int bc : {128, 112, 96, 80, 64, 48, 32}) {
      const TileConfig c = forward_config(warps, bc, 2);
      if (has_bias_tile(spec) && bc % sm90::kSliceColumns != 0) continue;
      // A score program leaves no registers for 128 keys and as many columns.
      if (!spec.score.empty() && warps == 8 && bc == 128 && spec.v_dim() > 96) continue;
      if (!admits(spec, c, hopper)) continue;
      choices.push_back(c);
      break;
    }
  return choices;
}

/// With Q of 8 bits, too: the largest that are admitted. Three warpgroups hide each other's waits, where
/// registers hold no more than the plain softmax: d128 4k 628 us instead of 691, causal 367 instead of 391.
/// Not with fewer than 96 keys: 844 with 64.
std::vector<TileConfig> code_product_preferences(const AnalysedSpec& spec) {
  const DeviceInfo hopper = DeviceInfo::parse("sm_90a");
  const bool simple = spec.mask.empty() || spec.is_causal;
  const bool plain = simple && !spec.dropout && !spec.has_block_map() &&
                     std::min(spec.head_dim, spec.v_dim()) >= 96;  // d80 spills
  std::vector<TileConfig> choices;
  for (const int warps : {12, 8, 4})
    for (const int bc : {128, 96, 64, 32}) {
      const TileConfig c = forward_config(warps, bc, warps == 12 && !is_narrow(spec) ? 3 : 2);
      if (warps == 12 && (bc < 96 || !spec.score.empty() || spec.key_scales || !(is_narrow(spec) || plain)))
        continue;
      if (has_bias_tile(spec) && bc % sm90::kSliceColumns != 0) continue;
      if (!admits(spec, c, hopper)) continue;
      choices.push_back(c);
      break;
    }
  return choices;
}

/// The backward pass above 256 columns: two stages where they fit.
TileConfig tile_of_split_columns(const AnalysedSpec& spec) {
  const TileConfig two = config(64, 64, 8, 2);
  return admits(spec, two, DeviceInfo::parse("sm_90a")) ? two : config(64, 64, 8, 1);
}

/// Good tiles, by the wider head dimension; all are admitted. The first is for long sequences. A bias tile
/// comes in slices of 64 keys.
std::vector<TileConfig> preferences(const AnalysedSpec& spec) {
  const int d = std::max(spec.head_dim, spec.v_dim());
  const bool mask_reads = spec.programs.mask_reads_tensors;
  if (!is_forward(spec)) {
    // A KV tile of 128 is of two blocks, as are its keys: those of smaller blocks of a map waste one's.
    const bool wastes_long_tiles = spec.has_block_map() && spec.block_map.kv < 128;
    if (exceeds_cta(spec)) {
      // The last is for splits.
      const TileConfig split_columns = tile_of_split_columns(spec);
      if (!fits_long_tile(spec) || wastes_long_tiles) return {split_columns};
      return {config(64, 128, 8, 2), split_columns};
    }
    if (is_wide(spec)) return {config(64, wastes_long_tiles ? 64 : 128, 8, 2)};
    // 128 queries at a time do not fit the blocks of most maps, nor leave registers for reads of tensors pair
    // by pair, or for gradients besides what is read by position.
    const bool reads = spec.programs.mask_reads_pairs || spec.programs.score_reads_pairs ||
                       (spec.has_capture_grads && (mask_reads || spec.programs.row_term));
    return {config(d <= 64 && spec.block_map.q % 128 == 0 && !reads ? 128 : 64, 128, 8, 2)};
  }
  if (d > kMostColumns) return wide_preferences(spec);
  if (spec.q_codes) return code_product_preferences(spec);
  if (spec.has_scales()) return code_preferences(spec);
  std::vector<TileConfig> choices;
  const bool bias_tile = has_bias_tile(spec);
  if (d <= 128) {
    choices = {forward_config(8, 128, 2), forward_config(4, 128, 2)};
    // A third warpgroup leaves each fewer registers, and masks of blocks fit smaller tiles, as windows do
    // where products take long. What a mask reads of keys alone, such as padding, is alike for all queries.
    // With dropout there are no registers for masks, scores or more columns.
    const expr::MaskTraits& mask = spec.programs.mask;
    const bool by_key = mask.kv_reads > 0 && mask.q_reads == 0;
    const bool in_blocks = spec.has_block_map() || mask.q_reads > 0;
    const bool simple = spec.mask.empty() || spec.is_causal || by_key;
    const bool fits = spec.dropout ? d <= 64 && spec.mask.empty() && spec.score.empty() : d <= 64 || simple;
    if (!in_blocks && !bias_tile && fits)
      choices.insert(choices.begin(), forward_config(12, d <= 64 ? 128 : d <= 96 ? 96 : 80, d <= 64 ? 3 : 2));
    // Small tiles hide each other's waits for list entries and for what a mask reads.
    if (d <= 64 && in_blocks && !bias_tile)
      choices.insert(choices.begin(),
                     mask_reads ? forward_config(4, 64, 2, 3) : forward_config(4, 128, 2, 2));
    // Two Q tiles of 128 rows at a time do so, too, and read K and V half as often; and they end nearer to
    // where a mask does. Their registers hold no more than the plain softmax.
    const TileConfig two = two_q_tiles_config(64, spec.has_tile_lists ? 4 : 3);
    const bool in_tiles =
        !spec.has_block_map() || (spec.block_map.q % two.br == 0 && spec.block_map.kv % two.bc == 0);
    if (d <= 64 && !spec.dropout && spec.score.empty() && !mask_reads && in_tiles && suits_two_q_tiles(spec))
      choices.push_back(two);
    // Three groups pass over what only others meet, with a stage more to do so.
    if (const TileConfig three = forward_config(12, 128, 4);
        d <= 64 && !spec.dropout && spec.score.empty() && listed_rows(spec, three) < three.br)
      choices.push_back(three);
  } else if (d <= 192) {
    const bool narrow_v = spec.v_dim() <= 128;
    choices = {forward_config(8,
                              bias_tile  ? 64
                              : narrow_v ? 112
                                         : 80,
                              2),
               forward_config(4, bias_tile ? 64 : 96, 2)};
    // Tiles of 128 keys, which end where a causal mask does; and of long sequences three groups' tiles.
    const bool simple = spec.mask.empty() || spec.is_causal;
    if (narrow_v && simple && !bias_tile && !spec.dropout && spec.score.empty() && !spec.has_block_map())
      choices = {forward_config(12, 80, 2), forward_config(8, 128, 2), forward_config(4, 96, 2)};
  } else {
    choices = {forward_config(8, 64, 2), forward_config(4, 64, 2)};
    // Fewer steps rescale O less often, where registers hold no more than the plain softmax.
    const bool known = !spec.varlen && !spec.has_lengths() && !spec.has_block_map();
    if (known && !spec.dropout && spec.score.empty() && (spec.mask.empty() || spec.is_causal))
      choices.insert(choices.begin(), forward_config(8, 80, 2));
  }
  if (gathers(spec)) std::erase_if(choices, [&](const TileConfig& c) { return !may_gather(spec, c); });
  return choices;
}

/// What a Q tile of so many warpgroups costs for a key, measured: three hide each other's waits best, one is
/// alone with its own. At (192, 128) three are quicker in long rows, causal from 8k on.
double cost_of_groups(const AnalysedSpec& spec, int groups) {
  const double exposed = is_narrow(spec) ? 1.18 : 1.1;
  const double three = std::max(spec.head_dim, spec.v_dim()) > 128 ? 196 : 192;
  // The parts of a step of products of codes wait for each other, so that a third group gains more.
  if (groups == 3 && spec.q_codes) return is_narrow(spec) ? 150 : 175;
  return groups == 1 ? 100 * exposed : groups == 2 ? 128 * exposed : three;
}
/// Of two Q tiles of two warpgroups at a time, each; and where a CTA has only one of them.
constexpr double kCostOfOneOfTwo = 290, kCostOfOneAlone = 170;
/// By how much more where the tiles of a causal head are not one cluster's, which would read K and V once,
/// though two tiles of 128 rows would do.
constexpr double kApart = 1.1;
/// By how much more where three groups' tiles of 80 keys meet a causal mask's end.
constexpr double kEndsOfSmallTiles = 1.04;

/// By how much more above d192 in KV tiles of 64 instead of 80.
constexpr double kRescalesMore = 1.05;

double cost_of_tile(const AnalysedSpec& spec, const TileConfig& c) {
  if (q_tiles_per_cta(spec, c) > 1) return kCostOfOneOfTwo;
  const bool rescales_more = std::max(spec.head_dim, spec.v_dim()) > 192 && c.bc <= 64;
  return cost_of_groups(spec, c.warps / kGroupWarps) * (rescales_more ? kRescalesMore : 1);
}

/// Without a causal mask all Q tiles cost about the same: what counts is the waves of them, on so many
/// `slots`. The tail wave's tiles are split where there is no mask, see kSplitTailWave in
/// templates/sm90/forward_policy.cuh.
double cost_of_waves(const AnalysedSpec& spec, const TileConfig& c, std::int64_t count, std::int64_t slots) {
  const std::int64_t whole = count / slots, over = count % slots;
  const double all_whole = static_cast<double>(whole) * cost_of_tile(spec, c);
  if (over == 0) return all_whole;
  if (q_tiles_per_cta(spec, c) > 1)
    return all_whole + (over * q_tiles_per_cta(spec, c) > slots ? kCostOfOneOfTwo : kCostOfOneAlone);
  const int groups = c.warps / kGroupWarps;
  int splits = 1;
  if (spec.mask.empty() && !counts_tiles(spec, c) && count > slots)
    splits = static_cast<int>(
        sm90::tail_splits(groups, static_cast<unsigned>(over), static_cast<unsigned>(slots)));
  return all_whole + cost_of_groups(spec, (groups + splits - 1) / splits);
}

/// What it costs to combine splits of the keys, in keys of one warpgroup: a launch, as long as three tiles,
/// and O of each split written and read, measured.
double cost_of_combine(const AttentionShape& shape, std::int64_t splits) {
  const double of_row = 24 + 2 * static_cast<double>(splits);
  return 45000 + of_row * static_cast<double>(shape.batch * shape.heads_q * shape.seqlen_q);
}

/// The same for the parts of shares, which are few.
constexpr double kCostOfCombineParts = 60000;

double longest(const std::vector<double>& met) {
  return met.empty() ? 0 : *std::max_element(met.begin(), met.end());
}

/// When the last tile ends, in keys. `met` are the keys that one head's tiles meet. Many tiles end together.
double end_of_last(std::vector<double> met, std::int64_t heads, std::int64_t slots) {
  constexpr std::int64_t kManyForEach = 8;
  const auto count = static_cast<std::int64_t>(met.size()) * heads;
  if (count <= slots || count > kManyForEach * slots) {
    const double fair =
        std::reduce(met.begin(), met.end()) * static_cast<double>(heads) / static_cast<double>(slots);
    return std::max(fair, longest(met));
  }
  return makespan(std::move(met), heads, slots);
}

/// An estimate of the forward pass's time, to compare tiles: padding to whole tiles, the last round, and
/// under a causal mask the order of unequal tiles.
double estimated_time(const AnalysedSpec& spec, const AttentionShape& shape, const TileConfig& c,
                      const DeviceInfo& device) {
  const auto [queries, heads_of_entry] = forward_tiles(spec, shape, c);
  const std::int64_t heads = shape.batch * heads_of_entry, rows = tiles(shape.seqlen_q, queries);
  const std::int64_t slots = std::int64_t{device.multiprocessors} * c.min_blocks * q_tiles_per_cta(spec, c);
  const auto padded = [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t met = tiles(end, c.bc) - begin / c.bc;
    return static_cast<double>(met * c.bc);
  };
  const std::int64_t together = rows_to_estimate(shape, queries);
  std::vector<double> met;  // keys that a head's Q tiles meet
  for (const Range& keys : keys_of_tiles(spec, shape, together))
    met.push_back(keys.begin < keys.end ? padded(keys.begin, keys.end) : 0);
  const std::int64_t alike = together / queries;  // tiles that are one in `met`
  const double all = std::reduce(met.begin(), met.end()) * static_cast<double>(alike);
  if (is_stream_k(spec, c))
    return all * static_cast<double>(heads) / static_cast<double>(slots) * cost_of_tile(spec, c) +
           kCostOfCombineParts;
  if (c.split) {
    const std::int64_t splits = num_splits(spec, shape, c, device);
    const auto rounds = static_cast<double>(tiles(rows * heads * splits, slots));
    const std::int64_t of_part = tiles(static_cast<std::int64_t>(longest(met)), splits);
    return rounds * padded(0, of_part) * cost_of_tile(spec, c) + cost_of_combine(shape, splits);
  }
  if (!spec.is_causal)
    return all / static_cast<double>(std::max<std::int64_t>(rows, 1)) *
           cost_of_waves(spec, c, rows * heads, slots);
  const double apart = shape.seqlen_q <= 256 && rows > forward_cluster(spec, c) ? kApart : 1;
  const double ends = c.warps / kGroupWarps == 3 && c.bc <= 80 ? kEndsOfSmallTiles : 1;
  return end_of_last(std::move(met), heads * alike, slots) * cost_of_tile(spec, c) * apart * ends;
}

/// Where there are multiprocessors for all KV tiles of 64, tiles of 128 would leave half of them idle.
bool takes_half_tiles(const AnalysedSpec& spec, const AttentionShape& shape, const DeviceInfo& device) {
  return !is_forward(spec) && !is_wide(spec) &&
         shape.batch * shape.heads_kv * tiles(shape.seqlen_kv, 64) <= device.multiprocessors;
}

/// Whether a cluster that has all keys of a row is quicker, measured: two blocks nearly always, but for up to
/// 64 columns if the second has few keys; four, which not all multiprocessors can be part of, if all have
/// keys, and rows attend to all, and heads are many, or so few that all run at once.
bool suits_two_blocks(const AnalysedSpec& spec, const AttentionShape& shape, const DeviceInfo& device) {
  const bool halves_suffice = shape.seqlen_kv <= 128 && takes_half_tiles(spec, shape, device);
  const int fewest = !is_narrow(spec) ? 0 : spec.varlen ? 128 : 64;
  return shape.seqlen_kv > fewest && shape.seqlen_kv <= 256 && !halves_suffice;
}
bool suits_four_blocks(const AnalysedSpec& spec, const AttentionShape& shape, const DeviceInfo& device) {
  const std::int64_t heads = shape.batch * shape.heads_kv, at_once = device.multiprocessors * 10 / 11 / 4;
  const bool all_at_once = heads <= at_once && (is_narrow(spec) || heads > at_once / 3);
  const int fewest = !is_narrow(spec) ? 384 : all_at_once ? 320 : 448;
  return shape.seqlen_kv > fewest && shape.seqlen_kv <= 512 && spec.mask.empty() && !spec.has_lengths() &&
         !spec.varlen && std::min(spec.head_dim, spec.v_dim()) >= 64 &&
         (heads >= device.multiprocessors || all_at_once);
}

/// A KV tile of all keys of a row, if that is quicker and can be.
std::optional<TileConfig> whole_row_tile(const AnalysedSpec& spec, const AttentionShape& shape,
                                         const DeviceInfo& device) {
  const bool two = suits_two_blocks(spec, shape, device);
  if (is_forward(spec) || (!two && !suits_four_blocks(spec, shape, device))) return std::nullopt;
  TileConfig c = preferences(spec).front();
  c.bc = two ? 256 : 512;
  return admits(spec, c, device) ? std::optional(c) : std::nullopt;
}

/// A KV tile whose Q tiles blocks share, if they are worth it.
std::optional<TileConfig> shared_kv_tile(const AnalysedSpec& spec, const AttentionShape& shape,
                                         const DeviceInfo& device) {
  if (is_forward(spec)) return std::nullopt;
  const TileConfig c = with_split(preferences(spec).back(), false);
  const bool gains = admits(spec, c, device) && num_splits(spec, shape, c, device) > 1;
  return gains ? std::optional(c) : std::nullopt;
}

/// The largest tile of a list that fits.
TileConfig tile_of_indices(const AnalysedSpec& spec, const DeviceInfo& device) {
  TileConfig c;
  for (const int bc : {128, 64, 32}) {
    c = with_split(forward_config(spec.v_dim() > kMostColumns ? 8 : 4, bc, 2), true);
    if (spec.v_dim() > kMostColumns) c.br = sm90::kWarpgroupRows, c.d_split = 2;
    if (admits(spec, c, device)) break;
  }
  return c;
}

/// The tile with which a preferred one's keys are split. K and V of 8 bits and up to 64 columns come from
/// memory faster than one warpgroup computes with few rows: then a multiprocessor has two blocks.
TileConfig split_tile(const AnalysedSpec& spec, const TileConfig& preferred) {
  if (!spec.has_scales() || !is_narrow(spec) || preferred.warps != kGroupWarps) return preferred;
  const TileConfig two = forward_config(kGroupWarps, 64, 2, 2);
  return admits(spec, two, DeviceInfo::parse("sm_90a")) ? two : preferred;
}

/// Decoding beside a prefix that all sequences share: Q tiles of twice as many rows read it half as often,
/// where all queries fill one. Prefix of 8159 keys and 545 of their own, 64 sequences: 92 us instead of 105.
std::optional<TileConfig> cascade_tile(const AnalysedSpec& spec, const AttentionShape& shape,
                                       const DeviceInfo& device) {
  if (is_narrow(spec) || spec.has_scales() || gathers(spec) || shape.heads_kv == 0) return std::nullopt;
  const TileConfig c = with_split(forward_config(8, 64, 4), shape.heads_q > shape.heads_kv);
  const std::int64_t rows = shape.seqlen_q * (shape.heads_q / shape.heads_kv);
  const bool fits = is_cascade(spec, c) && rows <= sm90::kWarpgroupRows && shape.batch * rows >= c.br;
  return fits && admits(spec, c, device) ? std::optional(c) : std::nullopt;
}

/// Tiles with the heads that share K and V packed, if any may be.
std::vector<TileConfig> packed_where_admitted(const AnalysedSpec& spec, const std::vector<TileConfig>& tiles,
                                              const DeviceInfo& device) {
  std::vector<TileConfig> packed;
  for (TileConfig c : tiles) {
    c.pack_gqa = true;
    if (admits(spec, c, device)) packed.push_back(c);
  }
  return packed.empty() ? tiles : packed;
}

TileConfig heuristic(const AnalysedSpec& spec, const AttentionShape& shape, const DeviceInfo& device) {
  if (spec.indices) return tile_of_indices(spec, device);
  if (const std::optional<TileConfig> cascade = cascade_tile(spec, shape, device)) return *cascade;
  if (const std::optional<TileConfig> shared = shared_kv_tile(spec, shape, device)) return *shared;
  if (const std::optional<TileConfig> whole = whole_row_tile(spec, shape, device)) return *whole;
  if (takes_half_tiles(spec, shape, device))
    return config(64, 64, 8, std::max(spec.head_dim, spec.v_dim()) > 96 ? 3 : 2);
  std::vector<TileConfig> choices = preferences(spec);
  if (!is_forward(spec)) return choices.front();
  // Small: of any length there are enough. Larger ones where there are many, as the last round is not cut.
  if (choices.front().min_blocks > 1) {
    const auto has_many = [&](const TileConfig& c) {
      const std::int64_t count = shape.batch * shape.heads_q * tiles(shape.seqlen_q, c.br);
      const bool two_tiles = q_tiles_per_cta(spec, c) > 1, three_groups = c.warps / kGroupWarps == 3;
      return (two_tiles || three_groups) && count >= std::int64_t{two_tiles ? 2 : 8} * device.multiprocessors;
    };
    const auto found = std::find_if(choices.rbegin(), choices.rend(), has_many);
    return found == choices.rend() ? choices.front() : *found;
  }
  // Sequences of a cache may be of any lengths, which only equal shares even out. But many queries are
  // enough work tiles, measured: 4k 0.89 ms instead of 1.16, 1k of 4k keys 0.38 instead of 0.40, 512 of 16k
  // 0.77 instead of 0.78.
  const std::int64_t many = converters(spec) > 0 ? 1024 : 512;
  const bool stream_k = is_stream_k(spec, with_split(choices.front(), false));
  const bool many_queries = stream_k && shape.seqlen_q >= many;
  const std::vector<TileConfig> to_split = many_queries ? std::vector<TileConfig>() : choices;
  if (stream_k && !many_queries) choices.clear();
  // Beside sequences with many queries there may be some with few, which would read K and V for each head.
  if (many_queries && spec.varlen && shape.heads_q > shape.heads_kv)
    choices = packed_where_admitted(spec, choices, device);
  for (const TileConfig& whole : to_split) {
    const TileConfig alone = split_tile(spec, whole);
    const TileConfig shared = with_split(alone, false), packed = with_split(alone, true);
    if (num_splits(spec, shape, shared, device) > 1) choices.push_back(shared);
    if (shape.heads_q > shape.heads_kv && admits(spec, packed, device)) choices.push_back(packed);
  }
  return *std::ranges::min_element(
      choices, {}, [&](const TileConfig& c) { return estimated_time(spec, shape, c, device); });
}

std::vector<TileConfig> search_space(const AnalysedSpec& spec, const DeviceInfo& device) {
  std::vector<TileConfig> found;
  const auto consider = [&](const TileConfig& c) {
    if (admits(spec, c, device)) found.push_back(c);
  };
  if (!is_forward(spec)) {
    for (const int br : {64, 128})
      for (const int bc : {64, 128, 256, 512})
        for (const int stages : {1, 2, 3}) consider(config(br, bc, 8, stages));
    for (const TileConfig& c : preferences(spec)) consider(with_split(c, false));
    return found;
  }
  for (const int warps : {4, 8, 12})
    for (int bc = 64; bc <= 224; bc += 16)
      for (const int stages : {2, 3})
        for (int blocks = 1; blocks <= kMostBlocks; ++blocks)
          consider(forward_config(warps, bc, stages, blocks));
  for (int bc = 64; bc <= 128; bc += 16)
    for (const int stages : {2, 3, 4}) consider(two_q_tiles_config(bc, stages));
  for (const int warps : {8, 12})
    for (const int bc : {64, 128})
      if (const TileConfig c = forward_config(warps, bc, 4); listed_rows(spec, c) < c.br) consider(c);
  if (spec.v_dim() > kMostColumns)
    for (const int bc : {32, 48, 64, 80})
      for (const int stages : {1, 2}) {
        TileConfig c = config(sm90::kWarpgroupRows, bc, 8, stages);
        c.d_split = 2;
        consider(c);
        for (const bool packed : {false, true}) consider(with_split(c, packed));
      }
  if (spec.has_scales())
    for (const int bc : {64, 80, 96, 128})
      for (const bool packed : {false, true}) consider(with_split(forward_config(4, bc, 2, 2), packed));
  // Few tiles wait for memory, whatever their size is.
  for (const int warps : {4, 8, 12})
    for (const int bc : {64, 80, 128})
      for (const int stages : {2, 3})
        for (const bool packed : {false, true})
          consider(with_split(forward_config(warps, bc, stages), packed));
  return found;
}

std::optional<TensorBoxes> tensor_boxes(const AnalysedSpec& spec, const TileConfig& c) {
  TensorBoxes boxes;
  bool copies_bias = false;
  if (is_forward(spec)) {
    boxes = {sm90::kWarpgroupRows, gathers(spec) ? 0 : sm90::kv_box_rows(spec.pages, c.bc),
             tma_stores_o(spec, c) ? sm90::kWarpRows : 0, c.pack_gqa, spec.indices};
    copies_bias = has_bias_tile(spec);
  } else {
    const sm90::BackwardLayout layout = sm90_backward_layout(spec, c);
    boxes = {c.br, layout.keys(), c.br};
    copies_bias = layout.has_bias_tile();
  }
  boxes.pairs_of_codes = spec.q_codes;
  if (copies_bias) boxes.bias = {c.br, spec.programs.bias_tile->capture, spec.programs.bias_tile->rank};
  return boxes;
}

/// Whether P comes from LSE in units of log2 (templates/common/lse_log2.cuh). Scores of programs are in
/// natural ones; with lists above 128 columns, and where clusters sum up dQ of packed sequences, a kernel
/// spilled.
bool reads_lse_log2(const AnalysedSpec& spec, const TileConfig& c) {
  return spec.score.empty() && !(is_wide(spec) && spec.has_tile_lists) &&
         !(spec.varlen && sm90_backward_layout(spec, c).sums_dq());
}

/// Whether nothing but queries, keys and a causal mask says what a pair's P and dS are.
bool is_plain(const AnalysedSpec& spec) {
  return spec.score.empty() && !spec.dropout && !spec.varlen && !spec.has_lengths() && !spec.sinks &&
         !spec.has_tile_lists && !spec.has_block_map() && (spec.mask.empty() || spec.is_causal);
}

/// Whether clusters with all keys of their rows may do without the preprocess entry. (For other specs, in
/// which something else may need it, kernels spill.)
bool may_find_row_stats(const AnalysedSpec& spec, const TileConfig& c) {
  return !is_forward(spec) && is_plain(spec) && sm90_backward_layout(spec, c).sums_dq();
}

/// Whether CTAs load their first KV tile before the launch before has ended: where nothing else than the
/// preprocess entry runs before, and no tensor says which tile that is. Up to 64 columns: above, the loads
/// delay the preprocess entry's (1k keys of 16 heads, H100: d64 1.03, d128 0.94).
bool claims_tiles(const AnalysedSpec& spec, const TileConfig& c) {
  return !is_forward(spec) && is_narrow(spec) && is_plain(spec) && !spec.deterministic &&
         sm90_backward_layout(spec, c).cluster() == 1;
}

Schedule schedule(const AnalysedSpec& spec, const TileConfig& c) {
  const bool backward = !is_forward(spec);
  return {.q_tiles_per_cta = q_tiles_per_cta(spec, c),
          .dynamic_tiles = backward || counts_tiles(spec, c),
          .early_launch = true,  // with an instruction that all devices of sm90 have
          .row_terms = backward && spec.programs.row_term,
          .stream_k = is_stream_k(spec, c),
          .q_tiles_as_heads = counts_q_tiles_as_heads(spec, c),
          .cascade = is_cascade(spec, c),
          .sums_dq = backward && sm90_backward_layout(spec, c).sums_dq(),
          .lse_log2 = backward && reads_lse_log2(spec, c),
          .claims_tiles = claims_tiles(spec, c),
          .finds_row_stats = may_find_row_stats(spec, c)};
}

KernelPlan kernel(const AnalysedSpec& spec, const TileConfig& c) {
  Entry main = main_entry(Family::sm90, spec, c.warps * 32 + kProducerThreads * (1 + converters(spec)),
                          shared_bytes(spec, c));
  main.tensor_maps = true;
  main.min_blocks = c.min_blocks;
  main.cluster = is_forward(spec) ? forward_cluster(spec, c) : sm90_backward_layout(spec, c).cluster();
  main.persistent = !is_forward(spec) || takes_tiles_in_turn(spec, c) || is_stream_k(spec, c);
  KernelPlan kernel = tensor_core_kernel(spec, c, main, schedule(spec, c));
  kernel.tensor_boxes = tensor_boxes(spec, c);
  kernel.constants.push_back({"kListedRows", listed_rows(spec, c)});
  if (is_forward(spec)) {
    kernel.constants.push_back({"kQTilesPerCta", q_tiles_per_cta(spec, c)});
    kernel.constants.push_back({"kTmaStoresO", tma_stores_o(spec, c)});
    kernel.constants.push_back({"kStreamK", is_stream_k(spec, c)});
    kernel.constants.push_back({"kQTilesAsHeads", counts_q_tiles_as_heads(spec, c)});
    kernel.constants.push_back({"kCascade", is_cascade(spec, c)});
    kernel.constants.push_back({"kCountsTiles", counts_tiles(spec, c)});
    kernel.constants.push_back({"kFp16Products", multiplies_as_fp16(spec)});
    kernel.constants.push_back({"kSplitTailWave", splits_tail_wave(spec, c)});
  }
  return kernel;
}

}  // namespace

sm90::BackwardLayout sm90_backward_layout(const AnalysedSpec& spec, const TileConfig& c) {
  return {c.br, c.bc, spec.head_dim, spec.v_dim(), c.stages, has_bias_tile(spec), spec.programs.row_term};
}

bool multiplies_as_fp16(const AnalysedSpec& spec) {
  return is_forward(spec) && converters(spec) > 0 && !spec.key_scales && spec.score.empty() &&
         spec.head_dim == spec.v_dim() && spec.head_dim <= 192;
}

const FamilyTraits& sm90_traits() {
  static constexpr FamilyTraits kTraits{
      Family::sm90, ComputedBy::warp_groups, supports,       admits, heuristic, search_space,
      kernel,       tensor_core_workspace,   wgmma_functions};
  return kTraits;
}

}  // namespace flashjit::plan
