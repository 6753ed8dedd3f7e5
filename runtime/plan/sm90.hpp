// The planner's half of family sm90, for its own files and wgmma.cpp.
#pragma once

#include <algorithm>
#include <vector>

#include "plan/analysed_spec.hpp"
#include "plan/family.hpp"
#include "templates/sm90/layout.cuh"

namespace flashjit::plan::hopper {

inline constexpr int kGroupWarps = 4;             ///< of a warpgroup, which computes together
inline constexpr int kProducerThreads = 128;      ///< a warpgroup that loads
inline constexpr int kMostBlocks = 3;             ///< on a multiprocessor
inline constexpr int kMostColumns = 256;          ///< of a warpgroup's rows of O
inline constexpr int kMostBackwardColumns = 512;  ///< of two blocks that split them

// --- Facts of a spec ---------------------------------------------------------------------------------------

inline bool is_forward(const AnalysedSpec& spec) { return spec.pass == Pass::forward; }

inline bool has_bias_tile(const AnalysedSpec& spec) { return spec.programs.bias_tile.has_value(); }

inline bool gathers(const AnalysedSpec& spec) {
  return spec.decodes_kv() || sm90::gathers(spec.indices, spec.kv.page_size);
}
/// Whether warpgroups convert K and V, and how many.
inline bool converts(const AnalysedSpec& spec) {
  return spec.decodes_kv() || sm90::converters(spec.has_scales(), spec.prologue.q_codes) > 0;
}
inline int converters(const AnalysedSpec& spec, const TileConfig& c) {
  if (spec.decodes_kv() && !sm90::has_few_rows(c.br))
    return sm90::row_decoders(c.warps / kGroupWarps, c.min_blocks);
  return sm90::converters(spec.has_scales() || spec.decodes_kv(), spec.prologue.q_codes);
}

/// Whether the tensor cores sum up P V of codes over KV tiles (templates/sm90/forward_code_sums.cuh).
inline bool sums_tiles(const AnalysedSpec& spec) {
  const PvSums sums = spec.epilogue.pv_sums;
  return spec.prologue.q_codes && !spec.has_key_scales() && !spec.programs.has_score && !spec.dropout &&
         sm90::sums_tiles(sums == PvSums::of_four, sums == PvSums::of_all, spec.v_dim());
}

inline bool is_narrow(const AnalysedSpec& spec) {
  return std::max(spec.head_dim, spec.v_dim()) <= sm90::kSliceColumns;
}
inline bool is_wide(const AnalysedSpec& spec) { return sm90::is_wide(spec.head_dim, spec.v_dim()); }
/// Whether the backward pass has more columns than blocks that do not share them.
inline bool exceeds_cta(const AnalysedSpec& spec) { return sm90::exceeds_cta(spec.head_dim, spec.v_dim()); }
/// Whether tiles of 128 keys may have these columns: gradients in fp32, as of splits, spill then.
inline bool fits_long_tile(const AnalysedSpec& spec) {
  return sm90::fits_long_tile(spec.head_dim, spec.v_dim()) && !spec.partial.fp32_grads;
}

// --- Tiles (sm90_tiles.cpp) --------------------------------------------------------------------------------

/// Q tiles that a CTA of the forward pass computes at a time.
int q_tiles_per_cta(const AnalysedSpec& spec, const TileConfig& c);

/// Whether few rows of Q are computed over codes as they are, without tiles of elements
/// (templates/sm90/forward_few_rows.cuh), and whether a spec may be: codes of 4 bits in rows with scales of
/// their blocks, or of 8 bits with scales of heads and without a mask.
inline bool has_few_rows(const AnalysedSpec& spec, const TileConfig& c) {
  return is_forward(spec) && sm90::has_few_rows(c.br);
}
Support supports_few_rows(const AnalysedSpec& spec);
TileConfig few_rows_config();

/// Shared memory of the forward pass, as ForwardStorage in templates/sm90/forward_smem.cuh has it.
sm90::ForwardLayout forward_layout(const AnalysedSpec& spec, const TileConfig& c);
/// The backward pass's, as in BackwardSmem of templates/sm90/backward_smem.cuh.
sm90::BackwardLayout backward_layout(const AnalysedSpec& spec, const TileConfig& c);
int shared_bytes(const AnalysedSpec& spec, const TileConfig& c);

/// Whether each consumer warpgroup of the backward pass has a KV tile of its own
/// (templates/sm90/backward_own_tiles.cuh); and the warps of a CTA that compute.
bool has_own_tiles(const AnalysedSpec& spec, const TileConfig& c);
int consumer_warps(const AnalysedSpec& spec, const TileConfig& c);

/// Whether Q is multiplied from registers: of 64 keys at a time a product reads as many bytes of Q as of K,
/// and two or three such tiles at a time are bound by shared memory.
/// templates/sm90/NOTES.md#blocks-of-64-rows
bool holds_q(const AnalysedSpec& spec, const TileConfig& c);
/// The most rows of K and V that TMA copies at a time. Where memory bounds, all slices of a few rows are
/// asked for one after the other: templates/sm90/NOTES.md#boxes-of-few-rows
int most_box_rows(const AnalysedSpec& spec, const TileConfig& c);
/// Whether O leaves through shared memory and TMA. Packed sequences have each other's rows behind
/// their last; splits of the keys have O in fp32.
bool tma_stores_o(const AnalysedSpec& spec, const TileConfig& c);

/// Whether all CTAs have equal shares of all work: only the device knows what the sequences of a cache cost,
/// and a query's list of keys may be long or short. Parts keep neither the largest score nor scores near the
/// least float, and depend on other sequences.
bool is_stream_k(const AnalysedSpec& spec, const TileConfig& c);
/// Whether blocks share out parts of a fixed number of KV tiles, see templates/tma/fixed_parts.cuh.
bool has_fixed_parts(const AnalysedSpec& spec, const TileConfig& c);

/// Whether the Q tiles of a sequence count as heads, which are in groups: 128 heads over one of latents are
/// two Q tiles, which then read its latents at a time.
bool counts_q_tiles_as_heads(const AnalysedSpec& spec, const TileConfig& c);

/// Whether the prefix that all sequences share is read once. Its queries are the queries of all sequences,
/// which have scales of their own where Q is of 8 bits, and positions that programs would have to see. Where
/// two warpgroups share rows, ptxas serialised their products.
bool is_cascade(const AnalysedSpec& spec, const TileConfig& c);

/// The forward pass shares its Q tiles out beforehand, but for lists: where lengths differ that only the
/// kernel knows, the device's own scheduler is fairer.
bool shares_tiles_out(const AnalysedSpec& spec);

/// Whether blocks take Q tiles from a counter: where tiles differ in cost as only the device knows, and are
/// so long that a block's start and end are better hidden.
bool counts_tiles(const AnalysedSpec& spec, const TileConfig& c);
/// Whether that counter is of tiles that exist, as packed sequences beside a cache have few or many.
bool has_ragged_tiles(const AnalysedSpec& spec, const TileConfig& c);

/// Whether the Q tiles of the forward pass's tail wave are split by warpgroups among more CTAs: without a
/// mask all cost the same. A warpgroup without rows ends there, so a CTA must not get a tile after it, as
/// from a counter.
bool splits_tail_wave(const AnalysedSpec& spec, const TileConfig& c);

/// Whether a block may compute two Q tiles at a time: not of a cache, whose keys are often split.
bool suits_two_q_tiles(const AnalysedSpec& spec);

/// Whether blocks take one Q tile after the other, instead of one each.
bool takes_tiles_in_turn(const AnalysedSpec& spec, const TileConfig& c);

/// For how many rows of a Q tile its list says whether they meet a KV tile: all together, or in the forward
/// pass each warpgroup's, where the blocks of a map divide into those but not into whole tiles.
int listed_rows(const AnalysedSpec& spec, const TileConfig& c);
/// Whether blocks walk lists of tiles. Where they share out a cache's keys they walk any mask within its
/// bounds: queries are few then, and no list is made at each call.
bool walks_lists(const AnalysedSpec& spec, const TileConfig& c);
/// Whether lists of tiles, which its mask would have, are not for its K and V.
bool excludes_lists(const AnalysedSpec& spec);

/// Blocks of the forward pass that take neighbouring Q tiles: two where a mask makes tiles unlike and the
/// kernel shares them out, else one.
int forward_cluster(const AnalysedSpec& spec, const TileConfig& c);

/// Whether K and V of 8 bits that are converted are multiplied as fp16, though Q may be bf16. Not where V is
/// multiplied with scales of keys, which may be large, nor where a score program, wide rows of O or head
/// dimensions that differ leave no registers to convert Q.
bool multiplies_as_fp16(const AnalysedSpec& spec);

TileConfig config(int br, int bc, int warps, int stages);
/// The forward pass's: a warpgroup computes 64 rows.
TileConfig forward_config(int warps, int bc, int stages, int blocks = 1);
/// Two Q tiles at a time, of 128 rows each.
TileConfig two_q_tiles_config(int bc, int stages);
TileConfig with_split(TileConfig c, bool pack_gqa);

/// Good tiles, by the wider head dimension; all are admitted. The first is for long sequences. A bias tile
/// comes in slices of 64 keys.
std::vector<TileConfig> preferences(const AnalysedSpec& spec);

// --- Legality (sm90_admits.cpp) ----------------------------------------------------------------------------

Support supports(const AnalysedSpec& spec, const DeviceInfo& device);
Support admits(const AnalysedSpec& spec, const TileConfig& c, const DeviceInfo& device);
/// Whether producer warps have registers to copy rows, and two of them nothing else to do.
bool may_gather(const AnalysedSpec& spec, const TileConfig& c);

// --- Cost (sm90_cost.cpp) ----------------------------------------------------------------------------------

/// An estimate of the forward pass's time, to compare tiles: padding to whole tiles, the last round, and
/// under a causal mask the order of unequal tiles.
double estimated_time(const AnalysedSpec& spec, const AttentionShape& shape, const TileConfig& c,
                      const DeviceInfo& device);

}  // namespace flashjit::plan::hopper
