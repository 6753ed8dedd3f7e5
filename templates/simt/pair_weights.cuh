// From a score to P, and from dP to what the score gets, in the backward pass; PairWeights<Problem> names one
// of these types: the softmax, or a program whose values are P (kWeightMod).
#pragma once

#include "flashjit/simt/tile.cuh"

namespace flashjit::simt {

/// LSE and D of one query. LSE stays in natural units, as the forward pass wrote it: with scores of 1e4 and
/// more another rounding would be visible, and where one key has all the weight S - LSE is exactly zero.
struct RowStats {
  float lse, d;
};

template <class Problem>
struct SoftmaxPairs {
  /// Queries without P and queries that do not exist get LSE = inf, so that P is zero.
  static __device__ __forceinline__ RowStats row(const Params& p, const Sequence<Problem>& sequence, int h,
                                                 int q) {
    if (q >= sequence.seqlen_q(p)) return {infinity(), 0.0f};
    const float lse = p.lse.data[sequence.lse_row(p, h, q)];
    return {lse_gives_p(lse) ? lse : infinity(), p.d[sequence.stats_row(p, h) + q]};
  }
  static __device__ __forceinline__ float weigh(float score, RowStats row) {
    return exp2f((score - row.lse) * kLog2E);
  }
  static __device__ __forceinline__ float grad(float prob, float dp, RowStats row) {
    return prob * (dp - row.d);
  }
};

/// There are no LSE and no D. A query that does not exist has LSE = inf, too.
template <class Problem>
struct ProgramPairs {
  static_assert(Problem::kHasScore && !Problem::kDropout);

  static __device__ __forceinline__ RowStats row(const Params& p, const Sequence<Problem>& sequence,
                                                 int /*h*/, int q) {
    return {q < sequence.seqlen_q(p) ? 0.0f : infinity(), 0.0f};
  }
  static __device__ __forceinline__ float weigh(float score, RowStats row) {
    return row.lse == 0.0f ? score : 0.0f;
  }
  static __device__ __forceinline__ float grad(float /*prob*/, float dp, RowStats row) {
    return row.lse == 0.0f ? dp : 0.0f;
  }
};

template <class Problem>
using PairWeights = Conditional<Problem::kWeightMod, ProgramPairs<Problem>, SoftmaxPairs<Problem>>;

}  // namespace flashjit::simt
