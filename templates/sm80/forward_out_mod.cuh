// A program of O's elements (kOutMod), before CompleteOutput<P> of forward_out_codes.cuh stores them;
// Output<P> names one of both.
#pragma once

#include "flashjit/common/out_tile.cuh"
#include "flashjit/sm80/forward_out_codes.cuh"

namespace flashjit::sm80 {

// What the program makes of a tile of O; ModifiedTile<P> names one of these types. `first_q`, `first`: of the
// lane's two rows, and of its columns.

/// Each element reads what it needs.
template <class P>
struct ModifiedElements {
  static __device__ __forceinline__ void modify(const Params& p, const typename P::Head& head, int first_q,
                                                int /*seqlen_q*/, int first, OutTile<P>& o) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Position q = position(first_q + half * 8);
#pragma unroll
      for (int n = 0; n < ForwardPolicy<P>::kOt * 2; ++n) {
        float& value = o[n / 2][half * 2 + n % 2];
        value = P::out_mod(p, head, value, q, first + n / 2 * 8 + n % 2);
      }
    }
  }
};
/// A tensor's rows are loaded for all elements of a row (kOutTile).
template <class P>
struct ModifiedByTile {
  static __device__ __forceinline__ void modify(const Params& p, const typename P::Head& head, int first_q,
                                                int seqlen_q, int first, OutTile<P>& o) {
    constexpr int kOt = ForwardPolicy<P>::kOt, kPart = kOt < 8 ? kOt : 8, kParts = (kOt + kPart - 1) / kPart;
    const OutModTile tile = P::out_tile(p, head);
    const bool whole = tile.holds(seqlen_q, P::kHeadDimV);
#pragma unroll
    for (int part = 0; part < 2 * kParts; ++part) {
      const int half = part % 2, begin = part / 2 * kPart, row = first_q + half * 8;
      OutModRow<kPart> elements;
      elements.start(tile, whole, row, row < seqlen_q, first_column<P>() + begin * 8,
                     own_chunks<P>() - begin);
      elements.exchange();
      const Position q = position(row);
#pragma unroll
      for (int n = 0; n < 2 * kPart; ++n) {
        const int ot = begin + n / 2;
        if (ot >= kOt) continue;
        float& value = o[ot][half * 2 + n % 2];
        value =
            P::out_mod_of_element(p, head, elements.element(n / 2, n % 2), value, q, first + ot * 8 + n % 2);
      }
    }
  }
};
template <class P>
using ModifiedTile = Conditional<P::kOutTile, ModifiedByTile<P>, ModifiedElements<P>>;

/// Stores the program's value of each element, found in fp32, and O as it was where the call wants that.
template <class P>
struct ModifiedOutput {
  static_assert(!P::kSplit, "a split has a part of O");

  static __device__ __forceinline__ void store(const Params& p, const Sequence<P>& sequence, int h, int split,
                                               int q_begin, int row, int seqlen_q, int lane, char* o_tile,
                                               OutTile<P>& o, const float (&scale)[2]) {
    const int first_q = q_begin + row + lane / 4, first = first_column<P>() + lane % 4 * 2;
    scale_tile<P>(o, scale);
    if (p.out_mod.data != nullptr) store_before(p, sequence, h, first_q, seqlen_q, first, o);
    ModifiedTile<P>::modify(p, sequence.head(p, h), first_q, seqlen_q, first, o);
    CompleteOutput<P>::store(p, sequence, h, split, q_begin, row, seqlen_q, lane, o_tile, o, {1.0f, 1.0f});
  }

 private:
  static __device__ __forceinline__ void store_before(const Params& p, const Sequence<P>& sequence, int h,
                                                      int first_q, int seqlen_q, int first,
                                                      const OutTile<P>& o) {
    using Element = typename P::Element;
    const int chunks = own_chunks<P>();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int q = first_q + half * 8;
      if (q >= seqlen_q) continue;
      Element* to = sequence.template q_pointer<Element>(p.out_mod, h, q) + first;
#pragma unroll
      for (int ot = 0; ot < ForwardPolicy<P>::kOt; ++ot)
        if (ot < chunks) store_pair(to + ot * 8, o[ot][half * 2], o[ot][half * 2 + 1]);
    }
  }
};

template <class P>
using Output = Conditional<P::kOutMod, ModifiedOutput<P>, CompleteOutput<P>>;

}  // namespace flashjit::sm80
