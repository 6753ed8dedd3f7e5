// Shared memory of the sm90 family, written once: the host includes it to prune and to build the tensor maps,
// the kernel to address.
#pragma once

namespace flashjit::sm90 {

/// Tiles lie in shared memory as slices of 64 columns: [slice][row][64], each row 128 bytes, swizzled by the
/// TMA unit in groups of eight rows. Columns past the head dimension are zeros.
constexpr int kSliceColumns = 64;
constexpr int kRowBytes = 128;
constexpr int kAlignment = 1024;  ///< of every slice: the period of the swizzle

constexpr int slices(int columns) { return (columns + kSliceColumns - 1) / kSliceColumns; }
constexpr int tile_bytes(int rows, int columns) { return slices(columns) * rows * kRowBytes; }

/// Q (and at the end O), then `stages` tiles of K, then of V, then the barriers.
struct ForwardLayout {
  int br, bc, head_dim, head_dim_v, stages;

  constexpr int q() const { return 0; }
  constexpr int k() const { return tile_bytes(br, head_dim > head_dim_v ? head_dim : head_dim_v); }
  constexpr int v() const { return k() + stages * tile_bytes(bc, head_dim); }
  constexpr int barriers() const { return v() + stages * tile_bytes(bc, head_dim_v); }
  /// One barrier for Q and four for each stage.
  constexpr int bytes() const { return barriers() + (1 + 4 * stages) * 8; }
};

constexpr int kPlaceBytes = 32;  ///< of what a block of the backward pass knows of its work

/// K (and at the end dK), V (and at the end dV), `stages` tiles of Q and of dO with their rows' LSE and D,
/// two tiles of dS, one of dQ in fp32, what each stage holds, the tile's place and the barriers.
struct BackwardLayout {
  int br, bc, head_dim, head_dim_v, stages;

  constexpr int k() const { return 0; }
  constexpr int v() const { return tile_bytes(bc, head_dim); }
  constexpr int q() const { return v() + tile_bytes(bc, head_dim_v); }
  constexpr int dout() const { return q() + stages * tile_bytes(br, head_dim); }
  constexpr int ds() const { return dout() + stages * tile_bytes(br, head_dim_v); }
  constexpr int dq() const { return ds() + 2 * tile_bytes(bc, br); }
  constexpr int lse() const { return dq() + br * slices(head_dim) * kSliceColumns * 4; }
  constexpr int d() const { return lse() + stages * br * 4; }
  constexpr int staged() const { return d() + stages * br * 4; }
  constexpr int place() const { return staged() + stages * 16; }
  constexpr int barriers() const { return place() + kPlaceBytes; }
  /// One barrier for K and V and four for each stage.
  constexpr int bytes() const { return barriers() + (1 + 4 * stages) * 8; }
};

}  // namespace flashjit::sm90
