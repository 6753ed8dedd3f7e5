// Rows in the backward pass of a program that gives P (kWeightMod): there is no LSE and no D, which say which
// rows exist.
#pragma once

#include "flashjit/common/row_stats.cuh"

namespace flashjit {

template <class P>
struct SoftmaxRowStats {
  static __device__ __forceinline__ void find(const Params& p, const Sequence<P>& sequence, int h, int head,
                                              int first, const auto& meanwhile) {
    find_row_stats<P>(p, sequence, h, head, first, meanwhile);
  }
};

/// LSE and D of rows that do not exist are infinity, and else 0. O, dO and LSE are not read.
template <class P>
struct ProgramRowStats {
  static __device__ __forceinline__ void find(const Params& p, const Sequence<P>& sequence, int /*h*/,
                                              int head, int first, const auto& meanwhile) {
    meanwhile();
    const int row = first + static_cast<int>(threadIdx.x) % 32;
    const long long at = static_cast<long long>(head) * p.seqlen_q_padded + row;
    p.lse_padded[at] = p.d[at] = row < sequence.seqlen_q(p) ? 0.0f : infinity();
  }
};

template <class P>
using RowStatsFinder = Conditional<P::kWeightMod, ProgramRowStats<P>, SoftmaxRowStats<P>>;

}  // namespace flashjit
