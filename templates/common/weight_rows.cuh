// Rows in the backward pass of a program that gives P (kWeightMod): there is no LSE and no D, which say which
// rows exist.
#pragma once

#include "flashjit/common/row_stats.cuh"

namespace flashjit {

template <class P>
struct SoftmaxRowStats {
  static __device__ __forceinline__ void find(const Params& p, const Sequence<P>& sequence, int h, int head,
                                              int first, const auto& meanwhile) {
    find_row_stats<P>(p, sequence, h, head, first, meanwhile);
  }
};

/// LSE's bits are all set, and 0 for rows that do not exist; D is 0, and infinity. O, dO and LSE are not
/// read.
template <class P>
struct ProgramRowStats {
  static __device__ __forceinline__ void find(const Params& p, const Sequence<P>& sequence, int /*h*/,
                                              int head, int first, const auto& meanwhile) {
    meanwhile();
    const int row = first + static_cast<int>(threadIdx.x) % 32;
    const bool exists = row < sequence.seqlen_q(p);
    const long long at = static_cast<long long>(head) * p.seqlen_q_padded + row;
    p.lse_padded[at] = __int_as_float(exists ? -1 : 0);
    p.d[at] = exists ? 0.0f : infinity();
  }
};

/// From S to P, and from dP to what a pair's score gets, in families of tensor cores.
template <class P>
struct ProgramPairs {
  static_assert(P::kHasScore && !P::kDropout);
  static constexpr bool kMasksDp = true;  ///< P may be 0 where a pair attends, too

  static __device__ __forceinline__ float weigh(const Params&, float s, float lse) {
    return __int_as_float(__float_as_int(s) & __float_as_int(lse));
  }
  static __device__ __forceinline__ float grad(float /*weight*/, float dp, float d) {
    return d == 0.0f ? dp : 0.0f;
  }
};

/// For a program that is finite for finite scores. Rows that do not exist have finite scores.
template <class P>
struct FinitePairs {
  static constexpr bool kMasksDp = true;

  static __device__ __forceinline__ float weigh(const Params&, float s, float /*lse*/) { return s; }
  static __device__ __forceinline__ float grad(float /*weight*/, float dp, float /*d*/) { return dp; }
};

template <class P>
using RowStatsFinder = Conditional<P::kWeightMod, ProgramRowStats<P>, SoftmaxRowStats<P>>;

}  // namespace flashjit
