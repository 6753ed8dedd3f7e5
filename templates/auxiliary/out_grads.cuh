// Before the backward pass of a spec with out_mod: dO of O before that program, from the gradient of what the
// program gave, and the gradients of the captured tensors that it reads. All other kernels read this dO. Its
// cost: NOTES.md#gates-of-os-elements.
#pragma once

#include "flashjit/auxiliary/element_grad_sums.cuh"
#include "flashjit/common/element.cuh"
#include "flashjit/common/visible.cuh"

namespace flashjit::auxiliary {

/// One CTA of 128 threads for 128 queries of one head, each warp 32 of them, a lane a column; grid: batch *
/// heads_q * seqlen_q_padded / 128.
template <class P>
__device__ void out_grads(const Params& p) {
  using Element = typename P::Element;
  constexpr int kRowsOfWarp = 32, kRowsAtOnce = 8;
  const int tiles = p.seqlen_q_padded / 128;
  const int first =
      static_cast<int>(blockIdx.x % tiles) * 128 + static_cast<int>(threadIdx.x) / 32 * kRowsOfWarp;
  const int batch_head = static_cast<int>(blockIdx.x) / tiles, h = batch_head % p.heads_q;
  const Sequence<P> sequence(p, batch_head / p.heads_q);
  const auto head = sequence.head(p, h);
  const int end = min(first + kRowsOfWarp, sequence.seqlen_q(p));
  const auto element_at = [&](const TensorParam& tensor, int row, int column) {
    return sequence.template q_pointer<Element>(tensor, h, row) + column;
  };
#pragma unroll 1
  for (int column = static_cast<int>(threadIdx.x) % 32; column / 32 * 32 < P::kHeadDimV; column += 32) {
    const bool exists = column < P::kHeadDimV;
    ElementGradSums<P::kOutModGrads> sums;
    const auto add = [&](auto which, float* at, float value) { sums.add(which, at, value); };
#pragma unroll 1
    for (int row = first; row < end; row += kRowsAtOnce) {
      float out[kRowsAtOnce] = {}, dout[kRowsAtOnce] = {};
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        if (!exists || row + i >= end) continue;
        out[i] = as_read(load_element(element_at(p.o, row + i, column)));
        dout[i] = as_read(load_element(element_at(p.out_mod, row + i, column)));
      }
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        if (row + i >= end) break;
        const Position q = position(row + i);
        const float inner = chained(dout[i], P::out_mod_grad(p, head, out[i], q, column));
        if (exists) *element_at(p.dout, row + i, column) = from_float<Element>(inner);
        if (P::kOutModGrads > 0) P::add_out_mod_grads(p, head, dout[i], out[i], q, column, add);
      }
    }
    if (P::kOutModGrads > 0) sums.end();
  }
}

}  // namespace flashjit::auxiliary
