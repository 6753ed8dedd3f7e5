// Tiles of family sm90: their geometry, how they are shared out, and the preferred ones.
#include <algorithm>
#include <utility>

#include "plan/sm90.hpp"
#include "support/kv_names.hpp"
#include "templates/common/params.cuh"

namespace flashjit::plan::hopper {
namespace {

/// On the device of the family; or its split, where that alone is.
bool is_admitted(const AnalysedSpec& spec, const TileConfig& c) {
  return admits(spec, excludes_lists(spec) ? with_split(c, false) : c, DeviceInfo::parse("sm_90a")).ok;
}

/// Above 256 columns; the largest that fit.
std::vector<TileConfig> wide_preferences(const AnalysedSpec& spec) {
  std::vector<TileConfig> choices;
  const auto consider = [&](TileConfig c) {
    if (choices.empty() && is_admitted(spec, c)) choices.push_back(c);
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

/// Whether scales of blocks are gathered from small pages: with 128 keys and columns 36 to 168 bytes spill.
bool gathers_scales_of_blocks(const AnalysedSpec& spec) {
  const auto gathers_scales = [](const KvFormat& format) {
    return format.has_block_scales() && format.keys == 0;
  };
  return spec.kv.is_paged() && spec.kv.page_size < 64 &&
         (gathers_scales(spec.kv.k_format) || gathers_scales(spec.kv.v_format));
}

/// With K and V of 8 bits, whose conversion takes registers and shared memory: the largest that are admitted.
std::vector<TileConfig> code_preferences(const AnalysedSpec& spec) {
  std::vector<TileConfig> choices;
  for (const int warps : {8, 4})
    for (const int bc : {128, 112, 96, 80, 64, 48, 32}) {
      const TileConfig c = forward_config(warps, bc, 2);
      if (has_bias_tile(spec) && bc % sm90::kSliceColumns != 0) continue;
      // Some specs leave no registers for 128 keys and as many columns.
      const bool few_registers = !spec.score.empty() || gathers_scales_of_blocks(spec);
      if (few_registers && warps == 8 && bc == 128 && spec.v_dim() > 96) continue;
      if (!is_admitted(spec, c)) continue;
      choices.push_back(c);
      break;
    }
  return choices;
}

/// The same where the tensor cores sum up P V over KV tiles: above 64 columns two groups with larger tiles.
std::vector<TileConfig> code_sum_preferences(const AnalysedSpec& spec) {
  std::vector<TileConfig> choices;
  for (const int warps : {12, 8, 4})
    for (const int bc : {192, 160, 128, 96, 64, 32}) {
      const TileConfig c = forward_config(warps, bc, 2);
      if (warps == 12 && (bc < 96 || bc > 128 || !is_narrow(spec))) continue;
      if (!is_admitted(spec, c)) continue;
      choices.push_back(c);
      break;
    }
  return choices;
}

/// With Q of 8 bits, too: the largest that are admitted. Three warpgroups hide each other's waits, where
/// registers hold no more than the plain softmax: d128 4k 628 us instead of 691, causal 367 instead of 391.
/// Not with fewer than 96 keys: 844 with 64.
std::vector<TileConfig> code_product_preferences(const AnalysedSpec& spec) {
  const bool simple = spec.mask.empty() || spec.is_causal;
  const bool plain = simple && !spec.dropout && !spec.has_block_map() &&
                     std::min(spec.head_dim, spec.v_dim()) >= 96;  // d80 spills
  std::vector<TileConfig> choices;
  for (const int warps : {12, 8, 4})
    for (const int bc : {128, 96, 64, 32}) {
      const TileConfig c = forward_config(warps, bc, warps == 12 && !is_narrow(spec) ? 3 : 2);
      if (warps == 12 &&
          (bc < 96 || !spec.score.empty() || spec.has_key_scales() || !(is_narrow(spec) || plain)))
        continue;
      if (has_bias_tile(spec) && bc % sm90::kSliceColumns != 0) continue;
      if (!is_admitted(spec, c)) continue;
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

/// The backward pass's; where there are two, the last is for splits.
std::vector<TileConfig> backward_preferences(const AnalysedSpec& spec) {
  const int d = std::max(spec.head_dim, spec.v_dim());
  // A KV tile of 128 keys is shared by two thread blocks. Smaller blocks of a map leave one of them idle.
  const bool wastes_long_tiles = spec.has_block_map() && spec.block_map.kv < 128;
  if (exceeds_cta(spec)) {
    const TileConfig split_columns = tile_of_split_columns(spec);
    if (!fits_long_tile(spec) || wastes_long_tiles) return {split_columns};
    return {config(64, 128, 8, 2), split_columns};
  }
  if (is_wide(spec)) return {config(64, wastes_long_tiles ? 64 : 128, 8, 2)};
  // 128 queries at a time do not fit the blocks of most maps, nor leave registers for reads of tensors pair
  // by pair, or for gradients besides what is read by position.
  const bool reads = spec.programs.mask_reads_pairs || spec.programs.score_reads_pairs ||
                     (spec.has_capture_grads && (spec.programs.mask_reads_tensors || spec.programs.row_term));
  // Two blocks of 64 keys have lists of their own: a shared tile would compute half of each product in vain.
  // The last configuration is for splits, which tiles of their own do not have.
  const TileConfig own = config(64, 64, kGroupWarps, 2);
  if (spec.has_block_map() && spec.block_map.kv % 64 == 0 && wastes_long_tiles && is_admitted(spec, own))
    return {own, config(64, 128, 8, 2)};
  // Weights keep more of a pair than a softmax, which finds dS from P; least a sigmoid's, and SiLU's, whose
  // derivative shares a product with it.
  const bool weighs = spec.score.is_weight();
  const expr::ProgramFacts& programs = spec.programs;
  const bool silu = programs.silu && !spec.has_capture_grads;
  const bool of_sigmoid =
      silu || (programs.pair_sigmoid && programs.names_score_once && !spec.has_capture_grads);
  const bool keeps_little = !weighs || (of_sigmoid && (spec.mask.empty() || spec.is_causal));
  if (weighs && (d > 64 ? programs.joins_scores && !silu : programs.bias_tile_grad))
    return {config(64, 64, 8, 2)};
  return {config(d <= 64 && spec.block_map.q % 128 == 0 && !reads && keeps_little ? 128 : 64, 128, 8, 2)};
}

/// Whether a tile's rows reach over blocks of queries in which a mask is the same, as `q / 128` is.
bool crosses_blocks(const AnalysedSpec& spec, const TileConfig& c) {
  const int block = spec.programs.mask_block_q;
  return block > 0 && c.br % block != 0 && block % c.br != 0;
}

/// The forward pass's, up to 128 columns.
std::vector<TileConfig> preferences_to_128(const AnalysedSpec& spec) {
  const int d = std::max(spec.head_dim, spec.v_dim());
  const bool bias_tile = has_bias_tile(spec), mask_reads = spec.programs.mask_reads_tensors;
  std::vector<TileConfig> choices = {forward_config(8, 128, 2), forward_config(4, 128, 2)};
  // A third warpgroup leaves each fewer registers, and masks of blocks fit smaller tiles, as windows do
  // where products take long. What a mask reads of keys alone, such as padding, is alike for all queries.
  // With dropout there are no registers for masks, scores or more columns.
  const expr::MaskTraits& mask = spec.programs.mask;
  const bool by_key = mask.kv_reads > 0 && mask.q_reads == 0;
  const TileConfig three_groups = forward_config(12, d <= 64 ? 128 : d <= 96 ? 96 : 80, d <= 64 ? 3 : 2);
  const bool in_blocks = spec.has_block_map() || mask.q_reads > 0 || crosses_blocks(spec, three_groups);
  const bool simple = spec.mask.empty() || spec.is_causal || by_key;
  const bool fits = spec.dropout ? d <= 64 && spec.mask.empty() && spec.score.empty() : d <= 64 || simple;
  if (!in_blocks && !bias_tile && fits) choices.insert(choices.begin(), three_groups);
  // Small tiles hide each other's waits for list entries and for what a mask reads. Tiles of 64 keys reach
  // across no block of 64, whose pairs with other queries would be computed in vain.
  const bool small_blocks = spec.has_block_map() && spec.block_map.kv % 128 != 0;
  if (d <= 64 && in_blocks && !bias_tile)
    choices.insert(choices.begin(),
                   mask_reads || small_blocks ? forward_config(4, 64, 2, 3) : forward_config(4, 128, 2, 2));
  if (d > 64 && small_blocks) {
    choices = {forward_config(8, 64, 2), forward_config(4, 64, 2)};
    if (!bias_tile && !spec.programs.column_term) choices.push_back(forward_config(4, 64, 2, 2));
  }
  // Sigmoids need registers besides: smaller tiles of keys are 3 to 5% quicker.
  if (d <= 64 && spec.programs.pair_sigmoid && choices.front().warps == 12)
    choices.front() = forward_config(12, 96, 3);
  // Two Q tiles of 128 rows at a time do so, too, and read K and V half as often; and they end nearer to
  // where a mask does. Their registers hold no more than the plain softmax.
  const TileConfig two = two_q_tiles_config(64, spec.has_tile_lists ? 4 : 3);
  const bool in_tiles =
      !spec.has_block_map() || (spec.block_map.q % two.br == 0 && spec.block_map.kv % two.bc == 0);
  if (d <= 64 && !spec.dropout && spec.score.empty() && !mask_reads && in_tiles && suits_two_q_tiles(spec))
    choices.push_back(two);
  // Three groups pass over what only others meet, with a stage more to do so: 0.70 (random blocks) and 0.86
  // (windows) of the dense rate, where two Q tiles reach 0.83, 0.83.
  if (const TileConfig three = forward_config(12, 128, 4);
      d <= 64 && !in_tiles && !spec.dropout && spec.score.empty() && listed_rows(spec, three) < three.br)
    choices.push_back(three);
  return choices;
}

/// Up to 192.
std::vector<TileConfig> preferences_to_192(const AnalysedSpec& spec) {
  const bool bias_tile = has_bias_tile(spec);
  const bool narrow_v = spec.v_dim() <= 128;
  std::vector<TileConfig> choices = {forward_config(8,
                                                    bias_tile  ? 64
                                                    : narrow_v ? 112
                                                               : 80,
                                                    2),
                                     forward_config(4, bias_tile ? 64 : 96, 2)};
  // Tiles of 128 keys, which end where a causal mask does; and of long sequences three groups' tiles.
  const bool simple = spec.mask.empty() || spec.is_causal;
  if (narrow_v && simple && !bias_tile && !spec.dropout && spec.score.empty() && !spec.has_block_map())
    choices = {forward_config(12, 80, 2), forward_config(8, 128, 2), forward_config(4, 96, 2)};
  return choices;
}

/// Bytes from one row that is decoded to the next in shared memory.
int largest_row_pitch(const AnalysedSpec& spec) {
  if (!spec.decodes_kv()) return 0;
  const auto pitch = [&](const KvFormat& format, int dim) {
    if (!format.quantized()) return sm90::row_pitch(dim * size_of(spec.dtype), 16);
    const KvRow row = format.row(dim);
    return sm90::row_pitch(row.bytes, row.alignment);
  };
  const int of_k = pitch(spec.kv.k_format, spec.head_dim);
  return spec.kv.shared_kv ? of_k : std::max(of_k, pitch(spec.kv.v_format, spec.v_dim()));
}

/// Bytes in a slot of scales that are in a tensor of their own.
int largest_scale_bytes(const AnalysedSpec& spec, int bc) {
  const auto bytes = [&](const KvFormat& format, int dim) {
    if (!format.has_block_scales()) return 0;
    const KvRow row = format.row(dim);
    return sm90::scale_rows_bytes(bc, format.keys, row.scale_columns * size_of(format.scale_type),
                                  row.scale_alignment);
  };
  return std::max(bytes(spec.kv.k_format, spec.head_dim), bytes(spec.kv.v_format, spec.v_dim()));
}

/// Up to 256.
std::vector<TileConfig> preferences_to_256(const AnalysedSpec& spec) {
  std::vector<TileConfig> choices = {forward_config(8, 64, 2), forward_config(4, 64, 2)};
  // Fewer steps rescale O less often, where registers hold no more than the plain softmax.
  const bool known = !spec.varlen && !spec.kv.has_lengths() && !spec.has_block_map();
  if (known && !spec.dropout && spec.score.empty() && (spec.mask.empty() || spec.is_causal))
    choices.insert(choices.begin(), forward_config(8, 80, 2));
  return choices;
}

}  // namespace

int q_tiles_per_cta(const AnalysedSpec& spec, const TileConfig& c) {
  if (has_few_rows(spec, c)) return 1;
  return is_forward(spec) ? c.warps / kGroupWarps / c.d_split * sm90::kWarpgroupRows / c.br : 1;
}

sm90::ForwardLayout forward_layout(const AnalysedSpec& spec, const TileConfig& c) {
  return {.br = c.br,
          .bc = c.bc,
          .head_dim = spec.head_dim,
          .head_dim_v = spec.v_dim(),
          .stages = c.stages,
          .reads_bias_tile = has_bias_tile(spec),
          .reads_column_terms = spec.programs.column_term,
          .lists = walks_lists(spec, c),
          .q_tiles_per_cta = q_tiles_per_cta(spec, c),
          .d_split = c.d_split,
          .shared_kv = spec.kv.shared_kv,
          .codes = spec.has_scales() || spec.decodes_kv(),
          .row_pitch = largest_row_pitch(spec),
          .scale_bytes = largest_scale_bytes(spec, c.bc),
          .code_products = spec.prologue.q_codes,
          .key_scales = spec.has_key_scales(),
          .split = c.split,
          .indices = spec.indices,
          .joined_queries = c.join_lists ? kMostJoinedQueries : 0,
          .joins_parts = c.cluster,
          .ctas = c.min_blocks,
          .reads_out_tile = spec.programs.out_tile && !spec.epilogue.skip_softmax};
}

sm90::BackwardLayout backward_layout(const AnalysedSpec& spec, const TileConfig& c) {
  return {.br = c.br,
          .bc = c.bc,
          .head_dim = spec.head_dim,
          .head_dim_v = spec.v_dim(),
          .stages = c.stages,
          .reads_bias_tile = has_bias_tile(spec),
          .reads_row_terms = spec.programs.row_term,
          .own_tiles = has_own_tiles(spec, c)};
}

bool has_own_tiles(const AnalysedSpec& spec, const TileConfig& c) {
  return !is_forward(spec) && c.warps == kGroupWarps;
}

int consumer_warps(const AnalysedSpec& spec, const TileConfig& c) {
  return is_forward(spec) ? c.warps : backward_layout(spec, c).slots() * c.warps;
}

int shared_bytes(const AnalysedSpec& spec, const TileConfig& c) {
  if (is_forward(spec)) return forward_layout(spec, c).bytes();
  return backward_layout(spec, c).bytes();
}

bool tma_stores_o(const AnalysedSpec& spec, const TileConfig& c) {
  return forward_layout(spec, c).has_o_tile() && !spec.varlen && !c.split && !c.pack_gqa &&
         !spec.partial.fp32_out && !spec.epilogue.out_format.quantized();
}

// What else was tried: templates/sm90/NOTES.md#decoding-beside-fa3-and-cudnn
int most_box_rows(const AnalysedSpec& spec, const TileConfig& c) {
  const bool streams = is_stream_k(spec, c) || has_fixed_parts(spec, c);
  return streams && !is_narrow(spec) && !spec.kv.shared_kv && !spec.has_scales() && !spec.decodes_kv() ? 16
                                                                                                       : 256;
}

bool holds_q(const AnalysedSpec& spec, const TileConfig& c) {
  return is_forward(spec) && spec.has_block_map() && c.warps == kGroupWarps && c.bc == 64 &&
         c.min_blocks > 1 && !is_narrow(spec) && std::max(spec.head_dim, spec.v_dim()) <= 128 &&
         !spec.epilogue.skip_softmax && !spec.prologue.q_codes && !converts(spec);
}

bool is_stream_k(const AnalysedSpec& spec, const TileConfig& c) {
  return is_forward(spec) && (spec.kv.is_cache() || spec.indices) && c.split && !c.cluster &&
         !spec.has_block_map() && !spec.epilogue.row_max && !spec.reproducible.batch_invariant &&
         !spec.programs.near_min_scores;
}

bool has_fixed_parts(const AnalysedSpec& spec, const TileConfig& c) {
  return is_forward(spec) && c.split && spec.reproducible.batch_invariant && !spec.has_tile_lists &&
         !spec.has_block_map() && !spec.epilogue.row_max && !spec.partial.running_state &&
         !spec.programs.near_min_scores;
}

bool walks_lists(const AnalysedSpec& spec, const TileConfig& c) {
  return spec.has_tile_lists && !is_stream_k(spec, c);
}

bool counts_q_tiles_as_heads(const AnalysedSpec& spec, const TileConfig& c) {
  return is_stream_k(spec, c) && c.d_split > 1 && spec.mask.empty() && !spec.varlen && !spec.indices;
}

bool is_cascade(const AnalysedSpec& spec, const TileConfig& c) {
  return is_stream_k(spec, c) && spec.kv.shared_prefix && (spec.mask.empty() || spec.mask == causal()) &&
         spec.score.empty() && !spec.dropout && !spec.indices && !spec.prologue.q_codes && c.d_split == 1;
}

bool shares_tiles_out(const AnalysedSpec& spec) {
  return !spec.has_tile_lists && !spec.varlen && !spec.kv.has_lengths();
}

bool counts_tiles(const AnalysedSpec& spec, const TileConfig& c) {
  return is_forward(spec) &&
         (walks_lists(spec, c) || (spec.kv.is_cache() && (!c.split || (spec.reproducible.batch_invariant &&
                                                                       !has_fixed_parts(spec, c)))));
}

bool has_ragged_tiles(const AnalysedSpec& spec, const TileConfig& c) {
  return counts_tiles(spec, c) && spec.varlen && spec.kv.is_cache() && !walks_lists(spec, c) && !c.split;
}

bool splits_tail_wave(const AnalysedSpec& spec, const TileConfig& c) {
  return !spec.programs.has_mask && !counts_tiles(spec, c) && !c.split && !c.pack_gqa &&
         c.br > sm90::kWarpgroupRows;
}

bool suits_two_q_tiles(const AnalysedSpec& spec) { return spec.has_tile_lists || shares_tiles_out(spec); }

bool takes_tiles_in_turn(const AnalysedSpec& spec, const TileConfig& c) {
  return counts_tiles(spec, c) || shares_tiles_out(spec);
}

int listed_rows(const AnalysedSpec& spec, const TileConfig& c) {
  if (has_own_tiles(spec, c)) return backward_layout(spec, c).rows();
  const bool whole = !is_forward(spec) || !spec.has_block_map() || spec.block_map.q % c.br == 0 ||
                     spec.block_map.q % sm90::kWarpgroupRows != 0 || spec.block_map.kv % c.bc != 0;
  // What lies behind the last key is cleared by all groups, what masks and scores read is waited for by all.
  const bool plain = !spec.prologue.q_codes && spec.mask.empty() && !spec.kv.has_lengths() && !spec.varlen &&
                     !has_bias_tile(spec) && !spec.programs.column_term && !spec.epilogue.skip_softmax;
  return whole || !plain || c.stages < 2 || q_tiles_per_cta(spec, c) > 1 ? c.br : sm90::kWarpgroupRows;
}

int forward_cluster(const AnalysedSpec& spec, const TileConfig& c) {
  if (c.cluster) return kJoiningCtas;
  return !spec.mask.empty() && shares_tiles_out(spec) && c.min_blocks == 1 && q_tiles_per_cta(spec, c) == 1 &&
                 !c.split
             ? 2
             : 1;
}

bool multiplies_as_fp16(const AnalysedSpec& spec) {
  return is_forward(spec) && spec.has_scales() && converts(spec) && !spec.has_key_scales() &&
         spec.score.empty() && spec.head_dim == spec.v_dim() && spec.head_dim <= 192 &&
         !spec.epilogue.skip_softmax;
}

TileConfig config(int br, int bc, int warps, int stages) {
  return {.family = Family::sm90, .br = br, .bc = bc, .warps = warps, .stages = stages};
}

TileConfig forward_config(int warps, int bc, int stages, int blocks) {
  TileConfig c = config(warps / kGroupWarps * sm90::kWarpgroupRows, bc, warps, stages);
  c.min_blocks = blocks;
  return c;
}

TileConfig two_q_tiles_config(int bc, int stages) { return config(2 * sm90::kWarpgroupRows, bc, 16, stages); }

TileConfig few_rows_config() {
  TileConfig c = forward_config(kGroupWarps, sm90::kFewRowsKeys, 2, 2);
  c.br = sm90::kFewRows;
  return with_split(c, false);
}

TileConfig with_split(TileConfig c, bool pack_gqa) {
  c.split = true;
  c.pack_gqa = pack_gqa;
  return c;
}

std::vector<TileConfig> preferences(const AnalysedSpec& spec) {
  if (!is_forward(spec)) return backward_preferences(spec);
  const int d = std::max(spec.head_dim, spec.v_dim());
  if (d > kMostColumns) return wide_preferences(spec);
  if (sums_tiles(spec)) return code_sum_preferences(spec);
  if (spec.prologue.q_codes) return code_product_preferences(spec);
  if (converts(spec)) return code_preferences(spec);
  std::vector<TileConfig> choices = d <= 128   ? preferences_to_128(spec)
                                    : d <= 192 ? preferences_to_192(spec)
                                               : preferences_to_256(spec);
  // A program of O has registers where two groups share them all; of three groups, where it loads a tensor
  // row by row, up to 64 columns.
  const int most_warps = spec.programs.out_tile && d <= 64 ? 12 : 8;
  if (!spec.epilogue.out_mod.empty())
    std::erase_if(choices, [&](const TileConfig& c) { return c.warps > most_warps; });
  if (spec.epilogue.skip_softmax || spec.epilogue.out_format.quantized())
    std::erase_if(choices, [&](const TileConfig& c) { return q_tiles_per_cta(spec, c) > 1; });
  if (gathers(spec)) std::erase_if(choices, [&](const TileConfig& c) { return !may_gather(spec, c); });
  return choices;
}

}  // namespace flashjit::plan::hopper
