// What becomes of a warpgroup's scores in the forward pass, and of its rows at the end; RowWeights<P> names
// one of these types: the online softmax, or a program whose values are P (kWeightMod).
#pragma once

#include "flashjit/common/sigmoids.cuh"
#include "flashjit/sm90/forward_epilogue.cuh"
#include "flashjit/sm90/forward_mask.cuh"
#include "flashjit/sm90/forward_softmax.cuh"

namespace flashjit::sm90 {

template <class P>
struct SoftmaxWeights {
  template <int kCount>
  static __device__ __forceinline__ void wait_before(float (&)[kCount]) {}
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

  /// Without overlap P V ends first, so that P is packed as it is made. ptxas moves the wait there by itself
  /// where a softmax follows, but not over the branch of a mask.
  template <int kCount>
  static __device__ __forceinline__ void wait_before(float (&o)[kCount]) {
    if (kIntraWarpgroupOverlap<P>) return;
    wgmma_wait<0>();
    pin(o);
  }
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

/// S is still products: four of a row share a reciprocal. Those that do not attend may be NaN, which would
/// spread, so they are cleared before, too.
template <class P>
struct SigmoidWeights : ProgramWeights<P> {
  template <int kCount>
  static __device__ __forceinline__ void weigh(const Params& p, const WorkTile<P>& work, RowState<P>& rows,
                                               int kv_begin, bool full, bool, float (&s)[kCount],
                                               float (&)[2]) {
    if (!full) ScoreMask<P>::apply(p, work, rows, kv_begin, s);
    find(p, rows, kv_begin, s);
    if (!full) ScoreMask<P>::apply(p, work, rows, kv_begin, s);
    pin(s);
  }

 private:
  template <int kCount>
  static __device__ __forceinline__ void find(const Params& p, const RowState<P>& rows, int kv_begin,
                                              float (&s)[kCount]) {
    const Position row = position(rows.first_query()),
                   column = position(kv_begin + static_cast<int>(threadIdx.x) % 4 * 2);
#pragma unroll
    for (int first = 0; first < kCount; first += 8)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Position q = row + half * rows.to_second();
        const auto value = [&](int i) { return first + i / 2 * 4 + half * 2 + i % 2; };
        const auto kv = [&](int i) { return column + (value(i) / 4 * 8 + i % 2); };
        float sigmoids[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) sigmoids[i] = P::sigmoid_exponent(p, rows.head, s[value(i)], q, kv(i));
        FourSigmoids<typename P::Element>::find(sigmoids);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          s[value(i)] = P::score_of_sigmoid(p, rows.head, s[value(i)], sigmoids[i], q, kv(i));
      }
  }
};

template <class P>
using RowWeights = Conditional<!P::kWeightMod, SoftmaxWeights<P>,
                               Conditional<P::kPairSigmoid, SigmoidWeights<P>, ProgramWeights<P>>>;

}  // namespace flashjit::sm90
