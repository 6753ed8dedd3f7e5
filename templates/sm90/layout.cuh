// Shared memory of the sm90 family, written once. Host and device include this file: the host prunes with it
// and builds the tensor maps, the kernels address with it.
#pragma once

namespace flashjit::sm90 {

/// Tiles lie in shared memory as slices of 64 columns: [slice][row][64], each row 128 bytes, swizzled by the
/// TMA unit in groups of eight rows. Columns past the head dimension are zeros.
constexpr int kSliceColumns = 64;
constexpr int kRowBytes = 128;
constexpr int kAlignment = 1024;  ///< of every slice: the period of the swizzle

constexpr int slices(int columns) { return (columns + kSliceColumns - 1) / kSliceColumns; }
constexpr int tile_bytes(int rows, int columns) { return slices(columns) * rows * kRowBytes; }

constexpr int kSharedLimit = 232448;  ///< bytes of shared memory that a block of sm_90 can have

constexpr int kGroupRows = 64;  ///< of Q, in a warp group's part of O or dQ
constexpr int kWarpRows = 16;   ///< of those, a warp's

/// Registers that a thread starts with, where a multiprocessor has `blocks` blocks of `groups` warp groups
/// that compute and one that loads. Then that one gives most of its to the others: so many in the forward
/// pass.
constexpr int launch_registers(int groups, int blocks) {
  return 65536 / ((groups + 1) * 128 * blocks) / 8 * 8;
}
constexpr int producer_registers(int groups, int blocks) {
  return blocks > 1 || groups > 2 ? 32 : groups == 2 ? 40 : 56;
}
constexpr int consumer_registers(int groups, int blocks) {
  const int all = launch_registers(groups, blocks) * (groups + 1) - producer_registers(groups, blocks);
  return all / groups < 240 ? all / groups / 8 * 8 : 240;
}

/// Whether a product of the forward pass is one asm statement of all its steps of 16 columns, which compiles
/// sooner by 8% and more, or one a step: ptxas orders fewer columns otherwise then, and up to 3% slower.
constexpr bool has_whole_products(int head_dim_v) { return head_dim_v > 128; }

/// In how many pieces the `over` Q tiles of the forward pass's last round are cut, of up to as many as they
/// have warp groups, so that all `slots` begin at once what is left.
constexpr unsigned tail_pieces(unsigned groups, unsigned over, unsigned slots) {
  unsigned pieces = groups;
  while (over * pieces > slots) --pieces;
  return pieces;
}

constexpr int kWorkBytes = 64;  ///< of what the warp groups of the forward pass know of a Q tile
/// Tiles of which that is kept. Five would do: while one is ended, two more have begun or wait in shared
/// memory, a third waits for their room, and the fourth is looked for.
constexpr int kKeptWorks = 8;

/// One or two tiles of Q, of which each warp group's 64 rows lie together, then `stages` tiles of K, then of
/// V, then of a captured plane where the score reads one, then O where it fits, then what the score reads of
/// the keys of `stages` tiles, then what is known of Q tiles and, where they are listed, of those tiles of
/// keys, then the barriers: all that for each of the Q tiles that a block computes at a time.
struct ForwardLayout {
  int br, bc, head_dim, head_dim_v, stages;
  bool reads_plane, key_values, lists;
  int teams;

  constexpr int groups() const { return br / kGroupRows; }
  /// Two where they fit: then the next tile is there before it is needed.
  constexpr int q_stages() const { return bytes_of(2) <= limit() ? 2 : 1; }
  constexpr int q() const { return 0; }
  constexpr int k() const { return q_stages() * q_bytes(); }
  constexpr int v() const { return k() + stages * tile_bytes(bc, head_dim); }
  constexpr int plane() const { return v() + stages * tile_bytes(bc, head_dim_v); }
  constexpr int plane_bytes() const { return reads_plane ? tile_bytes(br, bc) : 0; }
  constexpr int o() const { return plane() + stages * plane_bytes(); }
  /// Where it fits O leaves from there: then the threads that compute need not store it.
  constexpr bool stages_output() const { return bytes_of(q_stages()) + o_bytes() <= limit(); }
  constexpr int values() const { return o() + (stages_output() ? o_bytes() : 0); }
  constexpr int values_bytes() const { return key_values ? bc * 4 : 0; }
  constexpr int work() const { return values() + stages * values_bytes(); }
  constexpr int entries() const { return work() + kKeptWorks * kWorkBytes; }
  constexpr int barriers() const { return entries() + entries_bytes(); }
  constexpr int team_bytes() const {
    const int used = bytes_of(q_stages()) + (stages_output() ? o_bytes() : 0);
    return teams == 1 ? used : (used + kAlignment - 1) / kAlignment * kAlignment;
  }
  constexpr int bytes() const { return teams * team_bytes(); }

 private:
  constexpr int limit() const { return kSharedLimit / teams / kAlignment * kAlignment; }
  constexpr int entries_bytes() const { return lists ? (stages + 1) / 2 * 8 : 0; }
  constexpr int q_bytes() const { return groups() * tile_bytes(kGroupRows, head_dim); }
  constexpr int o_bytes() const { return groups() * tile_bytes(kGroupRows, head_dim_v); }
  /// Two for each stage: that what the score reads of its tile is there, and has been read.
  constexpr int score_barriers() const { return reads_plane || key_values ? 2 : 0; }
  /// Without O, with two barriers for each group's Q, four for each stage beside those, and one for each
  /// piece of work.
  constexpr int bytes_of(int q_count) const {
    return q_count * q_bytes() +
           stages * (tile_bytes(bc, head_dim) + tile_bytes(bc, head_dim_v) + plane_bytes() + values_bytes()) +
           kKeptWorks * kWorkBytes + entries_bytes() +
           (2 * groups() * q_count + (4 + score_barriers()) * stages + kKeptWorks) * 8;
  }
};

/// Of the backward pass, what the producer says of a KV tile, and of a Q tile.
constexpr int kKvTileInfoBytes = 32, kQTileInfoBytes = 32;
/// KV tiles whose info is kept. When the producer takes the next KV tile it has loaded K and V of the last
/// one, so the consumers are done with the one before, but that one's dQ may still be on its way.
constexpr int kKeptKvTiles = 4;
/// Where blocks sum up dQ, dQ of three more may be.
constexpr int kKeptKvTilesOfSums = 8;
/// Q tiles whose info is kept: those in the stages, at most four, and the two before, whose dQ may still be
/// on its way.
constexpr int kKeptQTiles = 8;
/// KV tile indices that the first block of a cluster may send before the other blocks have read the first
/// one. Two more than there are stages would do.
constexpr int kKeptTileIndices = 8;

constexpr int kZerosBytes = 16;  ///< in place of a row of eight elements where there is none

/// Columns that the backward pass computes with: whole slices, and an even number of them where two warp
/// groups share them.
constexpr int backward_columns(int columns) {
  return (slices(columns) > 2 ? 4 : slices(columns)) * kSliceColumns;
}
/// Above 128 columns the registers of one warp group do not hold its rows of dK and dV: then both groups
/// share 64 rows, and each has half of the columns.
constexpr bool is_wide(int head_dim, int head_dim_v) {
  return slices(head_dim) > 2 || slices(head_dim_v) > 2;
}

constexpr int kMostKeys = 128;  ///< of a block of the backward pass

/// Blocks of a cluster, which share a KV tile of the backward pass: wide, two share one of 128 keys; else
/// larger tiles are of one block for every 128 keys.
constexpr int cluster_blocks(int bc, int head_dim, int head_dim_v) {
  if (is_wide(head_dim, head_dim_v)) return bc == kMostKeys ? 2 : 1;
  return bc > kMostKeys ? bc / kMostKeys : 1;
}
/// Q tiles for whose parts of dQ there is room, where blocks sum it up.
constexpr int kDqSlots = 2;

/// Shared memory of a block of the backward pass, in this order:
///
///   K, V           the block's keys of the KV tile
///   other K        half of the columns of the other block's keys, where blocks exchange dS
///   Q              `stages`
///   dO             `stages`; one where blocks exchange dS
///   dS             two; and where blocks exchange dS two of the other block's
///   P              two where both warp groups have the same keys ("wide")
///   bias tile      `stages`, where the score reads one
///   dQ             of each warp group what does not lie over dO and Q; where blocks sum up dQ, all blocks'
///                  parts of the columns that this block sums up, of two Q tiles
///   LSE, D         `stages` of a Q tile's rows; and the score's row term
///   Q tiles, KV tiles, zeros, tile indices, barriers
///
/// The one overlap: wide, a warp group's dQ of Q tile i lies over the columns of dO and Q of the same stage
/// that this warp group alone reads, on its way to global memory, and only then is the stage released.
struct BackwardLayout {
  int br, bc, head_dim, head_dim_v, stages;
  bool reads_bias_tile, row_terms;

  /// Also for KV tiles of 64 keys: for short sequences, so that there is one for each multiprocessor.
  constexpr bool wide() const { return is_wide(head_dim, head_dim_v) || bc == 64; }
  constexpr int cluster() const { return cluster_blocks(bc, head_dim, head_dim_v); }
  // What the blocks of a cluster do for dQ: each computes some of its columns, from the dS of both; or all
  // columns from its own keys, and sums up some columns of what all blocks have.
  constexpr bool exchanges_ds() const { return cluster() > 1 && wide(); }
  constexpr bool sums_dq() const { return cluster() > 1 && !wide(); }
  constexpr int keys() const { return bc / cluster(); }
  constexpr int dout_stages() const { return exchanges_ds() ? 1 : stages; }
  constexpr int columns() const { return backward_columns(head_dim); }
  constexpr int columns_v() const { return backward_columns(head_dim_v); }

  constexpr int k() const { return 0; }
  constexpr int v() const { return tile_bytes(keys(), columns()); }
  constexpr int other_k() const { return v() + tile_bytes(keys(), columns_v()); }
  constexpr int q() const { return other_k() + (exchanges_ds() ? tile_bytes(keys(), columns() / 2) : 0); }
  constexpr int dout() const { return q() + stages * tile_bytes(br, columns()); }
  constexpr int ds() const { return dout() + dout_stages() * tile_bytes(br, columns_v()); }
  constexpr int other_ds() const { return ds() + 2 * tile_bytes(keys(), br); }
  constexpr int p() const { return ds() + (exchanges_ds() ? 2 : 1) * 2 * tile_bytes(keys(), br); }
  constexpr int bias_tile() const { return p() + (wide() ? 2 * tile_bytes(keys(), br) : 0); }
  /// Above 128 columns there is no room: there the score is read element by element.
  constexpr bool has_bias_tile() const { return reads_bias_tile && !is_wide(head_dim, head_dim_v); }
  constexpr int bias_tile_bytes() const { return has_bias_tile() ? tile_bytes(br, keys()) : 0; }
  constexpr int dq() const { return bias_tile() + stages * bias_tile_bytes(); }
  /// Columns of dQ that a warp group computes: all, of 64 rows, where there are 128 rows, else some of all
  /// rows.
  constexpr int dq_columns() const { return br == 128 ? columns() : columns() / (exchanges_ds() ? 4 : 2); }
  // Bytes of a warp group's dQ that lie over Q and over dO, and of the rest, all in fp32.
  constexpr int dq_within_q() const {
    return wide() && columns() >= 2 * kSliceColumns ? columns() / 2 * br * 2 : 0;
  }
  constexpr int dq_within_dout() const {
    return wide() && !exchanges_ds() && columns_v() >= 2 * kSliceColumns ? columns_v() / 2 * br * 2 : 0;
  }
  constexpr int dq_bytes() const {
    const int rest = dq_columns() * kGroupRows * 4 - dq_within_q() - dq_within_dout();
    return rest > 0 ? rest : 0;
  }
  constexpr int lse() const { return dq() + (sums_dq() ? kDqSlots : 1) * 2 * dq_bytes(); }
  constexpr int d() const { return lse() + stages * br * 4; }
  constexpr int values() const { return d() + stages * br * 4; }
  constexpr int q_tiles() const { return values() + (row_terms ? stages * br * 4 : 0); }
  constexpr int kv_tiles() const { return q_tiles() + kKeptQTiles * kQTileInfoBytes; }
  constexpr int kept_kv_tiles() const { return sums_dq() ? kKeptKvTilesOfSums : kKeptKvTiles; }
  constexpr int zeros() const { return kv_tiles() + kept_kv_tiles() * kKvTileInfoBytes; }
  constexpr int tile_indices() const { return zeros() + kZerosBytes; }
  constexpr int barriers() const { return tile_indices() + (cluster() > 1 ? kKeptTileIndices * 4 : 0); }
  constexpr int bytes() const { return barriers() + barrier_count() * 8; }

  // The number of the first barrier of each kind.
  constexpr int stage_barriers(int stage) const { return 4 * stage; }  ///< Q full, Q empty, dO full, dO empty
  constexpr int ds_barriers() const { return 4 * stages; }             ///< for two Q tiles
  constexpr int dq_barriers() const { return ds_barriers() + 2; }      ///< full and empty, of two warp groups
  constexpr int kv_barrier() const { return dq_barriers() + 4; }
  constexpr int ds_added_barriers() const { return kv_barrier() + 1; }  ///< for two Q tiles
  constexpr int tile_index_barriers() const { return ds_added_barriers() + 2; }
  /// In a cluster: the other block's dS, for two Q tiles; or all blocks' dQ, for kDqSlots Q tiles and two
  /// warp groups.
  constexpr int exchange_barriers() const {
    return tile_index_barriers() + (cluster() > 1 ? kKeptTileIndices : 0);
  }
  constexpr int barrier_count() const {
    return exchange_barriers() + (exchanges_ds() ? 2 : sums_dq() ? kDqSlots * 2 : 0);
  }
};

}  // namespace flashjit::sm90
