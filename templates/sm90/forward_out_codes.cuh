// O as codes (kOutCodes) in place of StoredOutput<P> of forward_output.cuh; CompleteOutput<P> names one of
// both.
#pragma once

#include "flashjit/common/out_codes.cuh"
#include "flashjit/sm90/forward_output.cuh"

namespace flashjit::sm90 {

/// A warpgroup's columns of one of a thread's two rows. Of rows that two share each has whole blocks.
template <class P, int kHalf, int kCount>
__device__ __forceinline__ void store_own_codes(const CodedRow& row, int wg, const float (&o)[kCount]) {
  store_codes<P, kHalf>(row, o, first_column<P>(wg) / 8, own_chunks<P>(wg));
}

/// Rows of a work tile are rows of O one after the other.
template <class P>
struct CodedOutput : PlainOutput<P> {
  template <int kCount>
  static __device__ __forceinline__ void store(const Params& p, const TensorMaps&, const ForwardStorage<P>&,
                                               const WorkTile<P>& work, int wg, const float (&o)[kCount]) {
    static_assert(!P::kSplit, "O is complete");
    const int q = first_query(work, wg) + own_row(), seqlen_q = work.sequence.seqlen_q(p);
    store_own_codes<P, 0>(coded_row(p, work.sequence, work.h, q, q < seqlen_q), wg, o);
    store_own_codes<P, 1>(coded_row(p, work.sequence, work.h, q + 8, q + 8 < seqlen_q), wg, o);
  }
};

/// Stream-K and PackGQA: whole work tiles. Parts become codes in the combine entry, as splits do.
template <class P>
struct CodedStreamKOutput : StreamKOutput<P> {
  template <int kCount>
  static __device__ __forceinline__ void store(const Params& p, const TensorMaps& maps,
                                               const ForwardStorage<P>& smem, const WorkTile<P>& work, int wg,
                                               const float (&o)[kCount]) {
    if (!work.is_whole()) return StreamKOutput<P>::store(p, maps, smem, work, wg, o);
    const RowCoord first = row_coord(p, work, wg, own_row());
    store_own_codes<P, 0>(coded_row(p, work.sequence, first.h, first.q, first.q >= 0), wg, o);
    const RowCoord second = row_coord(p, work, wg, own_row() + 8);
    store_own_codes<P, 1>(coded_row(p, work.sequence, second.h, second.q, second.q >= 0), wg, o);
  }
};

template <class P>
using CompleteOutput = Conditional<!kOutCodes<P> || P::kSplit && !kScattersRows<P>, StoredOutput<P>,
                                   Conditional<kScattersRows<P>, CodedStreamKOutput<P>, CodedOutput<P>>>;

}  // namespace flashjit::sm90
