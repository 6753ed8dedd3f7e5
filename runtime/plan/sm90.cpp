// Family sm90: wgmma and TMA. How a configuration is chosen, which ones are searched, and the kernel of one.
// Device side in templates/sm90.
#include <algorithm>

#include "plan/decoded_cache.hpp"
#include "plan/joined_lists.hpp"
#include "plan/sm90.hpp"
#include "plan/sm90_jvp.hpp"
#include "plan/tensor_core.hpp"
#include "plan/tiles.hpp"
#include "plan/wgmma.hpp"
#include "templates/common/params.cuh"

namespace flashjit::plan::hopper {
namespace {

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
  return shape.seqlen_kv > fewest && shape.seqlen_kv <= 512 && spec.mask.empty() && !spec.kv.has_lengths() &&
         !spec.varlen && std::min(spec.head_dim, spec.v_dim()) >= 64 &&
         (heads >= device.multiprocessors || all_at_once);
}

/// A KV tile of all keys of a row, if that is quicker and can be.
std::optional<TileConfig> whole_row_tile(const AnalysedSpec& spec, const AttentionShape& shape,
                                         const DeviceInfo& device) {
  const bool two = suits_two_blocks(spec, shape, device);
  if (is_forward(spec) || (!two && !suits_four_blocks(spec, shape, device))) return std::nullopt;
  if (spec.score.is_weight()) return std::nullopt;  // registers do not suffice
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
TileConfig tile_of_indices(const AnalysedSpec& spec, const AttentionShape& shape, const DeviceInfo& device) {
  TileConfig c;
  const bool joins = gains_by_joined_lists(spec, shape);
  for (const int bc : {128, 64, 32}) {
    c = with_split(forward_config(spec.v_dim() > kMostColumns ? 8 : 4, bc, 2), true);
    if (spec.v_dim() > kMostColumns) c.br = sm90::kWarpgroupRows, c.d_split = 2;
    c.join_lists = joins;
    if (admits(spec, c, device)) break;
  }
  return c;
}

/// The tile with which a preferred one's keys are split. K and V of 8 bits and up to 64 columns, or
/// of formats that are decoded, come from memory faster than one warpgroup computes with few rows: then a
/// multiprocessor has two blocks. With more rows each key would be decoded twice: e4m3, d64, 16 queries of 8
/// heads, 64 x 4k, H200: 250 us, and 184 in one tile of 128 rows.
TileConfig split_tile(const AnalysedSpec& spec, const AttentionShape& shape, const TileConfig& preferred) {
  const bool few_rows = shape.seqlen_q * shape.heads_q <= shape.heads_kv * sm90::kWarpgroupRows;
  const bool waits = spec.has_scales() ? !is_narrow(spec) : !spec.decodes_kv();
  if (waits || !few_rows || preferred.warps != kGroupWarps) return preferred;
  const TileConfig two = forward_config(kGroupWarps, 64, 2, 2);
  return admits(spec, two, DeviceInfo::parse("sm_90a")) ? two : preferred;
}

/// Decoding beside a prefix that all sequences share: Q tiles of twice as many rows read it half as often,
/// where all queries fill one. Prefix of 8k keys and 512 of their own, 64 sequences, H200: 63 us instead of
/// 67, and as much with 64 keys a tile.
std::optional<TileConfig> cascade_tile(const AnalysedSpec& spec, const AttentionShape& shape,
                                       const DeviceInfo& device) {
  if (is_narrow(spec) || spec.has_scales() || gathers(spec) || shape.heads_kv == 0) return std::nullopt;
  const std::int64_t rows = shape.seqlen_q * (shape.heads_q / shape.heads_kv);
  for (const TileConfig& tile : {forward_config(8, 128, 2), forward_config(8, 64, 4)}) {
    const TileConfig c = with_split(tile, shape.heads_q > shape.heads_kv);
    const bool fits = is_cascade(spec, c) && rows <= sm90::kWarpgroupRows && shape.batch * rows >= c.br;
    if (fits && admits(spec, c, device)) return c;
  }
  return std::nullopt;
}

/// Decoding over codes: heads that share K and V have been folded into queries, where they may be.
std::optional<TileConfig> few_rows_tile(const AnalysedSpec& spec, const AttentionShape& shape,
                                        const DeviceInfo& device) {
  if (!is_forward(spec) || !converts(spec) || shape.heads_q != shape.heads_kv ||
      shape.seqlen_q > sm90::kFewRows)
    return std::nullopt;
  const TileConfig c = few_rows_config();
  return admits(spec, c, device) ? std::optional(c) : std::nullopt;
}

/// One query of one sequence: clusters that join their parts, where the heads make enough of them and all run
/// at once. Longer sequences need all multiprocessors. templates/sm90/NOTES.md#one-query-of-one-sequence
std::optional<TileConfig> cluster_tile(const AnalysedSpec& spec, const AttentionShape& shape,
                                       const DeviceInfo& device) {
  constexpr std::int64_t kFewestClusters = 8, kMostRows = 16, kMostKeys = 1 << 14;
  TileConfig c = with_split(forward_config(4, 128, 2), false);
  const bool plain =
      is_stream_k(spec, c) && is_plain(spec) && !spec.varlen && !gathers(spec) && spec.mask.empty();
  const bool one = shape.batch == 1 && shape.heads_q == shape.heads_kv && shape.seqlen_q <= kMostRows;
  c.cluster = true;
  const bool fits = shape.heads_q >= kFewestClusters && shape.heads_q <= joining_clusters_at_once(device) &&
                    shape.seqlen_kv <= kMostKeys;
  return plain && one && fits && admits(spec, c, device) ? std::optional(c) : std::nullopt;
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
  if (spec.pass == Pass::jvp) return sm90_jvp::heuristic(spec, device);
  if (spec.indices) return tile_of_indices(spec, shape, device);
  if (const std::optional<TileConfig> few = few_rows_tile(spec, shape, device)) return *few;
  if (const std::optional<TileConfig> cascade = cascade_tile(spec, shape, device)) return *cascade;
  if (const std::optional<TileConfig> cluster = cluster_tile(spec, shape, device)) return *cluster;
  if (const std::optional<TileConfig> shared = shared_kv_tile(spec, shape, device)) return *shared;
  if (const std::optional<TileConfig> whole = whole_row_tile(spec, shape, device)) return *whole;
  if (takes_half_tiles(spec, shape, device))
    return config(64, 64, 8, std::max(spec.head_dim, spec.v_dim()) > 96 ? 3 : 2);
  std::vector<TileConfig> choices = preferences(spec);
  if (!is_forward(spec)) return choices.front();
  // Sequences of a cache may be of any lengths, which only equal shares even out. But many queries are
  // enough work tiles, measured: 4k 0.89 ms instead of 1.16, 1k of 4k keys 0.38 instead of 0.40, 512 of 16k
  // 0.77 instead of 0.78.
  const std::int64_t many = converts(spec) ? 1024 : 512;
  const bool stream_k = is_stream_k(spec, with_split(choices.front(), false));
  const bool many_queries = stream_k && shape.seqlen_q >= many && !excludes_lists(spec);
  // Small: of any length there are enough. Larger ones where there are many, as the last round is not cut.
  if (choices.front().min_blocks > 1 && (!stream_k || many_queries)) {
    const auto has_many = [&](const TileConfig& c) {
      const std::int64_t count = shape.batch * shape.heads_q * tiles(shape.seqlen_q, c.br);
      const bool two_tiles = q_tiles_per_cta(spec, c) > 1, three_groups = c.warps / kGroupWarps == 3;
      return (two_tiles || three_groups) && count >= std::int64_t{two_tiles ? 2 : 8} * device.multiprocessors;
    };
    const auto found = std::find_if(choices.rbegin(), choices.rend(), has_many);
    return found == choices.rend() ? choices.front() : *found;
  }
  const std::vector<TileConfig> to_split = many_queries ? std::vector<TileConfig>() : choices;
  if (stream_k && !many_queries) choices.clear();
  // Beside sequences with many queries there may be some with few, which would read K and V for each head.
  if (many_queries && spec.varlen && spec.part == BatchPart::all && shape.heads_q > shape.heads_kv)
    choices = packed_where_admitted(spec, choices, device);
  for (const TileConfig& whole : to_split) {
    // Small tiles and pairs of Q tiles are for lists of tiles, which stream-K has not.
    if (whole.min_blocks > 1 || q_tiles_per_cta(spec, whole) > 1) continue;
    const TileConfig alone = split_tile(spec, shape, whole);
    const TileConfig shared = with_split(alone, false), packed = with_split(alone, true);
    if (num_splits(spec, shape, shared, device) > 1 && admits(spec, shared, device))
      choices.push_back(shared);
    if (shape.heads_q > shape.heads_kv && admits(spec, packed, device)) choices.push_back(packed);
  }
  return *std::ranges::min_element(
      choices, {}, [&](const TileConfig& c) { return estimated_time(spec, shape, c, device); });
}

std::vector<TileConfig> search_space(const AnalysedSpec& spec, const DeviceInfo& device) {
  if (spec.pass == Pass::jvp) return sm90_jvp::search_space(spec, device);
  std::vector<TileConfig> found;
  const auto consider = [&](const TileConfig& c) {
    if (admits(spec, c, device)) found.push_back(c);
  };
  if (!is_forward(spec)) {
    for (const int br : {64, 128})
      for (const int bc : {64, 128, 256, 512})
        for (const int stages : {1, 2, 3}) consider(config(br, bc, 8, stages));
    consider(config(64, 64, kGroupWarps, 2));
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
  if (converts(spec)) consider(few_rows_config());
  if (converts(spec))
    for (const int bc : {64, 80, 96, 128})
      for (const bool packed : {false, true}) consider(with_split(forward_config(4, bc, 2, 2), packed));
  // Few tiles wait for memory, whatever their size is.
  for (const int warps : {4, 8, 12})
    for (const int bc : {64, 80, 128})
      for (const int stages : {2, 3})
        for (const bool packed : {false, true})
          consider(with_split(forward_config(warps, bc, stages), packed));
  const auto consider_with = [&](bool TileConfig::*on) {
    const std::size_t alone = found.size();
    for (std::size_t i = 0; i < alone; ++i) {
      TileConfig c = found[i];
      c.*on = true;
      consider(c);
    }
  };
  consider_with(&TileConfig::cluster);
  if (may_join_lists(spec)) consider_with(&TileConfig::join_lists);
  return found;
}

std::optional<TensorBoxes> tensor_boxes(const AnalysedSpec& spec, const TileConfig& c) {
  TensorBoxes boxes;
  bool copies_bias = false;
  if (is_forward(spec)) {
    const int kv_rows = sm90::kv_box_rows(spec.kv.page_size, c.bc, most_box_rows(spec, c));
    boxes = {sm90::warpgroup_rows(c.br), gathers(spec) ? 0 : kv_rows,
             tma_stores_o(spec, c) ? sm90::kWarpRows : 0, c.pack_gqa, c.pack_gqa ? most_queries(spec, c) : 0};
    copies_bias = has_bias_tile(spec);
  } else {
    const sm90::BackwardLayout layout = backward_layout(spec, c);
    boxes = {c.br, layout.keys(), c.br};
    copies_bias = layout.has_bias_tile();
  }
  boxes.pairs_of_codes = spec.prologue.q_codes;
  if (copies_bias) boxes.bias = {c.br, spec.programs.bias_tile->capture, spec.programs.bias_tile->rank};
  return boxes;
}

/// Whether P comes from LSE in units of log2 (templates/common/lse_log2.cuh). Scores of programs are in
/// natural ones; with lists above 128 columns, and where clusters sum up dQ of packed sequences, a kernel
/// spilled.
bool reads_lse_log2(const AnalysedSpec& spec, const TileConfig& c) {
  return spec.score.empty() && !(is_wide(spec) && spec.has_tile_lists) &&
         !(spec.varlen && backward_layout(spec, c).sums_dq());
}

/// Whether no tensor says which keys a row has or what a pair's P and dS are, and dO is the call's.
bool is_plain_of_all_keys(const AnalysedSpec& spec) {
  return is_plain(spec) && !spec.kv.has_lengths() && !spec.has_tile_lists;
}

/// Whether clusters with all keys of their rows may do without the preprocess entry. (For other specs, in
/// which something else may need it, kernels spill.)
bool may_find_row_stats(const AnalysedSpec& spec, const TileConfig& c) {
  return !is_forward(spec) && is_plain_of_all_keys(spec) && !spec.partial.fp32_out &&
         backward_layout(spec, c).sums_dq();
}

/// Whether CTAs load their first KV tile before the launch before has ended: where nothing else than the
/// preprocess entry runs before, and no tensor says which tile that is. Up to 64 columns: above, the loads
/// delay the preprocess entry's (1k keys of 16 heads, H100: d64 1.03, d128 0.94).
bool claims_tiles(const AnalysedSpec& spec, const TileConfig& c) {
  return !is_forward(spec) && is_narrow(spec) && is_plain_of_all_keys(spec) &&
         !spec.reproducible.deterministic && backward_layout(spec, c).cluster() == 1;
}

Schedule schedule(const AnalysedSpec& spec, const TileConfig& c) {
  const bool backward = !is_forward(spec);
  return {.q_tiles_per_cta = q_tiles_per_cta(spec, c),
          .dynamic_tiles = backward || counts_tiles(spec, c),
          .ragged_tiles = has_ragged_tiles(spec, c),
          .tile_lists = walks_lists(spec, c),
          .early_launch = true,  // with an instruction that all devices of sm90 have
          .row_terms = backward && spec.programs.row_term,
          .stream_k = is_stream_k(spec, c),
          .q_tiles_as_heads = counts_q_tiles_as_heads(spec, c),
          .cascade = is_cascade(spec, c),
          .fixed_parts = has_fixed_parts(spec, c),
          .cluster_split = c.cluster,
          .sums_dq = backward && backward_layout(spec, c).sums_dq(),
          .lse_log2 = backward && reads_lse_log2(spec, c),
          .claims_tiles = claims_tiles(spec, c),
          .finds_row_stats = may_find_row_stats(spec, c)};
}

KernelPlan kernel(const AnalysedSpec& spec, const TileConfig& c) {
  if (spec.pass == Pass::jvp) return sm90_jvp::kernel(spec, c);
  Entry main = main_entry(Family::sm90, spec,
                          consumer_warps(spec, c) * 32 + kProducerThreads * (1 + converters(spec, c)),
                          shared_bytes(spec, c));
  main.tensor_maps = true;
  main.min_blocks = c.min_blocks;
  main.cluster = is_forward(spec) ? forward_cluster(spec, c) : backward_layout(spec, c).cluster();
  main.persistent = !c.cluster && (!is_forward(spec) || takes_tiles_in_turn(spec, c) ||
                                   is_stream_k(spec, c) || has_fixed_parts(spec, c));
  KernelPlan kernel = tensor_core_kernel(spec, c, main, schedule(spec, c));
  if (c.join_lists) add_join_lists(kernel);
  kernel.tensor_boxes = tensor_boxes(spec, c);
  kernel.constants.push_back({"kListedRows", listed_rows(spec, c)});
  if (is_forward(spec)) {
    kernel.constants.push_back({"kMostBoxRows", most_box_rows(spec, c)});
    kernel.constants.push_back({"kQTilesPerCta", q_tiles_per_cta(spec, c)});
    kernel.constants.push_back({"kHoldsQ", holds_q(spec, c)});
    kernel.constants.push_back({"kTmaStoresO", tma_stores_o(spec, c)});
    kernel.constants.push_back({"kStreamK", is_stream_k(spec, c)});
    kernel.constants.push_back({"kQTilesAsHeads", counts_q_tiles_as_heads(spec, c)});
    kernel.constants.push_back({"kCascade", is_cascade(spec, c)});
    kernel.constants.push_back({"kCountsTiles", counts_tiles(spec, c)});
    kernel.constants.push_back({"kRaggedTiles", has_ragged_tiles(spec, c)});
    kernel.constants.push_back({"kFp16Products", multiplies_as_fp16(spec)});
    kernel.constants.push_back({"kSplitTailWave", splits_tail_wave(spec, c)});
  }
  return kernel;
}

}  // namespace
}  // namespace flashjit::plan::hopper

namespace flashjit::plan {

namespace hopper {
constexpr FamilyTraits kPlainTraits{.family = Family::sm90,
                                    .computed_by = ComputedBy::warp_groups,
                                    .supports = supports,
                                    .admits = admits,
                                    .heuristic = heuristic,
                                    .search_space = search_space,
                                    .kernel = kernel,
                                    .workspace = tensor_core_workspace,
                                    .functions = wgmma_functions};
}  // namespace hopper

const FamilyTraits& sm90_traits() { return WithDecodedCache<hopper::kPlainTraits, true>::kTraits; }

}  // namespace flashjit::plan
