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

/// The first warp of a pair hands P, and what else the gradients need, to the second.
template <class P>
__device__ __forceinline__ void hand_over_p(char* shared, const BackwardScores<P>& s, const Slopes<P>& slope,
                                            const Dots<P>& dots, int row_warp, int lane) {
  if constexpr (BackwardPolicy<P>::kPairs) {
    hand_over<P>(shared, 0, s, row_warp, lane);
    if constexpr (P::kScoreGrad) hand_over<P>(shared, 1, slope, row_warp, lane);
    if constexpr (P::kCaptureGrads > 0)
      hand_over<P>(shared, BackwardPolicy<P>::kExchanged - 1, dots, row_warp, lane);
    // racecheck does not follow arrivals, and synccheck wants all waits at one instruction: see
    // tests/gpu/sanitize.sh.
    if constexpr (P::kCheckWaits)
      named_barrier_sync(1 + row_warp, 64);
    else
      named_barrier_arrive(1 + row_warp, 64);
  }
}
template <class P>
__device__ __forceinline__ void wait_for_p(int row_warp) {
  if constexpr (BackwardPolicy<P>::kPairs) named_barrier_sync(1 + row_warp, 64);
}
/// The second warp of a pair gets an m16n8 tile of it.
template <class P>
__device__ __forceinline__ void take_over_p(char* shared, BackwardScores<P>& s, Slopes<P>& slope,
                                            Dots<P>& dots, int mt, int nt, int row_warp, int lane) {
  if constexpr (BackwardPolicy<P>::kPairs) {
    take_over<P>(shared, 0, mt, nt, s[mt][nt], row_warp, lane);
    if constexpr (P::kScoreGrad) take_over<P>(shared, 1, mt, nt, slope[mt][nt], row_warp, lane);
    if constexpr (P::kCaptureGrads > 0)
      take_over<P>(shared, BackwardPolicy<P>::kExchanged - 1, mt, nt, dots[mt][nt], row_warp, lane);
  }
}

}  // namespace flashjit::sm80
