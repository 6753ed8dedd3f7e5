// O as codes (kOutCodes) in place of StoredOutput<P> of forward_output.cuh; CompleteOutput<P> names one of
// both.
#pragma once

#include "flashjit/common/out_codes.cuh"
#include "flashjit/sm80/forward_output.cuh"

namespace flashjit::sm80 {

template <class P>
struct CodedOutput {
  static __device__ __forceinline__ void store(const Params& p, const Sequence<P>& sequence, int h,
                                               int /*split*/, int q_begin, int row, int seqlen_q, int lane,
                                               char* /*o_tile*/, OutTile<P>& o, const float (&scale)[2]) {
    static_assert(!P::kSplit && !ForwardPolicy<P>::kSharesRows, "a warp has whole rows");
    const int q = q_begin + row + lane / 4;
    scale_tile<P>(o, scale);
    const auto& all = reinterpret_cast<const float(&)[ForwardPolicy<P>::kOt * 4]>(o);
    store_codes<P, 0>(coded_row(p, sequence, h, q, q < seqlen_q), all);
    store_codes<P, 1>(coded_row(p, sequence, h, q + 8, q + 8 < seqlen_q), all);
  }
};

template <class P>
using CompleteOutput = Conditional<kOutCodes<P> && !P::kSplit, CodedOutput<P>, StoredOutput<P>>;

}  // namespace flashjit::sm80
