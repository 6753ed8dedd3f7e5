// Shared memory of family sm90, registers of its roles, and how its products are divided.
// Host and device include this file: the host prunes by it and makes tensor maps, the kernels find addresses
// by it.
#pragma once

#if defined(__CUDACC__)
#include "flashjit/tma/tile_layout.cuh"
#else
#include "templates/tma/tile_layout.cuh"
#endif

namespace flashjit::sm90 {

using namespace tma;

/// Where codes of 8 bits are multiplied, two of them are a column of a tile.
constexpr int tile_columns(int elements, bool code_products) {
  return code_products ? elements / 2 : elements;
}

constexpr int kSharedLimit = 232448;  ///< bytes of shared memory that a CTA of sm_90 can have
constexpr int kReservedOfCta = 1024;  ///< that it takes besides, of its multiprocessor's

constexpr int kWarpRows = 16;  ///< rows of each of its warps

/// Whether K or V has rows that are decoded, whose codes are in halves or of a book, or whose keys share
/// scales of columns, or V is in K's rows.
enum class DecodedRows { none, plain, halves_or_book, shared_scales, latents };

/// The facts that decide the registers of a forward pass's warpgroups.
struct ForwardGroups {
  int consumers;       ///< warpgroups of a CTA, beside the producer's
  int ctas;            ///< of a multiprocessor
  int converters = 0;  ///< warpgroups that convert or decode K and V
  int d_split = 1;
  DecodedRows rows = DecodedRows::none;
  bool cascade = false;      ///< its scheduler tells the combine entry of each part
  bool key_factors = false;  ///< a warp of the producer finds factors of keys
};

/// Registers of a thread: at the start all have the same number, then the others give most of theirs to the
/// consumers.
constexpr int launch_registers(const ForwardGroups& g) {
  return 65536 / ((g.consumers + 1 + g.converters) * 128 * g.ctas) / 8 * 8;
}
/// Consumers that share rows need fewer. Warps that copy rows, which are then decoded, need more, and so do
/// a cascade's scheduler and what finds factors of keys, which else spill.
constexpr int producer_registers(const ForwardGroups& g) {
  if (g.rows == DecodedRows::latents) return 56;
  if (g.rows == DecodedRows::shared_scales && g.ctas > 1) return 40;
  if (g.rows != DecodedRows::none) return g.ctas > 1 ? 48 : g.consumers == 1 ? 80 : 40;
  if (g.cascade && g.converters == 0) return 56;
  if (g.key_factors && g.ctas > 1) return 40;
  return g.ctas > 1 || g.consumers > 2 ? 32 : g.consumers == 2 && g.d_split == 1 ? 40 : 56;
}
constexpr int converter_registers(const ForwardGroups& g) {
  if (g.rows == DecodedRows::latents) return 72;
  const int of_scales = g.rows == DecodedRows::shared_scales ? 16 : 0;
  if (g.rows == DecodedRows::halves_or_book && g.ctas > 1) return 48;
  if (g.rows != DecodedRows::none) return g.ctas > 1 ? 40 + of_scales : g.consumers > 1 ? 56 + of_scales : 96;
  return g.ctas > 1 || g.consumers > 1 ? 40 : 56;
}
constexpr int consumer_registers(const ForwardGroups& g) {
  const int all = launch_registers(g) * (g.consumers + 1 + g.converters) - producer_registers(g) -
                  g.converters * converter_registers(g);
  return all / g.consumers < 240 ? all / g.consumers / 8 * 8 : 240;
}

/// Over few rows two warpgroups compute, beside a producer that copies rows, and scales that lie apart.
constexpr int few_rows_producer_registers(int ctas, bool apart) { return ctas == 1 ? 80 : apart ? 48 : 32; }
constexpr int few_rows_registers(int ctas, bool apart) {
  const int each = (launch_registers({.consumers = 1, .ctas = ctas, .converters = 1}) * 3 -
                    few_rows_producer_registers(ctas, apart)) /
                   16 * 8;
  return each < 240 ? each : 240;
}

/// Whether the tensor cores sum up P V of codes over KV tiles, if they may: two accumulators of O fit beside
/// S for up to 128 columns.
constexpr bool sums_tiles(bool four, bool all, int columns) { return all || (four && columns <= 128); }
/// Whether P V then runs beside the softmax of the next KV tile, whose S is in registers, too.
constexpr bool overlaps_sums(int columns) { return columns <= 128; }

/// Whether a product of the forward pass is one asm statement for all its steps of 16 columns, or a statement
/// for each step. One statement compiles faster by 8% and more, but with fewer columns ptxas then orders the
/// code differently, which is up to 3% slower.
constexpr bool has_whole_products(int head_dim_v, bool code_products) {
  return head_dim_v > 128 || code_products;
}

/// Into how many parts of the columns of O a product P V is divided: two where the converting warpgroup
/// leaves a thread 128 registers at the start, or 80 beside another CTA, which ptxas does not let one
/// instruction exceed. Where codes are multiplied, parts of the product are in registers beside O, to which
/// they are added: above 96 columns the fewest parts of whole chunks of eight columns, 64 columns at most if
/// five parts suffice. `columns` are a warpgroup's.
constexpr int pv_parts(int columns, bool codes, bool code_products, int ctas = 1) {
  if (!code_products) return codes && (columns == 256 || (columns == 128 && ctas > 1)) ? 2 : 1;
  if (columns <= 96) return 1;
  for (int parts = 2; parts <= 5; ++parts)
    if (columns % (8 * parts) == 0 && columns / parts <= 64) return parts;
  return 2;
}

/// Parts of a product of codes that are in registers at a time: one is added while the next is under way, if
/// registers suffice.
constexpr int pv_parts_at_a_time(int parts, int consumers) { return parts > 1 && consumers < 3 ? 2 : 1; }

constexpr int kSwizzledRows = 8;  ///< a box has a multiple of these

/// Whether producer warps copy K and V row by row: boxes of TMA are of whole periods of the swizzle, and of
/// keys in order.
constexpr bool gathers(bool indices, int page_rows) { return indices || page_rows % kSwizzledRows != 0; }

/// Warpgroups that convert K and V of 8 bits for products with Q of 16; or those that decode rows of other
/// formats, K and V each its own where there are registers.
constexpr int converters(bool codes, bool code_products) { return codes && !code_products ? 1 : 0; }
constexpr int row_decoders(int consumers, int ctas) { return consumers == 1 && ctas == 1 ? 2 : 1; }

/// Bytes from a row to the next in a slot for rows that are decoded. They are copied in pieces of 16 bytes,
/// at whose multiples a row need not begin.
constexpr int row_pitch(int bytes, int alignment) {
  return (bytes + (alignment < 16 ? 16 - alignment : 0) + 15) / 16 * 16;
}
constexpr int kRowInfoBytes = 8;  ///< of each of these: where it begins, and its scale
/// What a slot has behind them of a tensor of scales: a row for each key, copied like theirs, with a word
/// that says where it begins; or one for `keys` that share it: a tile has a multiple or a divisor of these.
constexpr int scale_rows_bytes(int bc, int keys, int bytes, int alignment) {
  if (bytes == 0) return 0;
  if (keys > 0) return (bc > keys ? bc / keys : 1) * bytes;
  return bc * (row_pitch(bytes, alignment) + 4);
}

constexpr int kCodeAlignment = 128;  ///< of a tile of codes, which TMA does not swizzle
/// Tiles of codes that are loaded or wait to be converted: K and V of a KV tile, and more where they fit.
constexpr int kFewestCodeSlots = 2, kMoreCodeSlots = 4;
constexpr int kCodeSlotBarriers = 2;   ///< full and empty
constexpr int kKeyFactorBytes = 12;    ///< what consumers of products of codes read of a key with scales
constexpr int kPresentKeysBytes = 32;  ///< a bit for each key of a tile, of one query

/// The most rows of a tile of few rows, whose products are of codes as operands: see forward_few_rows.cuh.
constexpr int kFewRows = 8;
constexpr int kFewRowsKeys = 128;       ///< of a KV tile, sixteen for each warp
constexpr int kFewRowsWarps = 8;        ///< that compute them, of two warpgroups
constexpr int kFewRowsSlots = 16;       ///< the most slots for tiles of codes
constexpr int kFewestFewRowsSlots = 4;  ///< of rows: K of a tile is released when V has come
constexpr bool has_few_rows(int br) { return br == kFewRows; }
/// Each warp leaves O, m and l for the others at a work tile's end. The pitch is the floats from one row of O
/// to the next.
constexpr int few_rows_pitch(int head_dim_v) { return head_dim_v + 4; }
constexpr int few_rows_part_bytes(int head_dim_v) { return kFewRows * (few_rows_pitch(head_dim_v) + 2) * 4; }
/// Warps that leave theirs at a time: half of them where the slots of two CTAs need the room.
constexpr int few_rows_parts(int slot_bytes) {
  constexpr int kMostSlotBytes = 19 * 1024 + 512;
  return slot_bytes > kMostSlotBytes ? kFewRowsWarps / 2 : kFewRowsWarps;
}

constexpr int kWorkTileBytes = 64;  ///< of a WorkTile
/// Work tiles that are kept. Five would do: one ends, two more have begun or are loaded, a third waits for a
/// stage of Q, and the scheduler looks for the fourth.
constexpr int kKeptWorkTiles = 8;

/// What goes with P from the first of two warpgroups with the same rows to the second: see PHandoff.
constexpr int kHandoffBytes = 2 * kWarpgroupRows * 4 + 16;

/// Shared memory of a CTA of the forward pass. For each of the Q tiles that it computes at a time a slot, in
/// this order:
///
///   Q            one or two stages, each warpgroup's 64 rows together
///   K, V         `stages` each
///   bias tile    `stages`, where the score reads one
///   P            where warpgroups share rows
///   O            where it fits
///   out tile     what a program of O reads of a tensor, where it fits, too
///   parts        of a tile of few rows what each warp has of O
///   codes        slots for tiles of K and V of 8 bits, each with its keys' scales, or for rows that are
///                decoded, with their info and rows of scales; of V alone where codes are multiplied, whose
///                V^T is in V's stages
///   column terms `stages`, where the score has them
///   key scales   `stages`, of K's codes; where codes are multiplied three factors of each key
///   handoff      what goes with P
///   joined_parts of the rows that a CTA of a cluster joins
///   work tiles, list entries of `stages` KV tiles where they are listed, which entries of lists of keys
///   are keys, barriers
struct ForwardLayout {
  int br, bc, head_dim, head_dim_v, stages;
  bool reads_bias_tile, reads_column_terms, lists;
  int q_tiles_per_cta;
  int d_split;         ///< warpgroups with the same rows
  bool shared_kv;      ///< V is K's tile
  bool codes;          ///< K and V are of 8 bits, or are decoded
  int row_pitch;       ///< of rows that are decoded, the larger of K's and V's; else 0
  int scale_bytes;     ///< of a slot for their scales in a tensor of their own, the larger of both
  bool code_products;  ///< and so is Q, and all are multiplied as they are
  bool key_scales;     ///< and their keys have scales
  bool split;
  bool indices;
  int joined_queries;  ///< whose lists are joined, at most; 0: none
  bool joins_parts;    ///< of rows, which CTAs of a cluster send each other
  int ctas;            ///< of a multiprocessor; with codes its shared memory is shared out among them
  bool reads_out_tile = false;  ///< a program of O reads a tile of a tensor

  constexpr int warpgroups() const { return row_warpgroups(br); }  ///< with rows of their own
  constexpr bool few_rows() const { return has_few_rows(br); }
  /// Columns of a tile of V, with columns after the last that a warpgroup reads.
  constexpr int columns_v() const { return d_split * tma::own_columns(head_dim_v, d_split); }
  constexpr int k_bytes() const {
    if (few_rows()) return 0;
    return tile_bytes(
        bc, shared_kv && columns_v() > head_dim ? columns_v() : tile_columns(head_dim, code_products));
  }
  constexpr int v_bytes() const {
    if (few_rows()) return 0;
    if (code_products) return tile_bytes(head_dim_v, tile_columns(bc, true));
    return shared_kv ? 0 : tile_bytes(bc, columns_v());
  }
  /// Two where they fit: then the next Q tile is loaded before it is needed. One where codes are converted,
  /// so that more tiles of codes are on their way.
  constexpr int q_stages() const { return !(codes && !code_products) && bytes_of(2) <= limit() ? 2 : 1; }
  constexpr int q() const { return 0; }
  constexpr int k() const { return q_stages() * q_bytes(); }
  constexpr int v() const { return k() + stages * k_bytes(); }
  constexpr int bias_tile() const { return v() + stages * v_bytes(); }
  constexpr int bias_tile_bytes() const { return reads_bias_tile ? tile_bytes(br, bc) : 0; }
  constexpr int p_tile() const { return bias_tile() + stages * bias_tile_bytes(); }
  constexpr int o() const { return p_tile() + p_bytes(); }
  /// Where a tile of O fits, TMA can store it, and the consumers need not.
  constexpr bool has_o_tile() const {
    return !(codes && split) && d_split == 1 && bytes_of(q_stages()) + o_bytes() <= limit();
  }
  constexpr int out_tile() const { return o() + (has_o_tile() ? o_bytes() : 0); }
  /// Where it fits, it is copied while the keys are visited. Above 128 columns the loop over O spills.
  constexpr bool has_out_tile() const {
    return reads_out_tile && head_dim_v <= 128 && ctas == 1 && has_o_tile() &&
           bytes_of(q_stages()) + 2 * o_bytes() <= limit();
  }
  constexpr int parts() const { return out_tile() + (has_out_tile() ? o_bytes() : 0); }
  constexpr int code_tiles() const { return parts() + parts_bytes(); }
  constexpr int code_scales() const {
    if (code_products) return tile_bytes(bc, tile_columns(head_dim_v, true));
    return bc * (row_pitch > 0 ? row_pitch : head_dim > head_dim_v ? head_dim : head_dim_v);
  }
  constexpr int scale_rows() const { return code_scales() + bc * kRowInfoBytes; }
  constexpr int code_slot_bytes() const {
    const int of_keys = code_products ? 0 : key_scales_bytes();
    const int bytes = !codes ? 0 : row_pitch > 0 ? scale_rows() + scale_bytes : code_scales() + of_keys;
    return (bytes + kCodeAlignment - 1) / kCodeAlignment * kCodeAlignment;
  }
  constexpr int code_slots() const { return fewest_code_slots() + more_code_slots(); }
  constexpr int column_terms() const { return code_tiles() + code_slots() * code_slot_bytes(); }
  constexpr int column_terms_bytes() const { return reads_column_terms ? bc * 4 : 0; }
  constexpr int key_scales_begin() const { return column_terms() + stages * column_terms_bytes(); }
  constexpr int key_scales_bytes() const {
    return key_scales ? bc * (code_products ? kKeyFactorBytes : 4) : 0;
  }
  constexpr int handoff() const { return key_scales_begin() + stages * key_scales_bytes(); }
  constexpr int joined_parts() const { return handoff() + handoff_bytes(); }
  constexpr int work_tiles() const { return joined_parts() + joined_parts_bytes(); }
  constexpr int list_entries() const { return work_tiles() + kKeptWorkTiles * kWorkTileBytes; }
  constexpr int present_keys_of_tile() const {
    return joined_queries > 0 ? joined_queries * bc / 8 : kPresentKeysBytes;
  }
  constexpr int present_keys() const { return list_entries() + list_entries_bytes(); }
  constexpr int barriers() const { return present_keys() + present_keys_bytes(); }
  constexpr int slot_bytes() const {
    const int used = bytes_with_o() + more_code_slots() * code_slot_cost();
    return q_tiles_per_cta == 1 ? used : (used + kAlignment - 1) / kAlignment * kAlignment;
  }
  constexpr int bytes() const { return q_tiles_per_cta * slot_bytes(); }

 private:
  constexpr int limit() const {
    if (codes) return (kSharedLimit + kReservedOfCta) / ctas - kReservedOfCta;
    return kSharedLimit / q_tiles_per_cta / kAlignment * kAlignment;
  }
  constexpr int list_entries_bytes() const { return lists ? (stages + 1) / 2 * 8 : 0; }
  /// For twice as many tiles as there are stages: a consumer reads them when it has released K.
  constexpr int present_keys_bytes() const { return indices ? 2 * stages * present_keys_of_tile() : 0; }
  constexpr int q_bytes() const {
    return warpgroups() * tile_bytes(warpgroup_rows(br), tile_columns(head_dim, code_products));
  }
  constexpr int parts_bytes() const {
    const int bytes = few_rows() ? few_rows_parts(code_slot_bytes()) * few_rows_part_bytes(head_dim_v) : 0;
    return (bytes + kCodeAlignment - 1) / kCodeAlignment * kCodeAlignment;
  }
  constexpr int p_bytes() const { return d_split > 1 ? tile_bytes(kWarpgroupRows, bc) : 0; }
  /// O and LSE of all parts of the rows that a CTA joins, and a barrier.
  constexpr int joined_parts_bytes() const {
    return joins_parts ? kWarpgroupRows * (head_dim_v + 1) * 4 + 16 : 0;
  }
  constexpr int handoff_bytes() const { return d_split > 1 ? kHandoffBytes : 0; }
  constexpr int o_bytes() const { return warpgroups() * tile_bytes(kWarpgroupRows, head_dim_v); }
  /// Full and empty, for what the score reads.
  constexpr int score_barriers() const { return reads_bias_tile || reads_column_terms ? 2 : 0; }
  constexpr int fewest_code_slots() const { return code_products ? 1 : codes ? kFewestCodeSlots : 0; }
  /// As many as fit: they are what is on its way from memory.
  constexpr int more_code_slots() const {
    const int more = codes && limit() > bytes_with_o() ? (limit() - bytes_with_o()) / code_slot_cost() : 0;
    const int most = few_rows() ? kFewRowsSlots - kFewestCodeSlots : kMoreCodeSlots,
              fits = more < most ? more : most;
    return row_pitch > 0 && !shared_kv ? fits / 2 * 2 : fits;  // K's and V's take turns
  }
  constexpr int code_slot_cost() const { return code_slot_bytes() + kCodeSlotBarriers * 8; }
  constexpr int bytes_with_o() const {
    return bytes_of(q_stages()) + (has_o_tile() + has_out_tile()) * o_bytes();
  }
  /// Bytes without O, with the fewest slots for codes. Barriers: two for each warpgroup's Q, four for each
  /// stage of K and V and the score's, one for each work tile, and the codes'.
  constexpr int bytes_of(int q_count) const {
    return q_count * q_bytes() + p_bytes() + parts_bytes() + handoff_bytes() + joined_parts_bytes() +
           stages * (k_bytes() + v_bytes() + bias_tile_bytes() + column_terms_bytes() + key_scales_bytes()) +
           kKeptWorkTiles * kWorkTileBytes + list_entries_bytes() + present_keys_bytes() +
           fewest_code_slots() * code_slot_cost() +
           (2 * warpgroups() * q_count + (4 + score_barriers()) * stages + kKeptWorkTiles) * 8;
  }
};

/// Columns of a tile of a tensor and its tangent, which begins at a slice.
constexpr int jvp_columns(int columns) { return 2 * slices(columns) * kSliceColumns; }

/// Bytes of the backward pass's KvTileInfo and QTileInfo.
constexpr int kKvTileInfoBytes = 32, kQTileInfoBytes = 32;
/// KV tiles whose info is kept. When the producer takes the next KV tile it has loaded K and V of the last
/// one, so the consumers are done with the one before, but that one's dQ may still be on its way.
constexpr int kKeptKvTiles = 4;
/// Where CTAs sum up dQ, dQ of three more may be on its way.
constexpr int kKeptKvTilesOfSums = 8;
/// Q tiles whose info is kept: those in the stages, at most four, and the two before, whose dQ may still be
/// on its way.
constexpr int kKeptQTiles = 8;
/// KV tile indices that the first CTA of a cluster may send before the others have read the first one. Two
/// more than there are stages would do.
constexpr int kKeptTileIndices = 8;

constexpr int kZerosBytes = 16;  ///< a row of eight zeros, read where a tile has no row

/// Columns that the backward pass computes with: whole slices, and an even number of them where two
/// warpgroups share them; or five, and they share the last by columns.
constexpr int backward_columns(int columns) {
  const int count = slices(columns);
  return (count == 3 ? 4 : count) * kSliceColumns;
}
/// Above 128 columns the registers of one warpgroup do not hold its rows of dK and dV: then both groups
/// share 64 rows, and each has half of the columns.
constexpr bool is_wide(int head_dim, int head_dim_v) {
  return slices(head_dim) > 2 || slices(head_dim_v) > 2;
}

constexpr int kMostKeys = 128;        ///< that a CTA of the backward pass has
constexpr int kMostCtaColumns = 256;  ///< of K and of V, that it has

constexpr bool exceeds_cta(int head_dim, int head_dim_v) {
  return head_dim > kMostCtaColumns || head_dim_v > kMostCtaColumns;
}
/// Above 256 columns the registers of one CTA do not hold dK and dV of 64 keys: then the two CTAs of a
/// cluster have the same keys, and each has half of the columns of all tensors. With KV tiles of 128 keys
/// they do not: registers and shared memory hold one slice more of K.
constexpr bool splits_columns(int bc, int head_dim, int head_dim_v) {
  return exceeds_cta(head_dim, head_dim_v) && bc < kMostKeys;
}
constexpr bool fits_long_tile(int head_dim, int head_dim_v) {
  return head_dim <= kMostCtaColumns + kSliceColumns && head_dim_v <= kMostCtaColumns;
}
/// The first CTA's share of so many columns, in whole steps of a product; the second may have fewer.
constexpr int cta_columns(int columns, bool split) { return split ? (columns + 31) / 32 * 16 : columns; }

/// The first warpgroup's columns where two share a CTA's, as a product begins at a whole slice if there are
/// several; and how many each computes.
constexpr int first_wg_columns(int columns) {
  return columns <= kSliceColumns ? kSliceColumns / 2 : columns <= 3 * kSliceColumns ? 64 : 128;
}
constexpr int wg_columns(int columns) {
  const int first = first_wg_columns(columns);
  return columns > 2 * first ? columns - first : first;
}

/// CTAs of a cluster, which share a KV tile of the backward pass. Wide, two share one of 128 keys, or of 64
/// where they split columns; else a larger tile has a CTA for every 128 keys.
constexpr int cluster_ctas(int bc, int head_dim, int head_dim_v) {
  if (splits_columns(bc, head_dim, head_dim_v)) return 2;
  if (is_wide(head_dim, head_dim_v)) return bc == kMostKeys ? 2 : 1;
  return bc > kMostKeys ? bc / kMostKeys : 1;
}
/// Q tiles for whose partial dQ there is room, where CTAs sum it up.
constexpr int kDqSlots = 2;

/// Shared memory of a CTA of the backward pass, in this order:
///
///   K, V           the CTA's keys of the KV tile
///   other K        half of the columns of the other CTA's keys, where CTAs exchange dS
///   Q              `stages`
///   dO             `stages`; one where CTAs exchange dS
///   dS             two; and where CTAs exchange dS two of the other CTA's; one where they split columns, or
///                  where K has five slices
///   P              as many where both warpgroups have the same keys ("wide"); with five slices the other
///                  CTA's dS comes into the same tile when P has been read
///   partial sums   where CTAs split columns, the other CTA's S and dP of half of the pairs
///   bias tile      `stages`, where the score reads one
///   dQ             of each warpgroup what does not overlap dO and Q; where CTAs sum up dQ, all CTAs' partial
///                  dQ of two Q tiles, in the columns that this CTA sums up
///   LSE, D         `stages` of a Q tile's rows; and the score's row term
///   Q tiles, KV tiles, zeros, tile indices, barriers
///
/// The one overlap: wide, a warpgroup's dQ of Q tile i lies over the columns of dO and Q of the same stage
/// that this warpgroup alone reads, on its way to global memory, and only then is the stage released. Where
/// CTAs split columns, only if memory is short.
///
/// With `own_tiles` each warpgroup has all of that, in a slot: two Q tiles in a stage, one dS of both, and no
/// room for dQ.
struct BackwardLayout {
  int br, bc, head_dim, head_dim_v, stages;
  bool reads_bias_tile, reads_row_terms;
  bool own_tiles;  ///< each consumer warpgroup has a KV tile of its own

  /// Also for KV tiles of 64 keys: for short sequences, so that there is one for each multiprocessor.
  constexpr bool wide() const { return is_wide(head_dim, head_dim_v) || (bc == 64 && !own_tiles); }
  constexpr int slots() const { return own_tiles ? 2 : 1; }
  /// Rows of Q in a stage.
  constexpr int rows() const { return own_tiles ? 2 * br : br; }
  constexpr int cluster() const { return cluster_ctas(bc, head_dim, head_dim_v); }
  // What the CTAs of a cluster do for dQ: each computes some of its columns, from the dS of both; or each
  // computes all columns from its own keys, and sums up some columns of all CTAs' partial dQ.
  constexpr bool exchanges_ds() const { return cluster() > 1 && wide() && !splits_columns(); }
  constexpr bool sums_dq() const { return cluster() > 1 && !wide(); }
  /// Or each has half of the columns, and they add up their S and dP.
  constexpr bool splits_columns() const { return sm90::splits_columns(bc, head_dim, head_dim_v); }
  /// Columns of a fifth slice of K and Q, if there is one. Each warpgroup has a part of it, next to whole
  /// slices of its own.
  constexpr int fifth_slice() const {
    return exchanges_ds() && columns() > kMostCtaColumns ? kSliceColumns : 0;
  }
  constexpr int keys() const { return splits_columns() ? bc : bc / cluster(); }
  constexpr int dout_stages() const { return exchanges_ds() ? 1 : stages; }
  // The columns of Q and K, and of dO and V, that a CTA has, and the columns of its tiles.
  constexpr int cta_dim() const { return cta_columns(head_dim, splits_columns()); }
  constexpr int cta_dim_v() const { return cta_columns(head_dim_v, splits_columns()); }
  constexpr int columns() const { return smem_columns(cta_dim()); }
  constexpr int columns_v() const { return smem_columns(cta_dim_v()); }
  // The columns that warpgroups share, where they share any.
  constexpr int shared_dim() const { return splits_columns() ? cta_dim() : columns(); }
  constexpr int shared_dim_v() const { return splits_columns() ? cta_dim_v() : columns_v(); }
  // Columns of dK and dV that a warpgroup computes.
  constexpr int wg_dim() const {
    return wide() ? wg_columns(shared_dim() - fifth_slice()) + fifth_slice() / 2 : columns();
  }
  constexpr int wg_dim_v() const { return wide() ? wg_columns(shared_dim_v()) : columns_v(); }

  constexpr int k() const { return 0; }
  constexpr int v() const { return tile_bytes(keys(), columns()); }
  constexpr int other_k() const { return v() + tile_bytes(keys(), columns_v()); }
  constexpr int other_columns() const {
    return exchanges_ds() ? (columns() - fifth_slice()) / 2 + fifth_slice() : 0;
  }
  constexpr int q() const { return other_k() + tile_bytes(keys(), other_columns()); }
  constexpr int dout() const { return q() + stages * tile_bytes(rows(), columns()); }
  constexpr int ds() const { return dout() + dout_stages() * tile_bytes(rows(), columns_v()); }
  constexpr int ds_buffers() const { return splits_columns() || other_ds_over_p() || own_tiles ? 1 : 2; }
  constexpr bool other_ds_over_p() const { return fifth_slice() > 0; }
  constexpr int other_ds() const { return ds() + ds_buffers() * tile_bytes(keys(), rows()); }
  constexpr int p() const {
    return other_ds() + (exchanges_ds() && !other_ds_over_p() ? ds_buffers() * tile_bytes(keys(), br) : 0);
  }
  constexpr int partial_sums() const { return p() + (wide() ? ds_buffers() * tile_bytes(keys(), br) : 0); }
  /// Bytes of a warpgroup's.
  constexpr int partial_sums_bytes() const { return splits_columns() ? 2 * (keys() * br / 4) * 4 : 0; }
  constexpr int bias_tile() const { return partial_sums() + 2 * partial_sums_bytes(); }
  /// Above 128 columns there is no room: there the score is read element by element.
  constexpr bool has_bias_tile() const { return reads_bias_tile && !is_wide(head_dim, head_dim_v); }
  constexpr int bias_tile_bytes() const { return has_bias_tile() ? tile_bytes(br, keys()) : 0; }
  constexpr int dq() const { return bias_tile() + stages * bias_tile_bytes(); }
  /// Columns of dQ that a warpgroup computes: all, of 64 rows, where there are 128 rows, else some of all
  /// rows.
  constexpr int dq_columns() const {
    if (splits_columns()) return wg_columns(cta_dim());
    if (own_tiles) return columns();
    return br == 128 ? columns() : columns() / (exchanges_ds() ? 4 : 2);
  }
  /// Columns that it hands on: the second's, where both compute some.
  constexpr int own_dq_columns(int wg) const {
    return splits_columns() && wg == 0 ? first_wg_columns(cta_dim()) : dq_columns();
  }
  // Bytes of a warpgroup's dQ that lie over Q and over dO, and of the rest, all in fp32.
  constexpr int dq_within_q() const {
    return fifth_slice() > 0 || is_under_dq(shared_dim()) ? columns() / 2 * br * 2 : 0;
  }
  constexpr int dq_within_dout() const {
    return !exchanges_ds() && is_under_dq(shared_dim_v()) ? columns_v() / 2 * br * 2 : 0;
  }
  /// Whether some of dQ lies over a stage, which then is released when dQ has been added.
  constexpr bool is_dq_over_stage() const { return dq_within_q() + dq_within_dout() > 0; }
  constexpr int dq_bytes(int wg = 0) const {
    if (own_tiles) return 0;
    const int rest = own_dq_columns(wg) * kWarpgroupRows * 4 - dq_within_q() - dq_within_dout();
    return rest > 0 ? rest : 0;
  }
  constexpr int lse() const {
    return dq() + (sums_dq() ? 2 * kDqSlots * dq_bytes() : dq_bytes(0) + dq_bytes(1));
  }
  constexpr int d() const { return lse() + stages * rows() * 4; }
  constexpr int row_terms() const { return d() + stages * rows() * 4; }
  constexpr int q_tiles() const { return row_terms() + (reads_row_terms ? stages * br * 4 : 0); }
  constexpr int kv_tiles() const { return q_tiles() + kKeptQTiles * kQTileInfoBytes; }
  constexpr int kept_kv_tiles() const { return sums_dq() ? kKeptKvTilesOfSums : kKeptKvTiles; }
  constexpr int zeros() const { return kv_tiles() + kept_kv_tiles() * kKvTileInfoBytes; }
  constexpr int tile_indices() const { return zeros() + kZerosBytes; }
  constexpr int barriers() const { return tile_indices() + (cluster() > 1 ? kKeptTileIndices * 4 : 0); }
  constexpr int bytes_of_slot() const {
    const int bytes = barriers() + barrier_count() * 8;
    return own_tiles ? (bytes + kAlignment - 1) / kAlignment * kAlignment : bytes;
  }
  constexpr int bytes() const { return slots() * bytes_of_slot(); }

  // The number of the first barrier of each kind.
  constexpr int stage_barriers(int stage) const { return 4 * stage; }  ///< Q full, Q empty, dO full, dO empty
  constexpr int ds_barriers() const { return 4 * stages; }             ///< for two Q tiles
  constexpr int dq_barriers() const { return ds_barriers() + 2; }      ///< full and empty, of two warpgroups
  constexpr int kv_barrier() const { return dq_barriers() + 4; }
  constexpr int ds_added_barriers() const { return kv_barrier() + 1; }  ///< for two Q tiles
  constexpr int tile_index_barriers() const { return ds_added_barriers() + 2; }
  /// In a cluster: the other CTA's dS, for two Q tiles, and what it has read; or its S and dP, for two
  /// warpgroups; or all CTAs' partial dQ, for kDqSlots Q tiles and two warpgroups, and the row stats.
  constexpr int exchange_barriers() const {
    return tile_index_barriers() + (cluster() > 1 ? kKeptTileIndices : 0);
  }
  constexpr int barrier_count() const {
    return exchange_barriers() + (other_ds_over_p()                    ? 4
                                  : exchanges_ds() || splits_columns() ? 2
                                  : sums_dq()                          ? kDqSlots * 2 + 1
                                                                       : 0);
  }

 private:
  constexpr int smem_columns(int dim) const {
    return splits_columns() ? slices(dim) * kSliceColumns : backward_columns(dim);
  }
  /// Whether dQ lies over a stage's columns that warpgroups share: where each has some that it alone reads.
  /// Where CTAs split columns, only if there is no other room.
  constexpr bool is_under_dq(int columns) const {
    constexpr int kOthers = 3072;  // behind dQ
    const bool fits = splits_columns() && dq() + cta_dim() * kWarpgroupRows * 4 + kOthers <= kSharedLimit;
    const int first = first_wg_columns(columns);
    return wide() && first >= kSliceColumns && wg_columns(columns) == first && !fits;
  }
};

}  // namespace flashjit::sm90
