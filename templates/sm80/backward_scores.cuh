// The score program in the backward pass, transposed: S becomes score(S), and what its gradients need is
// kept. PairScore<P>, ScoreSlope<P> and PairGrads<P> each name one of two types.
#pragma once

#include "flashjit/sm80/backward_policy.cuh"

namespace flashjit::sm80 {

/// The score's derivative, the slope: 1, or a program's.
template <class P>
struct UnitSlope {
  static __device__ __forceinline__ void find(Slopes<P>&, const Params&, const typename P::Head&, int, int,
                                              int, const float&, const Position&, const Position&) {}
  static __device__ __forceinline__ float chain(const float& grad, const Slopes<P>&, int, int, int) {
    return grad;
  }
};
template <class P>
struct ProgramSlope {
  static __device__ __forceinline__ void find(Slopes<P>& slope, const Params& p, const typename P::Head& head,
                                              int mt, int nt, int e, const float& dot, const Position& q,
                                              const Position& kv) {
    slope[mt][nt][e] = P::score_grad(p, head, dot, q, kv);
  }
  /// A slope may be anything where P is zero.
  static __device__ __forceinline__ float chain(const float& grad, const Slopes<P>& slope, int mt, int nt,
                                                int e) {
    return grad == 0.0f ? 0.0f : grad * slope[mt][nt][e];
  }
};
template <class P>
using ScoreSlope = Conditional<P::kScoreGrad, ProgramSlope<P>, UnitSlope<P>>;

/// What a pair adds to gradients of captured tensors, for which Q K^T is kept.
template <class P>
using PairSums = CaptureSums<P::kCaptureGrads, BackwardPolicy<P>::kMt * 2>;
template <class P>
struct NoPairGrads {
  static __device__ __forceinline__ void keep(Dots<P>&, int, int, int, const float&) {}
  static __device__ __forceinline__ void add(const Params&, const typename P::Head&, const float&,
                                             const Dots<P>&, int, int, int, const Position&, const Position&,
                                             PairSums<P>&) {}
};
template <class P>
struct AddedPairGrads {
  static __device__ __forceinline__ void keep(Dots<P>& dots, int mt, int nt, int e, const float& dot) {
    dots[mt][nt][e] = dot;
  }
  static __device__ __forceinline__ void add(const Params& p, const typename P::Head& head, const float& grad,
                                             const Dots<P>& dots, int mt, int nt, int e, const Position& q,
                                             const Position& kv, PairSums<P>& sums) {
    P::add_capture_grads(p, head, grad, dots[mt][nt][e], q, kv, sums.of_key(mt * 2 + e / 2));
  }
};
template <class P>
using PairGrads = Conditional<(P::kCaptureGrads > 0), AddedPairGrads<P>, NoPairGrads<P>>;

/// S = score(S)
template <class P>
struct PlainScore {
  template <class AtQ, class AtKv>
  static __device__ __forceinline__ void apply(BackwardScores<P>&, Slopes<P>&, Dots<P>&, const Params&,
                                               const typename P::Head&, const AtQ&, const AtKv&) {}
};
template <class P>
struct ProgramScore {
  template <class AtQ, class AtKv>
  static __device__ __forceinline__ void apply(BackwardScores<P>& s, Slopes<P>& slope, Dots<P>& dots,
                                               const Params& p, const typename P::Head& head, const AtQ& at_q,
                                               const AtKv& at_kv) {
    using Policy = BackwardPolicy<P>;
#pragma unroll
    for (int mt = 0; mt < Policy::kMt; ++mt)
#pragma unroll
      for (int nt = 0; nt < Policy::kNt; ++nt)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float dot = s[mt][nt][e];
          ScoreSlope<P>::find(slope, p, head, mt, nt, e, dot, at_q(nt, e), at_kv(mt, e));
          PairGrads<P>::keep(dots, mt, nt, e, dot);
          s[mt][nt][e] = P::score(p, head, dot, at_q(nt, e), at_kv(mt, e));
        }
  }
};
template <class P>
using PairScore = Conditional<P::kHasScore, ProgramScore<P>, PlainScore<P>>;

}  // namespace flashjit::sm80
