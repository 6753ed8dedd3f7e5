// Q's rows in global memory, and their loads if the columns after V's are in a tensor of their own, as in
// latent attention.
#pragma once

#include "flashjit/sm80/forward_policy.cuh"
#include "flashjit/sm80/forward_smem.cuh"

namespace flashjit::sm80 {

/// The bits of an element of Q.
template <class P>
using QBits = Conditional<P::kQCodes, unsigned char, unsigned short>;

/// Rows of one of Q's tensors, from the tile's first on.
template <class P>
struct QRows {
  const QBits<P>* data;
  long long stride;
};

/// One tile from two tensors. V's columns are a multiple of 8, so no 16 bytes have columns of both.
template <class P>
struct QPartsLoader {
  template <class RowsOf>
  static __device__ __forceinline__ void load(const ForwardSmem<P>& smem, const Params& p,
                                              const RowsOf& rows_of, int valid) {
    constexpr int kChunks = round_up(P::kHeadDim, 16) / 8;
    const QRows<P> first = rows_of(p.q), rope = rows_of(p.q_rope);
    for (int index = threadIdx.x; index < P::kBr * kChunks; index += ForwardPolicy<P>::kThreads) {
      const int row = index / kChunks, column = index % kChunks * 8;
      const bool in = row < valid && column < P::kHeadDim;
      const QBits<P>* from = column < P::kHeadDimV ? first.data + row * first.stride + column
                                                   : rope.data + row * rope.stride + (column - P::kHeadDimV);
      P::Copies::start_16(smem.q + (row * pitch(P::kHeadDim) + column) * 2, in ? from : first.data, in);
    }
  }
};

}  // namespace flashjit::sm80
