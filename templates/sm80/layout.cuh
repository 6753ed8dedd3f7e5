// Shared memory of family sm80. Host and device include this file: the host prunes by it, the kernels find
// addresses by it.
#pragma once

namespace flashjit::sm80 {

constexpr int round_up(int value, int unit) { return (value + unit - 1) / unit * unit; }
constexpr int larger(int a, int b) { return a > b ? a : b; }

/// Elements from one row of a tile to the next: an odd number of 16-byte chunks, so that the eight rows of an
/// ldmatrix phase fall into different banks without a swizzle, and every offset is an immediate.
constexpr int pitch(int columns) { return round_up(columns, 16) + 8; }
constexpr int kStagedTileBytes = 16;  ///< common/tile_walk.cuh
constexpr int tile_bytes(int rows, int columns) { return rows * pitch(columns) * 2; }

/// n8 tiles of a matrix product's columns that one of `warps` warps computes where they share them: an equal
/// part, or where there are fewer tiles than warps one tile each, which several then compute.
constexpr int score_parts(int columns, int warps) {
  return larger(1, columns / 8 < warps ? columns / 8 : warps);
}
/// n16 units of `columns` columns that one of `warps` warps has; the last may have fewer.
constexpr int units_of(int columns, int warps) { return (round_up(columns, 16) / 16 + warps - 1) / warps; }

/// Whether the products of Q and K and of P and V multiply codes of 8 bits, on GPUs of `capability`, which
/// Hopper does with wgmma alone. Elsewhere, and where keys have their own scales, codes become 16 bits.
constexpr bool multiplies_codes(bool q_codes, bool key_scales, int capability) {
  return q_codes && !key_scales && (capability == 89 || capability >= 100);
}

/// Registers of a thread for its `m_tiles` times 16 rows in the forward pass: S and O, P as 16 bits if it is
/// kept beside the next S, and Q if it stays there.
constexpr int forward_registers(int m_tiles, int bc, int head_dim, int head_dim_v, bool q_in_registers,
                                bool keep_p) {
  return m_tiles * (bc / 2 + round_up(head_dim_v, 16) / 2 + (keep_p ? bc / 4 : 0) +
                    (q_in_registers ? round_up(head_dim, 16) / 4 : 0));
}
/// Q (and at the end O), then `stages` tiles of K, then of V, and where keys have scales of their own theirs.
/// With d_split also P, and of each warp that shares its rows a value of each of them. A tile of codes is one
/// of half as many columns of two.
struct ForwardLayout {
  int br, bc, head_dim, head_dim_v, stages;
  int kv_bytes;  ///< of an element of K and V
  bool key_scales;
  int d_split;
  bool shared_kv;  ///< V is K's tile

  constexpr int k_tile() const { return tile_bytes(bc, head_dim * kv_bytes / 2); }
  constexpr int v_tile() const { return shared_kv ? 0 : tile_bytes(bc, head_dim_v * kv_bytes / 2); }
  constexpr int scales() const { return key_scales ? bc * 4 : 0; }  ///< of a tile

  constexpr int q() const { return 0; }
  constexpr int k() const { return tile_bytes(br, larger(head_dim, head_dim_v)); }
  constexpr int v() const { return k() + stages * k_tile(); }
  constexpr int k_scales() const { return v() + stages * v_tile(); }
  constexpr int v_scales() const { return k_scales() + stages * scales(); }
  constexpr int p() const { return v_scales() + stages * scales(); }
  constexpr int row_values() const { return p() + (d_split > 1 ? tile_bytes(br, bc) : 0); }
  constexpr int bytes() const { return row_values() + (d_split > 1 ? d_split * br * 4 : 0); }
};

/// Q and its tangent (and at the end O and its), K and its tangent, V and its tangent, one stage each.
struct JvpLayout {
  int br, bc, head_dim, head_dim_v;

  constexpr int q_tile() const { return tile_bytes(br, larger(head_dim, head_dim_v)); }
  constexpr int q() const { return 0; }
  constexpr int k() const { return 2 * q_tile(); }
  constexpr int v() const { return k() + 2 * tile_bytes(bc, head_dim); }
  constexpr int bytes() const { return v() + 2 * tile_bytes(bc, head_dim_v); }
};
/// Q and dO and their tangents, and as many rows of K and V and theirs.
struct BackwardJvpLayout {
  int rows, head_dim, head_dim_v;

  constexpr int side() const { return 2 * (tile_bytes(rows, head_dim) + tile_bytes(rows, head_dim_v)); }
  constexpr int bytes() const { return 2 * side(); }
};
/// Columns of V that a warp's registers have room for, of O and of its tangent.
constexpr int kMostJvpColumns = 128;

/// Above so many columns the backward pass is another: warps that share rows share dK's and dV's columns.
constexpr int kMostNarrowColumns = 256;
constexpr bool is_wide(int head_dim, int head_dim_v) {
  return larger(head_dim, head_dim_v) > kMostNarrowColumns;
}

/// K (and at the end dK), V (and at the end dV), `stages` tiles of Q and of dO with their rows' LSE and D,
/// one or two of dS, and `exchanged` fp32 values of every pair that one warp of two hands to the other; wide,
/// and with lists of keys, two tiles instead, of dS and of P.
struct BackwardLayout {
  int br, bc, head_dim, head_dim_v, stages, exchanged;
  bool indices;   ///< a tile of Q is heads of one query, and tiles of K and V are streamed
  int terms = 1;  ///< of dS: two_terms.cuh

  constexpr int k() const { return 0; }
  constexpr int v() const { return tile_bytes(bc, head_dim); }
  constexpr int q() const { return v() + tile_bytes(bc, head_dim_v); }
  constexpr int dout() const { return q() + stages * tile_bytes(br, head_dim); }
  constexpr int ds() const { return dout() + stages * tile_bytes(br, head_dim_v); }
  constexpr bool wide() const { return is_wide(head_dim, head_dim_v) || indices; }
  constexpr int p() const { return ds() + tile_bytes(bc, br); }  // wide
  constexpr int lse() const { return ds() + (stages > 1 || wide() ? 2 : 1) * terms * tile_bytes(bc, br); }
  constexpr int d() const { return lse() + stages * br * 4; }
  constexpr int staged() const { return d() + stages * br * 4; }
  constexpr int exchange() const { return staged() + stages * kStagedTileBytes; }
  constexpr int bytes() const { return exchange() + exchanged * br * bc * 4; }
};

}  // namespace flashjit::sm80
