// What becomes of a warpgroup's scores in the forward pass, and of its rows at the end; RowWeights<P> names
// one of these types: the online softmax, or a program whose values are P (kWeightMod).
#pragma once

#include "flashjit/sm90/forward_epilogue.cuh"
#include "flashjit/sm90/forward_mask.cuh"
#include "flashjit/sm90/forward_softmax.cuh"

namespace flashjit::sm90 {

template <class P>
struct SoftmaxWeights {
  /// S becomes P = exp2(S - m), and `rescale` what O so far must be multiplied by.
  template <int kCount>
  static __device__ __forceinline__ void weigh(const Params& p, const WorkTile<P>& work, RowState<P>& rows,
                                               int kv_begin, bool full, bool first, float (&s)[kCount],
                                               float (&rescale)[2]) {
    online_softmax<ScoreMask<P>>(p, work, rows, kv_begin, full, first, s, rescale);
  }
  /// A value that is there when all of P is, and not negative.
  template <int kCount>
  static __device__ __forceinline__ float last_value(const RowState<P>& rows, const float (&)[kCount]) {
    return rows.sum[0] + rows.sum[1];
  }
  template <int kCount>
  static __device__ __forceinline__ void rescale(float (&o)[kCount], const float (&rescale)[2]) {
    rescale_o<P>(o, rescale);
  }
  /// LSE, and what O must be multiplied by, 1 / l.
  static __device__ __forceinline__ void finalize(const Params& p, const WorkTile<P>& work,
                                                  const RowState<P>& rows, int wg, float (&scale)[2],
                                                  RunningState<P>& state) {
    finalize_rows(p, work, rows, wg, scale, state);
  }
};

/// S is P already: rows have no maximum, no sum and no LSE.
template <class P>
struct ProgramWeights {
  static_assert(!P::kSplit && !P::kStreamK && !kLoadsCodes<P> && !P::kDropout);

  template <int kCount>
  static __device__ __forceinline__ void weigh(const Params& p, const WorkTile<P>& work, RowState<P>& rows,
                                               int kv_begin, bool full, bool, float (&s)[kCount],
                                               float (&)[2]) {
    if (!full) ScoreMask<P>::apply(p, work, rows, kv_begin, s);
    pin(s);  // else ptxas serialises products, as P is packed on both sides of the branch
  }
  template <int kCount>
  static __device__ __forceinline__ float last_value(const RowState<P>&, const float (&s)[kCount]) {
    return fabsf(s[kCount - 1]);
  }
  template <int kCount>
  static __device__ __forceinline__ void rescale(float (&)[kCount], const float (&)[2]) {}
  static __device__ __forceinline__ void finalize(const Params&, const WorkTile<P>&, const RowState<P>&, int,
                                                  float (&scale)[2], RunningState<P>&) {
    scale[0] = scale[1] = 1.0f;
  }
};

template <class P>
using RowWeights = Conditional<P::kWeightMod, ProgramWeights<P>, SoftmaxWeights<P>>;

}  // namespace flashjit::sm90
