// The pipelines of the forward pass, each a Ring of ForwardStorage's stages, and how work tiles are visited.
#pragma once

#include "flashjit/async/ring.cuh"
#include "flashjit/sm90/forward_smem.cuh"

namespace flashjit::sm90 {

template <class P>
struct QStages {
  using Smem = ForwardStorage<P>;
  static __device__ __forceinline__ unsigned full(const Smem& smem, int wg, int round) {
    return smem.q_full(wg, round);
  }
  static __device__ __forceinline__ unsigned empty(const Smem& smem, int wg, int round) {
    return smem.q_empty(wg, round);
  }
  static __device__ __forceinline__ int phase(const Smem& smem, int, int round) {
    return smem.q_phase(round);
  }
};
/// Stages by the functions of ForwardStorage that have their barriers and phase.
template <class P, auto kFull, auto kEmpty, auto kPhase = &ForwardStorage<P>::phase>
struct StagesOf {
  using Smem = ForwardStorage<P>;
  static __device__ __forceinline__ unsigned full(const Smem& smem, int n) { return (smem.*kFull)(n); }
  static __device__ __forceinline__ unsigned empty(const Smem& smem, int n) { return (smem.*kEmpty)(n); }
  static __device__ __forceinline__ int phase(const Smem& smem, int n) { return (smem.*kPhase)(n); }
};
/// Nothing waits until a work tile has been read: the rings of Q, K and V see to that.
template <class P>
struct WorkStages {
  using Smem = ForwardStorage<P>;
  static __device__ __forceinline__ unsigned full(const Smem& smem, int n) { return smem.work_full(n); }
  static __device__ __forceinline__ int phase(const Smem& smem, int n) { return smem.work_phase(n); }
};

template <class P>
using QRing = Ring<P, QStages<P>>;
template <class P>
using KRing = Ring<P, StagesOf<P, &ForwardStorage<P>::k_full, &ForwardStorage<P>::k_empty>>;
template <class P>
using VRing = Ring<P, StagesOf<P, &ForwardStorage<P>::v_full, &ForwardStorage<P>::v_empty>>;
/// Where K is loaded to: its own stages, or the stages of codes.
template <class P>
using RawKRing = Ring<P, StagesOf<P, &ForwardStorage<P>::raw_k_full, &ForwardStorage<P>::raw_k_empty,
                                  &ForwardStorage<P>::raw_k_phase>>;
template <class P>
using RawVRing = Ring<P, StagesOf<P, &ForwardStorage<P>::raw_v_full, &ForwardStorage<P>::raw_v_empty,
                                  &ForwardStorage<P>::raw_v_phase>>;
/// What the score reads: the bias tile, or the column terms.
template <class P>
using TermsRing = Ring<P, StagesOf<P, &ForwardStorage<P>::terms_full, &ForwardStorage<P>::terms_empty>>;
template <class P>
using WorkRing = Ring<P, WorkStages<P>>;

/// Releases a slot of codes when the warp has read it. By each of a warpgroup that converts them.
template <class P>
__device__ __forceinline__ void release_codes(unsigned empty) {
  if (P::kCheckWaits)
    barrier_arrive(empty);
  else
    release(empty);
}

/// Visits the work tiles in the order in which the scheduler hands them out.
template <class P, class Visit>
__device__ __forceinline__ void for_each_work_tile(const ForwardStorage<P>& smem, const Visit& visit) {
#pragma unroll 1
  for (int round = 0;; ++round) {
    WorkRing<P>::wait_full(smem, round);
    const WorkTile<P>& work = smem.work(round);
    if (work.h < 0) break;
    visit(work);
  }
}

}  // namespace flashjit::sm90
