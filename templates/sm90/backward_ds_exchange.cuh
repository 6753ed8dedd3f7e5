// How the two CTAs of a cluster, each with 64 keys, send each other dS: to a tile of its own, or over P
// when that has been read (K of five slices). DsExchange<P> names one of two types.
#pragma once

#include "flashjit/sm90/backward_products.cuh"

namespace flashjit::sm90 {

/// Sends dS of Q tile i to the other CTA, by one thread of the first warpgroup. `wait_empty` waits until the
/// other CTA has read what that overwrites.
template <class P, class WaitEmpty>
__device__ __forceinline__ void send_ds(const BackwardSmem<P>& smem, unsigned i, int wg,
                                        const WaitEmpty& wait_empty) {
  using Smem = BackwardSmem<P>;
  if (wg != 0 || threadIdx.x / 32 % 4 != 0 || !elected()) return;
  const int other = 1 - BackwardPolicy<P>::rank();
  wait_empty();
  barrier_expect(smem.other_ds_full(i), Smem::kDsBytes);
  copy_remote(in_cta(smem.other_ds(i), other), smem.ds(i), Smem::kDsBytes,
              in_cta(smem.other_ds_full(i), other));
}

/// A tile of its own, which the other CTA has read, since it has written dS of the Q tile before. So dS is
/// sent before the products of dV and dK, and dQ is computed from the keys of both CTAs after them.
template <class P>
struct DsInOwnTile {
  using Smem = BackwardSmem<P>;
  using Dq = typename BackwardFragments<P>::Dq;
  static constexpr int kAfterDv = 1;          ///< products that have begun after that of dV
  static constexpr bool kOwnKeysLast = true;  ///< dQ of the CTA's own keys is computed with the other's

  static __device__ __forceinline__ void send_early(const Smem& smem, unsigned i, int wg) {
    send_ds(smem, i, wg, [] {});
  }
  static __device__ __forceinline__ void start_own_dq(const Smem&, unsigned, int, Dq&) {}
  static __device__ __forceinline__ void send_late(const Smem&, unsigned, int) {}
  static __device__ __forceinline__ void release(const Smem&) {}
  /// Waits until P and dS of Q tile i may be written.
  static __device__ __forceinline__ void wait_read(const Smem&, unsigned) {}
};
/// Over P: dS is sent when both CTAs have computed dV, and P is written when they have computed dQ.
template <class P>
struct DsOverP {
  using Smem = BackwardSmem<P>;
  using Dq = typename BackwardFragments<P>::Dq;
  static constexpr int kAfterDv = 2;
  static constexpr bool kOwnKeysLast = false;

  static __device__ __forceinline__ void send_early(const Smem&, unsigned, int) {}
  static __device__ __forceinline__ void start_own_dq(const Smem& smem, unsigned i, int wg, Dq& dq) {
    start_dq<P, true, false>(smem, i, wg, dq);  // dQ += dS K
  }
  static __device__ __forceinline__ void send_late(const Smem& smem, unsigned i, int wg) {
    smem.signal_p_read();
    send_ds(smem, i, wg, [&] { OverPRing<P>::wait_full(smem, i); });
  }
  static __device__ __forceinline__ void release(const Smem& smem) {
    // The other warpgroup has read the fifth slice, too, and dS.
    named_barrier_sync(kBothConsumers, 2 * 128);
    smem.signal_ds_read();
  }
  static __device__ __forceinline__ void wait_read(const Smem& smem, unsigned i) {
    OverPRing<P>::acquire(smem, i);
  }
};
template <class P>
using DsExchange = Conditional<BackwardPolicy<P>::kOtherDsOverP, DsOverP<P>, DsInOwnTile<P>>;

}  // namespace flashjit::sm90
