// What becomes of a warp's scores in the forward pass, and of its rows at the end; RowWeights<P> names one of
// these types: the online softmax, or a program whose values are P (kWeightMod).
#pragma once

#include "flashjit/sm80/forward_lse.cuh"
#include "flashjit/sm80/shared_rows.cuh"

namespace flashjit::sm80 {

template <class P>
struct SoftmaxRows : RowMax<P> {
  /// P = exp2(S - m) of n8 tiles from `first` on; returns the last.
  static __device__ __forceinline__ float weigh(ForwardScores<P>& s, RowValues<P>& row_sum,
                                                const RowValues<P>& row_max, const RowValues<P>& shift,
                                                float scale_log2, int first) {
    return exponentials<P>(s, row_sum, row_max, shift, scale_log2, first);
  }
  template <class WarpRow>
  static __device__ __forceinline__ void share(RowValues<P>& row_sum, const ForwardSmem<P>& smem,
                                               const WarpRow& warp_row) {
    if constexpr (ForwardPolicy<P>::kSharesRows) share_sum<P>(row_sum, smem, warp_row);
  }
  /// The factor for a row of O, O = O / rowsum(P).
  static __device__ __forceinline__ float scale(const Params& p, const RowEnd& end, float max, float sum,
                                                float scale_log2, float v_scale) {
    return scale_of_row<P>(p, end, max, sum, scale_log2, v_scale);
  }
};

/// S is P already: rows have no maximum and no sum, and their LSE, which has no memory, stays -inf.
template <class P>
struct ProgramRows {
  static_assert(P::kHasScore && !P::kSplit && !ForwardPolicy<P>::kCodeProducts);

  template <class WarpRow>
  static __device__ __forceinline__ bool update(RowValues<P>&, RowValues<P>&, RowValues<P>&, RowValues<P>&,
                                                float, const ForwardScores<P>&, const ForwardSmem<P>&,
                                                const WarpRow&) {
    return true;
  }
  /// Not the last weight, which add_pv() would want not to be negative.
  static __device__ __forceinline__ float weigh(ForwardScores<P>&, RowValues<P>&, const RowValues<P>&,
                                                const RowValues<P>&, float, int) {
    return 0.0f;
  }
  template <class WarpRow>
  static __device__ __forceinline__ void share(RowValues<P>&, const ForwardSmem<P>&, const WarpRow&) {}
  static __device__ __forceinline__ float scale(const Params&, const RowEnd&, float, float, float,
                                                float v_scale) {
    return v_scale;
  }
};

template <class P>
using RowWeights = Conditional<P::kWeightMod, ProgramRows<P>, SoftmaxRows<P>>;

}  // namespace flashjit::sm80
