// From S to P, and from dP to what a pair's score gets, in the backward pass; PairWeights<P> names one of
// these types: the softmax, or a program whose values are P (kWeightMod).
#pragma once

#include "flashjit/common/weight_rows.cuh"
#include "flashjit/sm80/backward_policy.cuh"

namespace flashjit::sm80 {

template <class P>
struct SoftmaxPairs {
  static constexpr bool kMasksDp = false;  ///< P = 0 says which pairs do not attend

  static __device__ __forceinline__ float weigh(const Params& p, float s, float lse) {
    return p_of_pair<P>(p, s, lse);  // P = exp(S - LSE)
  }
  /// `weight`: P with dropout's mark in its sign.
  static __device__ __forceinline__ float grad(float weight, float dp, float d) {
    return fabsf(weight) * (dp - d);  // dS = P (dP - D)
  }
};

template <class P>
using PairWeights = Conditional<P::kWeightMod, ProgramPairs<P>, SoftmaxPairs<P>>;

}  // namespace flashjit::sm80
