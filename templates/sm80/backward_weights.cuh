// From S to P, and from dP to what a pair's score gets, in the backward pass; PairWeights<P> names one of
// these types: the softmax, or a program whose values are P (kWeightMod).
#pragma once

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

/// LSE and D are infinity for rows that do not exist, and else 0.
template <class P>
struct ProgramPairs {
  static_assert(P::kHasScore && !P::kDropout);
  static constexpr bool kMasksDp = true;  ///< P may be 0 where a pair attends, too

  static __device__ __forceinline__ float weigh(const Params&, float s, float lse) {
    return lse == 0.0f ? s : 0.0f;
  }
  static __device__ __forceinline__ float grad(float /*weight*/, float dp, float d) {
    return d == 0.0f ? dp : 0.0f;
  }
};

template <class P>
using PairWeights = Conditional<P::kWeightMod, ProgramPairs<P>, SoftmaxPairs<P>>;

}  // namespace flashjit::sm80
