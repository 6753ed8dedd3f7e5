// Two warps for the same KV rows (d_split2): one computes S, P and dV, the other dP, dS and dK, and P goes
// from one to the other. Each has twice as many rows as if it had both jobs, so that Q and dO are read half
// as often, and one computes products while the other computes exponentials.
#pragma once

#include "flashjit/common/ptx.cuh"
#include "flashjit/sm80/backward_smem.cuh"

namespace flashjit::sm80 {

/// Where a lane's four values of an m16n8 tile pass from the first warp of a pair to the same lane of the
/// second. `which`: P, the slope or Q K^T, one after the other, as far as they are needed.
template <class P>
__device__ __forceinline__ float4* exchanged(char* shared, int which, int mt, int nt, int row_warp,
                                             int lane) {
  using Policy = BackwardPolicy<P>;
  return BackwardSmem<P>::exchange(shared) +
         ((which * Policy::kMt + mt) * Policy::kNt + nt) * Policy::kRowWarps * 32 + row_warp * 32 + lane;
}

template <class P>
__device__ __forceinline__ void hand_over(char* shared, int which, const BackwardScores<P>& values,
                                          int row_warp, int lane) {
  using Policy = BackwardPolicy<P>;
#pragma unroll
  for (int mt = 0; mt < Policy::kMt; ++mt)
#pragma unroll
    for (int nt = 0; nt < Policy::kNt; ++nt) {
      const float(&of)[4] = values[mt][nt];
      *exchanged<P>(shared, which, mt, nt, row_warp, lane) = {of[0], of[1], of[2], of[3]};
    }
}
template <class P>
__device__ __forceinline__ void take_over(char* shared, int which, int mt, int nt, float (&to)[4],
                                          int row_warp, int lane) {
  const float4 of = *exchanged<P>(shared, which, mt, nt, row_warp, lane);
  to[0] = of.x, to[1] = of.y, to[2] = of.z, to[3] = of.w;
}

// How P, and what else the gradients need, gets from the warp that computes it to the one that computes dS;
// WarpPair<P> names one of these types.

/// It is the same warp.
template <class P>
struct NoPair {
  static __device__ __forceinline__ void hand_over_p(char*, const BackwardScores<P>&, const Slopes<P>&,
                                                     const Dots<P>&, int, int) {}
  static __device__ __forceinline__ void wait_for_p(int) {}
  static __device__ __forceinline__ void take_over_p(char*, BackwardScores<P>&, Slopes<P>&, Dots<P>&, int,
                                                     int, int, int) {}
};
/// By way of shared memory. take_over_p(): an m16n8 tile of it.
template <class P>
struct PairOfWarps {
  static __device__ __forceinline__ void hand_over_p(char* shared, const BackwardScores<P>& s,
                                                     const Slopes<P>& slope, const Dots<P>& dots,
                                                     int row_warp, int lane) {
    hand_over<P>(shared, 0, s, row_warp, lane);
    HandedSlope::hand_over(shared, slope, row_warp, lane);
    HandedDots::hand_over(shared, dots, row_warp, lane);
    // racecheck does not follow arrivals, and synccheck wants all waits at one instruction: see
    // tests/gpu/sanitize.sh.
    if (P::kCheckWaits)
      named_barrier_sync(1 + row_warp, 64);
    else
      named_barrier_arrive(1 + row_warp, 64);
  }
  static __device__ __forceinline__ void wait_for_p(int row_warp) { named_barrier_sync(1 + row_warp, 64); }
  static __device__ __forceinline__ void take_over_p(char* shared, BackwardScores<P>& s, Slopes<P>& slope,
                                                     Dots<P>& dots, int mt, int nt, int row_warp, int lane) {
    take_over<P>(shared, 0, mt, nt, s[mt][nt], row_warp, lane);
    HandedSlope::take_over(shared, mt, nt, slope, row_warp, lane);
    HandedDots::take_over(shared, mt, nt, dots, row_warp, lane);
  }

 private:
  template <int kWhich>
  struct Handed {
    static __device__ __forceinline__ void hand_over(char* shared, const BackwardScores<P>& values,
                                                     int row_warp, int lane) {
      sm80::hand_over<P>(shared, kWhich, values, row_warp, lane);
    }
    static __device__ __forceinline__ void take_over(char* shared, int mt, int nt, BackwardScores<P>& values,
                                                     int row_warp, int lane) {
      sm80::take_over<P>(shared, kWhich, mt, nt, values[mt][nt], row_warp, lane);
    }
  };
  struct NotHanded {
    template <class Values>
    static __device__ __forceinline__ void hand_over(char*, const Values&, int, int) {}
    template <class Values>
    static __device__ __forceinline__ void take_over(char*, int, int, Values&, int, int) {}
  };
  using HandedSlope = Conditional<P::kScoreGrad, Handed<1>, NotHanded>;
  using HandedDots =
      Conditional<(P::kCaptureGrads > 0), Handed<BackwardPolicy<P>::kExchanged - 1>, NotHanded>;
};
template <class P>
using WarpPair = Conditional<BackwardPolicy<P>::kPairs, PairOfWarps<P>, NoPair<P>>;

}  // namespace flashjit::sm80
