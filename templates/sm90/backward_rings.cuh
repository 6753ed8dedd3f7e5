// The pipelines of the backward pass, each a Ring of BackwardSmem's stages. `i` counts Q tiles and `n` KV
// tiles, each from the CTA's first on. Phases take them by reference: as values of their own ptxas orders the
// main loops otherwise (NOTES.md#ptxas-orders-equal-sources-differently).
#pragma once

#include "flashjit/async/ring.cuh"
#include "flashjit/sm90/backward_smem.cuh"

namespace flashjit::sm90 {

/// Q with LSE and the score's row term; the first of a KV tile with K.
template <class P>
struct QTileStages {
  using Smem = BackwardSmem<P>;
  static __device__ __forceinline__ unsigned full(const Smem& smem, unsigned i) {
    return smem.q_full(i % P::kStages);
  }
  static __device__ __forceinline__ unsigned empty(const Smem& smem, unsigned i) {
    return smem.q_empty(i % P::kStages);
  }
  static __device__ __forceinline__ int phase(const Smem&, const unsigned& i) { return i / P::kStages & 1; }
};
/// dO with D and the bias tile; the first of a KV tile with V.
template <class P>
struct DoutStages {
  using Smem = BackwardSmem<P>;
  static __device__ __forceinline__ unsigned full(const Smem& smem, unsigned i) {
    return smem.dout_full(i % BackwardPolicy<P>::kDoutStages);
  }
  static __device__ __forceinline__ unsigned empty(const Smem& smem, unsigned i) {
    return smem.dout_empty(i % BackwardPolicy<P>::kDoutStages);
  }
  static __device__ __forceinline__ int phase(const Smem&, const unsigned& i) {
    return i / BackwardPolicy<P>::kDoutStages & 1;
  }
};
/// The KV tile, which is full with its first Q tile and dO.
template <class P>
struct KvTileStages {
  using Smem = BackwardSmem<P>;
  static __device__ __forceinline__ unsigned empty(const Smem& smem, unsigned = 0) { return smem.kv_empty(); }
  static __device__ __forceinline__ int phase(const Smem&, const unsigned& n) { return n & 1; }
};
/// dS and, wide, P. Empty only where gradients of captures are made of dS: else the consumers' own order
/// says so.
template <class P>
struct DsStages {
  using Smem = BackwardSmem<P>;
  static __device__ __forceinline__ unsigned full(const Smem& smem, unsigned i) { return smem.ds_full(i); }
  static __device__ __forceinline__ unsigned empty(const Smem& smem, unsigned i) { return smem.ds_added(i); }
  static __device__ __forceinline__ int phase(const Smem&, const unsigned& i) { return i / 2 & 1; }
};
/// A warpgroup's dQ, on its way to global memory.
template <class P>
struct OwnDqStages {
  using Smem = BackwardSmem<P>;
  static __device__ __forceinline__ unsigned full(const Smem& smem, int wg, unsigned) {
    return smem.dq_full(wg);
  }
  static __device__ __forceinline__ unsigned empty(const Smem& smem, int wg, unsigned) {
    return smem.dq_empty(wg);
  }
  static __device__ __forceinline__ int phase(const Smem&, int, const unsigned& i) { return i & 1; }
};
/// Partial dQ of both warpgroups, which the cluster's CTAs send each other to sum it up: full when this CTA
/// has sent its own, empty when all CTAs have read what they were sent.
template <class P>
struct SummedDqStages {
  using Smem = BackwardSmem<P>;
  static __device__ __forceinline__ unsigned full(const Smem& smem, int, unsigned i) {
    return smem.dq_sent(i);
  }
  static __device__ __forceinline__ unsigned empty(const Smem& smem, int, unsigned i) {
    return smem.dq_read(i);
  }
  static __device__ __forceinline__ int phase(const Smem&, int, const unsigned& i) {
    return i / kDqSlots & 1;
  }
};
/// What the CTAs of the cluster have sent of it.
template <class P>
struct PartialDqStages {
  using Smem = BackwardSmem<P>;
  static __device__ __forceinline__ unsigned full(const Smem& smem, int wg, unsigned i) {
    return smem.partial_dq_full(wg, i);
  }
  static __device__ __forceinline__ int phase(const Smem&, int, const unsigned& i) {
    return i / kDqSlots & 1;
  }
};
/// The other CTA's dS.
template <class P>
struct OtherDsStages {
  using Smem = BackwardSmem<P>;
  static __device__ __forceinline__ unsigned full(const Smem& smem, unsigned i) {
    return smem.other_ds_full(i);
  }
  static __device__ __forceinline__ int phase(const Smem&, const unsigned& i) { return i / 2 & 1; }
};
/// Where dS is sent over the other CTA's P: full when that CTA has read its P, so that dS may be sent, and
/// empty when it has read the dS.
template <class P>
struct OverPStages {
  using Smem = BackwardSmem<P>;
  static __device__ __forceinline__ unsigned full(const Smem& smem, unsigned) { return smem.other_p_read(); }
  static __device__ __forceinline__ unsigned empty(const Smem& smem, unsigned) { return smem.sent_ds_read(); }
  static __device__ __forceinline__ int phase(const Smem&, const unsigned& i) { return i & 1; }
};
/// Where CTAs split columns, the other CTA's partial sums for a warpgroup.
template <class P>
struct PartialSumsStages {
  using Smem = BackwardSmem<P>;
  static __device__ __forceinline__ unsigned full(const Smem& smem, int wg, unsigned) {
    return smem.partial_sums_full(wg);
  }
  static __device__ __forceinline__ int phase(const Smem&, int, const unsigned& i) { return i & 1; }
};
/// The index of the cluster's n-th KV tile, from its first CTA.
template <class P>
struct TileIndexStages {
  using Smem = BackwardSmem<P>;
  static __device__ __forceinline__ unsigned full(const Smem& smem, unsigned n) {
    return smem.tile_index_full(n);
  }
  static __device__ __forceinline__ int phase(const Smem&, const unsigned& n) {
    return n / kKeptTileIndices & 1;
  }
};

template <class P>
using QTileRing = Ring<P, QTileStages<P>>;
template <class P>
using DoutRing = Ring<P, DoutStages<P>>;
template <class P>
using KvTileRing = Ring<P, KvTileStages<P>>;
template <class P>
using DsRing = Ring<P, DsStages<P>>;
template <class P>
using DqRing = Ring<P, Conditional<BackwardPolicy<P>::kSumsDq, SummedDqStages<P>, OwnDqStages<P>>>;
template <class P>
using PartialDqRing = Ring<P, PartialDqStages<P>>;
template <class P>
using OtherDsRing = Ring<P, OtherDsStages<P>>;
template <class P>
using OverPRing = Ring<P, OverPStages<P>>;
template <class P>
using PartialSumsRing = Ring<P, PartialSumsStages<P>>;
template <class P>
using TileIndexRing = Ring<P, TileIndexStages<P>>;

// Who releases the stages of dO and Q, wide: StageRelease<P> names one of these types. The consumers call
// after_dv() and after_dk() when products have read the stages, and the thread that adds dQ calls after_dq().

template <class P>
struct ConsumersRelease {
  using Smem = BackwardSmem<P>;
  static __device__ __forceinline__ void after_dv(const Smem& smem, unsigned i) {
    DoutRing<P>::release_thread(smem, i);
  }
  static __device__ __forceinline__ void after_dk(const Smem& smem, unsigned i) {
    QTileRing<P>::release_thread(smem, i);
  }
  static __device__ __forceinline__ void after_dq(const Smem&, unsigned) {}
};
/// dQ lies over both.
template <class P>
struct AdderReleases {
  using Smem = BackwardSmem<P>;
  static __device__ __forceinline__ void after_dv(const Smem&, unsigned) {}
  static __device__ __forceinline__ void after_dk(const Smem&, unsigned) {}
  static __device__ __forceinline__ void after_dq(const Smem& smem, unsigned i) {
    DoutRing<P>::release_thread(smem, i);
    QTileRing<P>::release_thread(smem, i);
  }
};
/// dQ lies over Q alone.
template <class P>
struct AdderReleasesQ : ConsumersRelease<P> {
  using Smem = BackwardSmem<P>;
  static __device__ __forceinline__ void after_dk(const Smem&, unsigned) {}
  static __device__ __forceinline__ void after_dq(const Smem& smem, unsigned i) {
    QTileRing<P>::release_thread(smem, i);
  }
};
template <class P>
using StageRelease =
    Conditional<!BackwardPolicy<P>::kAdderReleases, ConsumersRelease<P>,
                Conditional<BackwardPolicy<P>::kExchangesDs, AdderReleasesQ<P>, AdderReleases<P>>>;

}  // namespace flashjit::sm90
