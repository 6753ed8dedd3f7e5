// The five products of the backward pass, each started here and run by the tensor cores beside what follows.
// S and dP are computed transposed, keys by queries, so that P^T and dS^T are left operands of dV and dK.
#pragma once

#include "flashjit/sm90/backward_slices.cuh"

namespace flashjit::sm90 {

/// The named barrier of both consumers; 2 and 3 are each one's.
constexpr int kBothConsumers = 4;

/// What a consumer thread has of the products: two columns of each eight, in two rows.
template <class P>
struct BackwardFragments {
  using Policy = BackwardPolicy<P>;
  using S = float[Policy::kWgQueries / 2];                 ///< S^T, dP^T
  using Operand = unsigned[Policy::kPairQueries / 16][4];  ///< P^T, dS^T, in the element type
  using Dq = float[Policy::kDqColumns / 2];
  using Dk = float[Policy::kWgDim / 2];
  using Dv = float[Policy::kWgDimV / 2];
};

// What lies behind a sequence's rows may be NaN, which zero times anything does not hide: so it is cleared
// before it is multiplied. Both consumers do so, each for itself.

/// Clears K and V behind the sequence's last key.
template <class P>
__device__ __forceinline__ void clear_out_of_range_keys(const Params& p, const BackwardSmem<P>& smem,
                                                        unsigned i, int wg) {
  using Policy = BackwardPolicy<P>;
  const int own = Policy::first_key_of_cta(Policy::rank()), valid = smem.seqused_kv(p, i) - smem.kv_begin(i);
  if (valid + own >= P::kBc) return;
  DoutRing<P>::wait_full(smem, i);
  clear_rows<Policy::kKeys, Policy::kCtaDim>(smem.pointer(smem.k()), valid);
  clear_rows<Policy::kKeys, Policy::kCtaDimV>(smem.pointer(smem.v()), valid);
  if constexpr (Policy::kExchangesDs)
    clear_rows<Policy::kKeys, Policy::kLayout.other_columns()>(smem.pointer(smem.other_k()),
                                                               valid - Policy::kKeys + 2 * own);
  publish_to_async_proxy();
  named_barrier_sync(2 + wg, 128);
}

/// Clears Q and dO behind the sequence's last query: those rows belong to the next sequence.
template <class P>
__device__ __forceinline__ void clear_out_of_range_queries(const Params& p, const BackwardSmem<P>& smem,
                                                           unsigned i, int wg) {
  using Policy = BackwardPolicy<P>;
  if constexpr (P::kVarlen) {
    const int length = smem.kv_tile_of(i).sequence.seqlen_q(p);
    if (const int valid = length - smem.q_tile(i).tile * P::kBr; valid < P::kBr) {
      const auto count = [](int known) { return Policy::kUnrollsClearing ? known : opaque(known); };
      const int stage = i % P::kStages, dout_stage = i % Policy::kDoutStages;
      DoutRing<P>::wait_full(smem, i);
      clear_rows<P::kBr, Policy::kCtaDim>(smem.pointer(smem.q(stage)), valid, count(slices(Policy::kCtaDim)));
      clear_rows<P::kBr, Policy::kCtaDimV>(smem.pointer(smem.dout(dout_stage)), valid,
                                           count(slices(Policy::kCtaDimV)));
      publish_to_async_proxy();
      named_barrier_sync(2 + wg, 128);
    }
  }
}

/// Starts S^T or dP^T, which `multiply` begins anew.
template <int kCount>
__device__ __forceinline__ void start_transposed(float (&c)[kCount], auto multiply) {
  pin(c);
  wgmma_fence();
  multiply();
  wgmma_commit();
  pin(c);
}

/// The rows of Q of Q tile i whose scores a warpgroup computes, as an operand.
template <class P>
__device__ __forceinline__ unsigned long long q_operand(const BackwardSmem<P>& smem, unsigned i, int wg) {
  return tile_descriptor(smem.q(i % P::kStages) + BackwardPolicy<P>::first_query(wg) * kRowBytes, 0);
}

/// S^T = K Q^T
template <class P>
__device__ __forceinline__ void start_s(const BackwardSmem<P>& smem, int wg, unsigned long long q,
                                        typename BackwardFragments<P>::S& s) {
  const unsigned long long k = tile_descriptor(smem.k() + BackwardPolicy<P>::first_row(wg) * kRowBytes, 0);
  start_transposed(s, [&] { P::multiply_scores(s, k, q, 0); });
}

// When S is started; SStart<P> names one of these types.
template <class P>
struct EarlySStart {
  using S = typename BackwardFragments<P>::S;
  static __device__ __forceinline__ void early(const BackwardSmem<P>& smem, int wg, unsigned long long q,
                                               S& s) {
    start_s(smem, wg, q, s);
  }
  static __device__ __forceinline__ void with_dp(const BackwardSmem<P>&, int, unsigned long long, S&) {}
};
template <class P>
struct SStartWithDp {
  using S = typename BackwardFragments<P>::S;
  static __device__ __forceinline__ void early(const BackwardSmem<P>&, int, unsigned long long, S&) {}
  static __device__ __forceinline__ void with_dp(const BackwardSmem<P>& smem, int wg, unsigned long long q,
                                                 S& s) {
    start_s(smem, wg, q, s);
  }
};
template <class P>
using SStart = Conditional<BackwardPolicy<P>::kStartsSEarly, EarlySStart<P>, SStartWithDp<P>>;

/// dP^T = V dO^T of Q tile i
template <class P>
__device__ __forceinline__ void start_dp(const BackwardSmem<P>& smem, unsigned i, int wg,
                                         typename BackwardFragments<P>::S& dp) {
  using Policy = BackwardPolicy<P>;
  const int stage = i % Policy::kDoutStages;
  const unsigned long long v = tile_descriptor(smem.v() + Policy::first_row(wg) * kRowBytes, 0),
                           dout = tile_descriptor(smem.dout(stage) + Policy::first_query(wg) * kRowBytes, 0);
  start_transposed(dp, [&] { P::multiply_dp(dp, v, dout, 0); });
}

/// dV += P^T dO and then dK += dS^T Q of Q tile i: a warpgroup's rows, or, wide, its columns. P^T and dS^T
/// are read from registers, or, wide, from shared memory.
template <class P>
__device__ __forceinline__ void start_dv_dk(const BackwardSmem<P>& smem, unsigned i, int wg,
                                            const typename BackwardFragments<P>::Operand& p,
                                            const typename BackwardFragments<P>::Operand& ds,
                                            typename BackwardFragments<P>::Dk& dk,
                                            typename BackwardFragments<P>::Dv& dv) {
  using Policy = BackwardPolicy<P>;
  using Smem = BackwardSmem<P>;
  const auto own_columns = [&](unsigned tile, int first) {
    return tile_descriptor(Smem::column(tile, Policy::kWide ? wg * first : 0, Smem::kQSlice), Smem::kQSlice);
  };
  const unsigned long long dout = own_columns(smem.dout(i % Policy::kDoutStages), Policy::kFirstDimV);
  const unsigned long long q = own_columns(smem.q(i % P::kStages), Policy::kFirstDim);
  pin(dv);
  pin(dk);
  wgmma_fence();
  if constexpr (Policy::kWide) {
    // The summed queries are the columns of P^T and dS^T.
    const unsigned long long p_tile = tile_descriptor(smem.p(i), 0), ds_tile = tile_descriptor(smem.ds(i), 0);
    P::multiply_dv(dv, p_tile, dout, 1);
    wgmma_commit();
    ColumnSlices<P>::multiply_dk(smem, i % P::kStages, wg, dk, ds_tile, q);
  } else {
    P::multiply_dv(dv, p, dout, 1);
    wgmma_commit();
    P::multiply_dk(dk, ds, q, 1);
  }
  wgmma_commit();
}

/// dQ = dS K: a warpgroup's part, of Q tile i and this KV tile. Where CTAs exchange dS, it has
/// columns for all of the cluster's keys, which may be multiplied in two calls.
template <class P, bool kOwnKeys = true, bool kOtherKeys = BackwardPolicy<P>::kExchangesDs>
__device__ __forceinline__ void start_dq(const BackwardSmem<P>& smem, unsigned i, int wg,
                                         typename BackwardFragments<P>::Dq& dq) {
  using Policy = BackwardPolicy<P>;
  using Smem = BackwardSmem<P>;
  const int first_column = Policy::first_dq_column(wg) - Policy::first_column(P::kHeadDim);
  const auto multiply_keys = [&](unsigned ds, unsigned k, int column, bool add) {
    const unsigned long long left = tile_descriptor(ds, Smem::kKvSlice);
    const unsigned long long right = tile_descriptor(Smem::column(k, column, Smem::kKvSlice), Smem::kKvSlice);
    ColumnSlices<P>::multiply_dq(smem, k, wg, dq, left, right, add);
  };
  pin(dq);
  wgmma_fence();
  if constexpr (kOwnKeys)
    multiply_keys(smem.ds(i) + (Policy::kSplitsDqRows ? wg * Smem::kKvSlice : 0), smem.k(), first_column,
                  false);
  if constexpr (kOtherKeys) {
    const int first_loaded = smem.first_other_column() / kSliceColumns * kSliceColumns;
    multiply_keys(smem.other_ds(i), smem.other_k(), first_column - first_loaded, true);
  }
  wgmma_commit();
  pin(dq);
}

/// Waits for Q tile i, and starts S if that is to be early. False: there is no such tile; S is then not used.
template <class P>
__device__ __forceinline__ bool begin_q_tile(const Params& p, const BackwardSmem<P>& smem, unsigned i, int wg,
                                             unsigned long long q, typename BackwardFragments<P>::S& s) {
  QTileRing<P>::wait_full(smem, i);
  SStart<P>::early(smem, wg, q, s);
  const QTileInfo& now = smem.q_tile(i);
  if (now.head < 0) return false;
  if (kOutOfRangeKeys<P> && now.first) clear_out_of_range_keys(p, smem, i, wg);
  return true;
}

}  // namespace flashjit::sm90
