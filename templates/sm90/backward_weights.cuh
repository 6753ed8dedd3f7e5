// From S to P, and from dP to what a pair's score gets, in the backward pass; PairWeights<P> names one of
// these types: the softmax, or a program whose values are P (kWeightMod).
#pragma once

#include "flashjit/common/weight_rows.cuh"
#include "flashjit/sm90/backward_policy.cuh"

namespace flashjit::sm90 {

template <class P>
struct SoftmaxPairs {
  static constexpr bool kMasksDp = false;  ///< P = 0 says which pairs do not attend

  static __device__ __forceinline__ float weigh(const Params& p, float s, float lse) {
    return p_of_pair<P>(p, s, lse);  // P = exp(S - LSE)
  }
  static __device__ __forceinline__ float grad(float weight, float dp, float d) {
    return weight * (dp - d);  // dS = P (dP - D)
  }
};

/// Rows of dO that do not exist are 0 in shared memory, and so is their dP.
template <class P>
struct ProgramPairsOfZeroRows : ProgramPairs<P> {
  static __device__ __forceinline__ float grad(float /*weight*/, float dp, float /*d*/) { return dp; }
};

template <class P>
using PairWeights = Conditional<!P::kWeightMod, SoftmaxPairs<P>,
                                Conditional<P::kFiniteWeight, FinitePairs<P>, ProgramPairsOfZeroRows<P>>>;

}  // namespace flashjit::sm90
