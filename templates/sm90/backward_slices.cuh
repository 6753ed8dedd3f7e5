// How a warpgroup has the columns of dK and dQ: in whole slices of 64 that lie together, or also a part of a
// fifth slice (K above 256 columns, in a cluster). ColumnSlices<P> names one of two types.
#pragma once

#include "flashjit/sm90/backward_rings.cuh"

namespace flashjit::sm90 {

/// kCount of a thread's accumulators, from kFirst on.
template <int kFirst, int kCount, int kAll>
__device__ __forceinline__ auto part_of(float (&c)[kAll]) -> float (&)[kCount] {
  static_assert(kFirst + kCount <= kAll);
  return reinterpret_cast<float(&)[kCount]>(c[kFirst]);
}

template <class P>
struct WholeSlices {
  using Smem = BackwardSmem<P>;

  /// dK += dS^T Q, of Q in `stage`.
  template <int kAll>
  static __device__ __forceinline__ void multiply_dk(const Smem&, int, int, float (&dk)[kAll],
                                                     unsigned long long ds, unsigned long long q) {
    P::multiply_dk(dk, ds, q, 1);
  }
  /// dQ = dS K, or added, of the keys whose K lies at `k`.
  template <int kAll>
  static __device__ __forceinline__ void multiply_dq(const Smem&, unsigned, int, float (&dq)[kAll],
                                                     unsigned long long ds, unsigned long long k_columns,
                                                     bool add) {
    P::multiply_dq(dq, ds, k_columns, add);
  }
  /// Adds what add_dq() has not added of Q tile i.
  static __device__ __forceinline__ void add_fifth(const Params&, const Smem&, const QTileInfo&, unsigned,
                                                   int) {}
  /// Stores dK by store_gradient() of backward_epilogue.cuh.
  template <int kAll>
  static __device__ __forceinline__ void store_dk(const Params& p, const Smem& smem, unsigned i, int wg,
                                                  float (&dk)[kAll]) {
    store_gradient(p, smem, i, wg, dk, P::kHeadDim, BackwardPolicy<P>::kFirstDim, p.softmax_scale, p.dk,
                   p.dk_splits);
  }
};

template <class P>
struct WithFifthSlice {
  using Policy = BackwardPolicy<P>;
  using Smem = BackwardSmem<P>;
  static constexpr int kDkSlices = Policy::kWgSlices / 2, kFifthOfDk = Policy::kFifthSlice / 4;
  static constexpr int kDqSlices = Policy::kDqSlices / 2, kFifthOfDq = Policy::kFifthSlice / 8;

  template <int kAll>
  static __device__ __forceinline__ void multiply_dk(const Smem& smem, int stage, int wg, float (&dk)[kAll],
                                                     unsigned long long ds, unsigned long long q) {
    const unsigned fifth = Smem::column(smem.q(stage), Policy::fifth_dk_column(wg), Smem::kQSlice);
    P::multiply_dk(part_of<0, kDkSlices>(dk), ds, q, 1);
    P::multiply_fifth_dk(part_of<kDkSlices, kFifthOfDk>(dk), ds, tile_descriptor(fifth, Smem::kQSlice), 1);
  }
  template <int kAll>
  static __device__ __forceinline__ void multiply_dq(const Smem& smem, unsigned k, int wg, float (&dq)[kAll],
                                                     unsigned long long ds, unsigned long long k_columns,
                                                     bool add) {
    // The other CTA's K lies there without half of its whole slices.
    const int fifth = Policy::fifth_dq_column(wg) - (k == smem.k() ? 0 : kMostCtaColumns / 2);
    P::multiply_dq(part_of<0, kDqSlices>(dq), ds, k_columns, add);
    P::multiply_fifth_dq(part_of<kDqSlices, kFifthOfDq>(dq), ds,
                         tile_descriptor(Smem::column(k, fifth, Smem::kKvSlice), Smem::kKvSlice), add);
  }
  static __device__ __forceinline__ void add_fifth(const Params& p, const Smem& smem, const QTileInfo& now,
                                                   unsigned i, int wg) {
    constexpr int kColumns = dq_columns(P::kHeadDim);
    const int column = Policy::fifth_dq_column(wg);
    if (const int columns = min(kColumns - column, Policy::kFifthSlice / 4); columns > 0)
      add_line(p.dq_accum + now.stats_row * kColumns + column / 8 * kDqStep,
               smem.dq(wg, i % P::kStages, Policy::kDqSlices / 8), columns / 8 * kDqStepBytes);
  }
  template <int kAll>
  static __device__ __forceinline__ void store_dk(const Params& p, const Smem& smem, unsigned i, int wg,
                                                  float (&dk)[kAll]) {
    store_gradient(p, smem, i, wg, part_of<0, kDkSlices>(dk), P::kHeadDim, 0, p.softmax_scale, p.dk,
                   p.dk_splits);
    store_gradient(p, smem, i, wg, part_of<kDkSlices, kFifthOfDk>(dk), P::kHeadDim, 0, p.softmax_scale, p.dk,
                   p.dk_splits, kMostCtaColumns);
  }
};
template <class P>
using ColumnSlices = Conditional<(BackwardPolicy<P>::kFifthSlice > 0), WithFifthSlice<P>, WholeSlices<P>>;

}  // namespace flashjit::sm90
