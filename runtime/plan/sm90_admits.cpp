// What family sm90 supports, and which configurations it admits.
#include <fmt/format.h>

#include <algorithm>

#include "plan/joined_lists.hpp"
#include "plan/sm90.hpp"
#include "plan/sm90_jvp.hpp"
#include "plan/tiles.hpp"

namespace flashjit::plan::hopper {
namespace {

sm90::DecodedRows decoded_rows(const AnalysedSpec& spec) {
  if (!spec.decodes_kv()) return sm90::DecodedRows::none;
  if (spec.kv.shared_kv) return sm90::DecodedRows::latents;
  const bool shared = spec.kv.k_format.keys > 0 || spec.kv.v_format.keys > 0;
  if (shared) return sm90::DecodedRows::shared_scales;
  const auto halves_or_book = [](const KvFormat& format) {
    return format.packing == KvFormat::Packing::halves || format.code == KvFormat::Code::book;
  };
  return halves_or_book(spec.kv.k_format) || halves_or_book(spec.kv.v_format)
             ? sm90::DecodedRows::halves_or_book
             : sm90::DecodedRows::plain;
}

sm90::ForwardGroups forward_groups(const AnalysedSpec& spec, const TileConfig& c) {
  return {.consumers = c.warps / kGroupWarps,
          .ctas = c.min_blocks,
          .converters = converters(spec, c),
          .d_split = c.d_split,
          .rows = decoded_rows(spec),
          .cascade = is_cascade(spec, c),
          .key_factors = spec.prologue.q_codes && spec.has_key_scales()};
}

/// A consumer thread's values of S, P, O, what finds the bias tile, and the gradients: what cannot be traded
/// away by the compiler.
int kept_values(const AnalysedSpec& spec, const TileConfig& c) {
  if (sums_tiles(spec)) {
    const bool all = spec.epilogue.pv_sums == PvSums::of_all;
    const int o = all ? spec.v_dim() / 2 : spec.v_dim() + (spec.has_block_map() ? 8 : 0);
    return o + c.bc / 2 + (sm90::overlaps_sums(spec.v_dim()) ? c.bc / 4 : 0);
  }
  if (spec.prologue.q_codes) {  // P V begins when S is P
    const int parts = sm90::pv_parts(spec.v_dim(), true, true);
    const int at_a_time = sm90::pv_parts_at_a_time(parts, c.warps / kGroupWarps);
    const int products = at_a_time * spec.v_dim() / parts / 2;
    return spec.v_dim() / 2 + std::max(c.bc / 2, c.bc / 4 + products) + (has_bias_tile(spec) ? 8 : 0) +
           (spec.has_key_scales() ? 8 : 0);
  }
  if (is_forward(spec)) {
    return c.bc / 2 + sm90::own_columns(spec.v_dim(), c.d_split) / 2 + c.bc / 4 +
           (has_bias_tile(spec) ? 8 : 0);
  }
  const sm90::BackwardLayout layout = backward_layout(spec, c);
  const int gradients = (layout.wg_dim() + layout.wg_dim_v()) / 2;
  return gradients + (layout.wide() ? layout.dq_columns() / 2 : c.br);
}

/// How many of them fit, besides addresses and the rows' state. The loop of products of codes keeps little
/// of that while P V runs.
int kept_limit(const AnalysedSpec& spec, const TileConfig& c) {
  return sm90::consumer_registers(forward_groups(spec, c)) - (!spec.prologue.q_codes       ? 32
                                                              : c.warps / kGroupWarps == 3 ? 24
                                                                                           : 8);
}

/// With a converting warpgroup: the most columns of a product of the forward pass, and of one whose
/// accumulators ptxas lets an instruction have, which it counts against the registers at the start.
int largest_product(const AnalysedSpec& spec, const TileConfig& c) {
  const int columns = sm90::own_columns(spec.v_dim(), c.d_split);
  return std::max(c.bc, columns / sm90::pv_parts(columns, converts(spec), false, c.min_blocks));
}
int launched_limit(const AnalysedSpec& spec, const TileConfig& c) {
  constexpr int kOthers = 30;
  return 2 * (sm90::launch_registers(forward_groups(spec, c)) - kOthers);
}

/// Rows whose codes are operands of products as they are (templates/sm90/few_rows_pairs.cuh).
bool has_code_operands(const KvFormat& format, int dim, bool of_k) {
  using enum KvFormat::Code;
  if (!format.quantized() || !format.decode.empty() || dim != 128 || format.tail > 0 ||
      format.scales == KvFormat::Scales::argument)
    return false;
  // Elements of keys that share scales are made as fp16.
  if (format.keys > 0)
    return of_k && (format.code == uint2 || format.code == uint4 || format.code == int4) &&
           format.zero != KvFormat::Zero::subtracted && format.scale_type == KvFormat::Number::fp16 &&
           format.zero_bits == 0 && format.packing == KvFormat::Packing::neighbors;
  const bool has_zero = format.zero != KvFormat::Zero::none;
  if (has_zero &&
      !(format.zero_bits == 0 || (format.zero_bits == 4 && format.scales != KvFormat::Scales::before_block)))
    return false;
  const int alignment = format.row(dim).alignment;
  const bool halves = format.packing == KvFormat::Packing::halves;
  if (format.block != 0 && format.block < 32)
    return format.code == e2m1 && !halves && !has_zero && format.scale_type == KvFormat::Number::e4m3 &&
           format.scales != KvFormat::Scales::before_block && alignment % 4 == 0;
  switch (format.code) {
    case e4m3:
    case e5m2:
    case int8:
      return alignment % 2 == 0 && !has_zero;
    case int4:
    case int4_offset:
    case uint4:
    case uint2:
      return alignment % 2 == 0 && (!halves || format.block == 32);
    case e2m1:
      return alignment % 2 == 0 && !halves && !has_zero;
    default:
      return false;
  }
}

Support check_few_rows(const AnalysedSpec& spec, const TileConfig& c) {
  if (Support able = supports_few_rows(spec); !able) return able;
  if (c != few_rows_config())
    return Support::no(
        fmt::format("Br {} is for {} alone, not for {}", c.br, to_string(few_rows_config()), to_string(c)));
  return Support::yes();
}

/// The list of a query has no positions left where scores are computed, and all heads of a tile share it.
Support supports_indices(const AnalysedSpec& spec) {
  const bool plain = is_forward(spec) && spec.score.empty() && !spec.epilogue.row_max &&
                     !spec.reproducible.batch_invariant && !spec.has_scales() &&
                     (!spec.decodes_kv() || spec.kv.shared_kv) && !spec.programs.mask.uses_head;
  if (!spec.indices || plain) return Support::yes();
  return Support::no(
      "indices are for the forward pass, without a score program, row_max, batch_invariant, K and V of 8 "
      "bits or, but for latents, in a format that is decoded, and h in a mask");
}

/// Latents that are decoded: rows with their scales, which bulk copies take.
bool supports_latents(const AnalysedSpec& spec) {
  const KvFormat& format = spec.kv.k_format;
  return spec.kv.shared_kv && spec.v_dim() > kMostColumns && !format.has_argument() &&
         !format.has_block_scales() && format.row(spec.head_dim).alignment == 16;
}

/// Rows that are decoded.
Support supports_rows(const AnalysedSpec& spec) {
  if (!spec.decodes_kv() || supports_latents(spec)) return Support::yes();
  if (!spec.kv.shared_kv && std::max(spec.head_dim, spec.v_dim()) <= kMostColumns) return Support::yes();
  return Support::no(
      fmt::format("K of {} and V of {} are for head dimensions up to {} and without shared_kv, or with "
                  "shared_kv above {} columns of V, where rows of a multiple of 16 bytes have all scales",
                  to_string(spec.kv.k_format), to_string(spec.kv.v_format), kMostColumns, kMostColumns));
}

/// Weights of a program, which have no LSE to join parts of the keys by.
Support supports_weights(const AnalysedSpec& spec) {
  const bool plain = !spec.kv.is_cache() && !spec.has_scales() && !spec.decodes_kv() &&
                     (!is_forward(spec) || spec.v_dim() <= kMostColumns);
  if (!spec.score.is_weight() || plain) return Support::yes();
  return Support::no(fmt::format(
      "weight_mod is for K and V of 16 bits outside of caches, and up to {} columns of V", kMostColumns));
}

/// Programs of O where one CTA has all keys of a row, each row is one head's, and registers suffice: more
/// where the tensor that it reads is loaded row by row.
Support supports_out_mod(const AnalysedSpec& spec) {
  const int most = spec.programs.out_tile ? kMostColumns : 128;
  const bool plain = !spec.kv.is_cache() && !spec.has_scales() && !spec.decodes_kv() && spec.v_dim() <= most;
  if (!is_forward(spec) || spec.epilogue.out_mod.empty() || plain) return Support::yes();
  return Support::no(
      fmt::format("out_mod is for K and V of 16 bits outside of caches, and up to {} columns of V", most));
}

/// Above 256 columns two warpgroups share rows: each has whole blocks, but neither all columns.
Support supports_out_codes(const AnalysedSpec& spec) {
  const KvFormat& format = spec.epilogue.out_format;
  if (spec.v_dim() <= kMostColumns || !format.has_block_scales() || format.block > 0) return Support::yes();
  return Support::no(
      fmt::format("out_format with a scale for each row is for up to {} columns of V: above, two warpgroups "
                  "share a row of O",
                  kMostColumns));
}

/// The consumers' loop that may skip a tile has its variants but for products of codes and shared rows, and
/// lists of keys are short.
Support supports_skip_softmax(const AnalysedSpec& spec) {
  const bool plain = !spec.indices && !spec.prologue.q_codes && spec.v_dim() <= kMostColumns;
  if (!spec.epilogue.skip_softmax || plain) return Support::yes();
  return Support::no(fmt::format(
      "skip_softmax is without indices and Q of 8 bits, and for up to {} columns of V", kMostColumns));
}

/// A box has columns of one of Q's two tensors.
Support supports_q_rope(const AnalysedSpec& spec) {
  if (!spec.prologue.q_rope || spec.v_dim() % sm90::kSliceColumns == 0) return Support::yes();
  return Support::no(
      fmt::format("q_rope is for a multiple of {} columns of V, not {}", sm90::kSliceColumns, spec.v_dim()));
}

Support supports_q_codes(const AnalysedSpec& spec) {
  if (!spec.prologue.q_codes) return Support::yes();
  if (spec.has_key_scales() && (spec.epilogue.row_max || spec.programs.column_term))
    return Support::no(
        "Q of 8 bits beside scales of keys is for specs without row_max and what scores read of keys");
  if (gathers(spec))
    return Support::no(
        fmt::format("Q of 8 bits beside pages whose rows are no multiple of {}, from which TMA "
                    "cannot copy",
                    sm90::kSwizzledRows));
  return Support::yes();
}

Support check_pack_gqa(const AnalysedSpec& spec, const TileConfig& c) {
  if (!c.pack_gqa) return Support::yes();
  if (!is_forward(spec) || (!c.split && (!spec.kv.is_cache() || spec.epilogue.row_max)))
    return Support::no("pack_gqa is for split keys, in the forward pass: give split, too");
  const bool alike = !spec.dropout && !walks_lists(spec, c) && !has_bias_tile(spec) &&
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
  if (spec.has_tile_lists || spec.reproducible.deterministic || spec.has_capture_grads)
    return Support::no(
        "Bc above 128 is for specs without lists of tiles, ordered additions and gradients of captured "
        "tensors");
  return Support::yes();
}

Support check_forward_tile(const AnalysedSpec& spec, const TileConfig& c) {
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
  if (q_tiles_per_cta(spec, c) > 1 && (spec.has_scales() || spec.decodes_kv()))
    return Support::no("two Q tiles at a time are not for K and V of 8 bits");
  if (q_tiles_per_cta(spec, c) > 1 && spec.epilogue.skip_softmax)
    return Support::no("two Q tiles at a time leave skip_softmax too few registers");
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
  for (const int keys : {spec.kv.k_format.keys, spec.kv.v_format.keys})
    if (keys > 0 && c.bc % keys != 0 && keys % c.bc != 0)
      return Support::no(
          fmt::format("{} keys share a scale: Bc is a multiple or a divisor of that, not {}", keys, c.bc));
  if (spec.prologue.q_codes && c.bc % 32 != 0)
    return Support::no(fmt::format("with Q of 8 bits Bc is a multiple of 32, not {}", c.bc));
  return Support::yes();
}

/// Whether each warpgroup of the backward pass may have a KV tile of its own. It visits two listed Q tiles at
/// a time, which are not neighbours, as packed rows, dropout and reads by the query need them to be.
Support check_own_tiles(const AnalysedSpec& spec, const TileConfig& c) {
  const bool plain = spec.has_tile_lists && !spec.varlen && !spec.dropout &&
                     !spec.reproducible.deterministic && !spec.has_capture_grads && !has_bias_tile(spec) &&
                     !spec.programs.row_term && spec.programs.mask.q_reads == 0 && is_narrow(spec);
  const bool aligned = !spec.has_block_map() || (spec.block_map.q % 64 == 0 && spec.block_map.kv % 64 == 0);
  if (plain && aligned && c.br == 64 && c.bc == 64 && c.stages <= 2 && !c.split) return Support::yes();
  return Support::no(fmt::format(
      "with 4 warps the backward pass has Br 64, Bc 64 and up to 2 stages, for up to 64 columns and lists of "
      "tiles, without split, varlen, dropout, ordered additions, gradients of captured tensors, a dense bias "
      "and "
      "what programs read by the query, not {}",
      to_string(c)));
}

Support check_backward_tile(const AnalysedSpec& spec, const TileConfig& c) {
  const bool long_tile = c.bc == 128 && fits_long_tile(spec) && !c.split;
  if (exceeds_cta(spec) && (c.br != 64 || (c.bc != 64 && !long_tile) || c.warps != 8))
    return Support::no(fmt::format(
        "above {} columns the backward pass has 8 warps, Br 64 and Bc 64, or 128 where K has up to {} "
        "and V up to {}, without split and gradients in fp32, not {}",
        sm90::kMostCtaColumns, sm90::kMostCtaColumns + sm90::kSliceColumns, sm90::kMostCtaColumns,
        to_string(c)));
  if (has_own_tiles(spec, c)) return check_own_tiles(spec, c);
  if (c.bc > sm90::kMostKeys) return check_long_tile(spec, c);
  if (c.warps != 8 || (c.bc != 64 && c.bc != 128) ||
      (c.br != 64 && (c.br != 128 || backward_layout(spec, c).wide())))
    return Support::no(fmt::format(
        "the backward pass has 8 warps and Bc 64 or 128, and Br 64, with Bc 128 up to head dimension 128 "
        "also 128, not {}",
        to_string(c)));
  return Support::yes();
}

/// Whether blocks of a cluster may share the keys of a Q tile.
Support check_cluster(const AnalysedSpec& spec, const TileConfig& c) {
  if (!c.cluster) return Support::yes();
  const bool plain = !spec.epilogue.row_max && !spec.partial.running_state &&
                     !spec.programs.near_min_scores && !spec.reproducible.batch_invariant && !spec.indices &&
                     !spec.kv.shared_prefix && !spec.has_scales() && !spec.decodes_kv() &&
                     !spec.has_block_map() && !spec.has_tile_lists && !spec.prologue.q_codes;
  if (is_forward(spec) && c.split && c.br == sm90::kWarpgroupRows && c.d_split == 1 && c.min_blocks == 1 &&
      plain)
    return Support::yes();
  return Support::no(fmt::format(
      "cluster is for the forward pass with split and Br {}, over K and V of 16 bits, without lists "
      "of tiles or keys, row_max, running_state, batch_invariant and shared_prefix, not {}",
      sm90::kWarpgroupRows, to_string(c)));
}

Support check_tile(const AnalysedSpec& spec, const TileConfig& c) {
  if (has_few_rows(spec, c)) return check_few_rows(spec, c);
  const Support shape = is_forward(spec) ? check_forward_tile(spec, c) : check_backward_tile(spec, c);
  if (!shape) return shape;
  if (spec.kv.shared_kv && c.stages < 2)
    return Support::no("with shared_kv stages is 2 to 4, as K is read until P V of a step later");
  if (c.stages < 1 || c.stages > 4) return Support::no(fmt::format("stages is 1 to 4, not {}", c.stages));
  if (c.q_in_registers || c.tma || (c.d_split != 1 && !is_forward(spec)))
    return Support::no(fmt::format(
        "q_in_registers and tma are not for this family, which always copies by TMA, nor d_split for "
        "its backward pass, {} has one",
        to_string(c)));
  if (Support packed = check_pack_gqa(spec, c); !packed) return packed;
  if (c.join_lists)
    if (Support may = may_join_lists(spec); !may) return may;
  if (Support cluster = check_cluster(spec, c); !cluster) return cluster;
  if (spec.score.is_weight() && is_forward(spec) && c.split) return Support::no(kJoinsByLse);
  if (!spec.epilogue.out_mod.empty() && is_forward(spec) && c.split) return Support::no(kModifiesWholeOut);
  if (const int most = is_forward(spec) ? kMostBlocks : 1; c.min_blocks < 1 || c.min_blocks > most)
    return Support::no(
        fmt::format("min_blocks is 1 to {}, in the backward pass 1, not {}", kMostBlocks, c.min_blocks));
  if (c.min_blocks > 1 && (!spec.kv.k_format.decode.empty() || !spec.kv.v_format.decode.empty()))
    return Support::no(fmt::format(
        "min_blocks is 1 where elements of K or V are an expression, which needs registers, not {}",
        c.min_blocks));
  return Support::yes();
}

Support no_lists(const AnalysedSpec& spec) {
  return Support::no(fmt::format(
      "lists of tiles are not for {}; a mask of a cache does without them where keys are split",
      spec.kv.shared_kv ? "shared_kv"
                        : fmt::format("rows that are decoded, or pages whose rows are no multiple of {}",
                                      sm90::kSwizzledRows)));
}

}  // namespace

bool excludes_lists(const AnalysedSpec& spec) {
  return spec.has_tile_lists && (spec.kv.shared_kv || gathers(spec));
}

Support supports_few_rows(const AnalysedSpec& spec) {
  const bool plain = is_plain(spec) && spec.mask.empty() && !spec.partial.fp32_out && !spec.indices &&
                     !spec.kv.shared_kv && !spec.partial.running_state && !spec.epilogue.skip_softmax &&
                     !spec.kv.shared_prefix && is_stream_k(spec, few_rows_config());
  const bool whole_codes = spec.has_scales() && !spec.has_key_scales() && !spec.prologue.q_codes &&
                           spec.head_dim == 128 && spec.v_dim() == 128;
  const bool operands = spec.decodes_kv() && !spec.kv.key_scales &&
                        has_code_operands(spec.kv.k_format, spec.head_dim, true) &&
                        has_code_operands(spec.kv.v_format, spec.v_dim(), false);
  if (plain && (whole_codes || operands)) return Support::yes();
  return Support::no(
      "Br 8 is for a cache of 4 or 8 bits with scales of blocks of 32 and more, of 16 for nvfp4, or of "
      "heads, head dimension 128, without masks and programs");
}

bool may_gather(const AnalysedSpec& spec, const TileConfig& c) {
  constexpr int kFewestRegisters = 40;
  return q_tiles_per_cta(spec, c) == 1 &&
         sm90::producer_registers(forward_groups(spec, c)) >= kFewestRegisters;
}

Support supports(const AnalysedSpec& spec, const DeviceInfo& device) {
  if (device.arch != "sm_90a")
    return Support::no(fmt::format("needs wgmma and TMA of sm_90a, the device is {}", device.arch));
  if (!is_attention(spec.pass)) return Support::no(kNoProducts);
  if (spec.pass == Pass::backward_jvp) return Support::no(kNoSecondDerivative);
  if (spec.partial.two_terms) return Support::no("two_terms is for families sm80 and simt");
  if (Support able = supports_weights(spec); !able) return able;
  if (Support able = supports_out_mod(spec); !able) return able;
  if (Support able = supports_skip_softmax(spec); !able) return able;
  if (Support able = supports_out_codes(spec); !able) return able;
  if (spec.dtype != DType::fp16 && spec.dtype != DType::bf16)
    return Support::no(fmt::format("its kernels take fp16 and bf16, the spec has {}", to_string(spec.dtype)));
  if (spec.pass == Pass::jvp) return sm90_jvp::supports(spec);
  if (Support able = supports_rows(spec); !able) return able;
  if (Support able = supports_q_codes(spec); !able) return able;
  if (spec.has_scales() && std::max(spec.head_dim, spec.v_dim()) > kMostColumns)
    return Support::no(fmt::format("K and V of 8 bits are for head dimensions up to {}, not {} and {}",
                                   kMostColumns, spec.head_dim, spec.v_dim()));
  if (is_forward(spec) && spec.v_dim() > kMostColumns && has_bias_tile(spec))
    return Support::no(
        fmt::format("a dense bias beside more than {} columns of V is not for this family", kMostColumns));
  if (spec.partial.running_state && spec.v_dim() > kMostColumns)
    return Support::no(
        fmt::format("a running state is for up to {} columns of V, not {}", kMostColumns, spec.v_dim()));
  if (!is_forward(spec) && std::max(spec.head_dim, spec.v_dim()) > kMostBackwardColumns)
    return Support::no(fmt::format("the backward pass is for head dimensions up to {}, not {} and {}",
                                   kMostBackwardColumns, spec.head_dim, spec.v_dim()));
  if (!is_forward(spec) && exceeds_cta(spec) && spec.has_capture_grads)
    return Support::no(
        fmt::format("gradients of captured tensors are for head dimensions up to {}, not {} and {}",
                    sm90::kMostCtaColumns, spec.head_dim, spec.v_dim()));
  if (Support able = supports_indices(spec); !able) return able;
  if (Support able = supports_q_rope(spec); !able) return able;
  if (excludes_lists(spec) && !is_stream_k(spec, with_split(config(sm90::kWarpgroupRows, 64, 4, 2), false)))
    return no_lists(spec);
  if (gathers(spec) && (has_bias_tile(spec) || spec.programs.column_term))
    return Support::no(
        fmt::format("rows of pages that are no multiple of {} rows, and rows that are decoded, are for specs "
                    "without a dense bias, or what scores read of keys",
                    sm90::kSwizzledRows));
  if (is_forward(spec)) return Support::yes();
  if (spec.orders_capture_grads()) return Support::no(kUnorderedGrads);
  return Support::yes();
}

Support admits(const AnalysedSpec& spec, const TileConfig& c, const DeviceInfo& device) {
  if (c.family != Family::sm90) return Support::no("the configuration is of another family");
  if (Support able = supports(spec, device); !able) return able;
  if (spec.pass == Pass::jvp) return sm90_jvp::admits(spec, c, device);
  if (Support tile = check_tile(spec, c); !tile) return tile;
  if (excludes_lists(spec) && walks_lists(spec, c)) return no_lists(spec);
  const int most_bytes =
      std::min(device.shared_per_block, device.shared_per_sm / c.min_blocks - kReservedSharedBytes);
  if (const int bytes = shared_bytes(spec, c); bytes > most_bytes)
    return Support::no(fmt::format("{} needs {} bytes of shared memory a block, {} has {}", to_string(c),
                                   bytes, device.arch, most_bytes));
  if (has_few_rows(spec, c)) return Support::yes();
  if (converts(spec) && largest_product(spec, c) > launched_limit(spec, c))
    return Support::no(fmt::format("{} has products of {} columns, a thread begins with registers for {}",
                                   to_string(c), largest_product(spec, c), launched_limit(spec, c)));
  if (const int values = kept_values(spec, c); values > kept_limit(spec, c))
    return Support::no(
        fmt::format("{} keeps {} values a thread, {} fit", to_string(c), values, kept_limit(spec, c)));
  return Support::yes();
}

}  // namespace flashjit::plan::hopper
