// When and how P V is computed in a step of the forward pass; PvStage<P> names one of the types below. A step
// calls among() and keep() for 16 keys each, among() before their exponentials and keep() after them; then
// rescale() and multiply().
#pragma once

#include "flashjit/common/dropout.cuh"
#include "flashjit/sm80/forward_softmax.cuh"
#include "flashjit/sm80/shared_rows.cuh"
#include "flashjit/sm80/two_terms.cuh"

namespace flashjit::sm80 {

/// P as left operands: of 16 keys each.
template <class P>
using PFragments = unsigned[(ForwardPolicy<P>::kNt + 1) / 2][ForwardPolicy<P>::kMt][4];
/// A warp's O.
template <class P>
using OutTiles = float[ForwardPolicy<P>::kMt][ForwardPolicy<P>::kOt][4];

/// After the softmax, in 16 bits. `add_pv(i, k, after)` adds the product of 16 keys of KV tile i.
template <class P>
struct PlainPv {
  template <class First, class AddPv>
  static __device__ __forceinline__ void among(First, int, int, float, const AddPv&) {}
  static __device__ __forceinline__ void keep(PFragments<P>&, const ForwardScores<P>&, int) {}
  /// O = exp2(m before - m) O, where any m has changed.
  static __device__ __forceinline__ void rescale(OutTiles<P>& o, const RowValues<P>& factors, bool same_max) {
    if (!__all_sync(kWholeWarp, same_max)) rescale_rows<P>(o, factors);
  }
  template <class BatchHead, class WarpRow, class AtQ, class AtKv, class AddPv>
  static __device__ __forceinline__ void multiply(int i, OutTiles<P>&, PFragments<P>& fragments,
                                                  ForwardScores<P>& s, const RowValues<P>&,
                                                  const ForwardSmem<P>&, unsigned, const Params& p,
                                                  const BatchHead& batch_head, int, const WarpRow&,
                                                  const AtQ& at_q, const AtKv& at_kv, const AddPv& add_pv) {
#pragma unroll
    for (int k = 0; k < ForwardPolicy<P>::kNt / 2; ++k) {
      pack_p<P>(fragments[k], s, k);
      DropStage<P>::drop(fragments[k], p, batch_head, at_q, at_kv, k);
      add_pv(i, k, 0.0f);  // O += P V
    }
  }
};

/// P as two elements each.
template <class P>
struct TwoTermsPv : PlainPv<P> {
  template <class BatchHead, class WarpRow, class AtQ, class AtKv, class AddPv>
  static __device__ __forceinline__ void multiply(int i, OutTiles<P>&, PFragments<P>& fragments,
                                                  ForwardScores<P>& s, const RowValues<P>&,
                                                  const ForwardSmem<P>&, unsigned, const Params& p,
                                                  const BatchHead& batch_head, int, const WarpRow&,
                                                  const AtQ& at_q, const AtKv& at_kv, const AddPv& add_pv) {
    DropStage<P>::drop(s, p, batch_head, at_q, at_kv);
#pragma unroll
    for (int k = 0; k < ForwardPolicy<P>::kNt / 2; ++k) {
      pack_p<P>(fragments[k], s, k);
      add_pv(i, k, 0.0f);  // O += P V
#pragma unroll
      for (int mt = 0; mt < ForwardPolicy<P>::kMt; ++mt)
        rest_as_left_operand<typename P::Element, false>(fragments[k][mt], s[mt], k);
      add_pv(i, k, 0.0f);
    }
  }
};

/// Among the softmax of the next KV tile.
template <class P>
struct LatePv : PlainPv<P> {
  template <class First, class AddPv>
  static __device__ __forceinline__ void among(First, int i, int k, float exponential, const AddPv& add_pv) {
    if constexpr (!First::value) add_pv(i - 1, k, exponential);  // O += P V
  }
  static __device__ __forceinline__ void keep(PFragments<P>& fragments, const ForwardScores<P>& s, int k) {
    pack_p<P>(fragments[k], s, k);
  }
  template <class... Rest>
  static __device__ __forceinline__ void multiply(Rest&&...) {}
};

/// By warps that share rows: P passes through shared memory.
template <class P>
struct SharedRowsPv : PlainPv<P> {
  template <class BatchHead, class WarpRow, class AtQ, class AtKv, class AddPv>
  static __device__ __forceinline__ void multiply(int, OutTiles<P>& o, PFragments<P>&, ForwardScores<P>& s,
                                                  const RowValues<P>&, const ForwardSmem<P>& smem,
                                                  unsigned v_tile, const Params& p,
                                                  const BatchHead& batch_head, int, const WarpRow& warp_row,
                                                  const AtQ& at_q, const AtKv& at_kv, const AddPv&) {
    store_p<P>(s, smem, p, batch_head(), warp_row, at_q, at_kv);
    sync_rows<P>();
    multiply_shared_p<P>(o, smem, v_tile, warp_row);  // O += P V
  }
};

/// P and V of 8 bits.
template <class P>
struct QuantizedPv : PlainPv<P> {
  static __device__ __forceinline__ void rescale(OutTiles<P>&, const RowValues<P>&, bool) {}
  template <class BatchHead, class WarpRow, class AtQ, class AtKv, class AddPv>
  static __device__ __forceinline__ void multiply(int, OutTiles<P>& o, PFragments<P>&, ForwardScores<P>& s,
                                                  const RowValues<P>& factors, const ForwardSmem<P>&,
                                                  unsigned v_tile, const Params& p,
                                                  const BatchHead& batch_head, int seqused_kv, const WarpRow&,
                                                  const AtQ& at_q, const AtKv& at_kv, const AddPv&) {
    DropStage<P>::drop(s, p, batch_head, at_q, at_kv);
    add_pv_of_codes<P>(o, factors, s, v_tile,
                       static_cast<unsigned>(seqused_kv) >> 31);  // O = rescale O + P V
  }
};

template <class P, class Policy = ForwardPolicy<P>>
using PvStage = Conditional<Policy::kCodeProducts, QuantizedPv<P>,
                            Conditional<Policy::kSharesRows, SharedRowsPv<P>,
                                        Conditional<P::kTwoTerms, TwoTermsPv<P>,
                                                    Conditional<Policy::kLatePv, LatePv<P>, PlainPv<P>>>>>;

}  // namespace flashjit::sm80
