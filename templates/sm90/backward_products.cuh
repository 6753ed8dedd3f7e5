// The products of the backward pass.
#pragma once

#include "flashjit/sm90/backward_smem.cuh"

namespace flashjit::sm90 {

/// Starts S^T or dP^T, which `multiply` begins anew.
template <int kCount>
__device__ __forceinline__ void start_transposed(float (&c)[kCount], auto multiply) {
  pin(c);
  multiply_fence();
  multiply();
  multiply_commit();
  pin(c);
}

/// Gives dS of Q tile i to the other block of the cluster: by one thread of the first group. The other has
/// read what that overwrites, since it has written dS of the tile before.
template <class P>
__device__ __forceinline__ void give_ds(const BackwardTile<P>& tile, unsigned i, int group) {
  if (group != 0 || threadIdx.x / 32 % 4 != 0 || !elected()) return;
  const int other = 1 - tile.rank();
  barrier_expect(tile.other_ds_full(i), BackwardTile<P>::kDsBytes);
  copy_remote(in_block(tile.other_ds(i), other), tile.ds(i), BackwardTile<P>::kDsBytes,
              in_block(tile.other_ds_full(i), other));
}

/// Starts S^T of Q tile i, whose descriptor is known.
template <class P, int kCount>
__device__ __forceinline__ void start_scores(const BackwardTile<P>& tile, int group, unsigned long long q,
                                             float (&s)[kCount]) {
  const unsigned long long k = tile_descriptor(tile.k() + BackwardTile<P>::first_row(group) * kRowBytes, 0);
  start_transposed(s, [&] { P::multiply_scores(s, k, q, 0); });
}

/// Starts a group's part of dQ of Q tile i.
template <class P>
__device__ __forceinline__ void start_dq(const BackwardTile<P>& tile, unsigned i, int group,
                                         float (&dq)[BackwardTile<P>::kDqColumns / 2]) {
  using Tile = BackwardTile<P>;
  const int first_column = tile.first_dq_column(group);
  const auto multiply_keys = [&](unsigned ds, unsigned k, int column, bool add) {
    const unsigned long long left = tile_descriptor(ds, Tile::kKvSlice);
    const unsigned long long right = tile_descriptor(Tile::column(k, column, Tile::kKvSlice), Tile::kKvSlice);
    P::multiply_dq(dq, left, right, add);
  };
  pin(dq);
  multiply_fence();
  multiply_keys(tile.ds(i) + (Tile::kSplitRows ? group * Tile::kKvSlice : 0), tile.k(), first_column, false);
  if constexpr (Tile::kExchangesDs) {
    const int first_loaded = tile.first_other_column() / kSliceColumns * kSliceColumns;
    multiply_keys(tile.other_ds(i), tile.other_k(), first_column - first_loaded, true);
  }
  multiply_commit();
  pin(dq);
}

/// Starts a group's part of dV and then of dK of Q tile i.
template <class P>
__device__ __forceinline__ void start_gradients(
    const BackwardTile<P>& tile, unsigned i, int group,
    const unsigned (&probability)[BackwardTile<P>::kQueries / 16][4],
    const unsigned (&gradient)[BackwardTile<P>::kQueries / 16][4], float (&dk)[BackwardTile<P>::kOwnDim / 2],
    float (&dv)[BackwardTile<P>::kOwnDimV / 2]) {
  using Tile = BackwardTile<P>;
  const auto own_columns = [&](unsigned at, int columns) {
    return tile_descriptor(Tile::column(at, Tile::kWide ? group * columns : 0, Tile::kQSlice), Tile::kQSlice);
  };
  const unsigned long long dout = own_columns(tile.dout(i % Tile::kDoutStages), Tile::kOwnDimV);
  const unsigned long long q = own_columns(tile.q(i % P::kStages), Tile::kOwnDim);
  pin(dv);
  pin(dk);
  multiply_fence();
  if constexpr (Tile::kWide) {
    // The summed queries are the columns of P^T and dS^T.
    const unsigned long long p_tile = tile_descriptor(tile.p(i), 0), ds_tile = tile_descriptor(tile.ds(i), 0);
    P::multiply_dv(dv, p_tile, dout, 1);
    multiply_commit();
    P::multiply_dk(dk, ds_tile, q, 1);
  } else {
    P::multiply_dv(dv, probability, dout, 1);
    multiply_commit();
    P::multiply_dk(dk, gradient, q, 1);
  }
  multiply_commit();
}

}  // namespace flashjit::sm90
