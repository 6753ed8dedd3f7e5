// Before the backward pass of a spec with out_mod: dO of O before that program, from the gradient of what the
// program gave, and the gradients of the captured tensors that it reads. All other kernels read this dO. Its
// cost: NOTES.md#gates-of-os-elements.
#pragma once

#include "flashjit/auxiliary/element_grad_sums.cuh"
#include "flashjit/common/element.cuh"
#include "flashjit/common/visible.cuh"

namespace flashjit::auxiliary {

constexpr int kRowsOfWarp = 32;

// The way a kernel adds the gradients of a tile's elements; TileGrad<P> names one of these types.

template <class P>
struct NoTileGrad {
  __device__ __forceinline__ bool find(const Params&, const typename P::Head&) { return true; }
  __device__ __forceinline__ void add(int, int, const float (&)[8]) const {}
};
/// Each element of O has one of its own, so that eight are 32 bytes which nobody else adds to.
template <class P>
struct OwnTileGrad {
  OutModTileGrad grad;

  /// Whether it is as add() needs it.
  __device__ __forceinline__ bool find(const Params& p, const typename P::Head& head) {
    grad = P::out_tile_grad(p, head);
    return grad.own && (reinterpret_cast<unsigned long long>(grad.first) % 16 | grad.stride_q % 4) == 0;
  }
  __device__ __forceinline__ void add(int q, int column, const float (&x)[8]) const {
    float4* to = reinterpret_cast<float4*>(grad.row(q) + column);
    const float4 a = to[0], b = to[1];
    to[0] = {a.x + x[0], a.y + x[1], a.z + x[2], a.w + x[3]};
    to[1] = {b.x + x[4], b.y + x[5], b.z + x[6], b.w + x[7]};
  }
};
template <class P>
using TileGrad = Conditional<P::kOutTileGrad, OwnTileGrad<P>, NoTileGrad<P>>;

// A head's queries [first, end) by a warp, where the program reads a tensor's tile and other gradients are
// not wanted: whether it was done. OutGradsByRows<P> names one of these types.

template <class P>
struct NoRows {
  static __device__ __forceinline__ bool make(const Params&, const Sequence<P>&, const typename P::Head&, int,
                                              int) {
    return false;
  }
};
/// Eight columns a lane, if the tile holds all.
template <class P>
struct RowsOfTile {
  using Element = typename P::Element;

  static __device__ __forceinline__ bool make(const Params& p, const Sequence<P>& sequence,
                                              const typename P::Head& head, int first, int end) {
    constexpr int kChunks = P::kHeadDimV / 8;
    const OutModTile tile = P::out_tile(p, head);
    TileGrad<P> grad;
    if (!tile.holds(sequence.seqlen_q(p), P::kHeadDimV) || !grad.find(p, head)) return false;
#pragma unroll 2
    for (int i = static_cast<int>(threadIdx.x) % 32; i < (end - first) * kChunks; i += 32) {
      const int q = first + i / kChunks, column = i % kChunks * 8;
      const auto load = [&](const unsigned short* row) {
        return __ldg(reinterpret_cast<const uint4*>(row + column));
      };
      const uint4 o = load(sequence.q_pointer(p.o, head.h, q)),
                  dout = load(sequence.q_pointer(p.out_mod, head.h, q)), elements = load(tile.row(q));
      float of_element[8];
      const auto pair = [&](int i, unsigned o, unsigned dout, unsigned elements) {
        const OutModGrads low =
            P::out_mod_grads_of_element(p, head, static_cast<unsigned short>(elements), low_of<Element>(dout),
                                        low_of<Element>(o), position(q), column + i);
        const OutModGrads high = P::out_mod_grads_of_element(
            p, head, static_cast<unsigned short>(elements >> 16), high_of<Element>(dout), high_of<Element>(o),
            position(q), column + i + 1);
        of_element[i] = low.element, of_element[i + 1] = high.element;
        return pack<Element>(low.out, high.out);
      };
      *reinterpret_cast<uint4*>(sequence.q_pointer(p.dout, head.h, q) + column) = {
          pair(0, o.x, dout.x, elements.x), pair(2, o.y, dout.y, elements.y),
          pair(4, o.z, dout.z, elements.z), pair(6, o.w, dout.w, elements.w)};
      grad.add(q, column, of_element);
    }
    return true;
  }
};
template <class P>
using OutGradsByRows = Conditional<P::kOutTile && sizeof(typename P::Element) == 2 &&
                                       P::kOutModGrads == (P::kOutTileGrad ? 1 : 0),
                                   RowsOfTile<P>, NoRows<P>>;

/// One CTA of 128 threads for 128 queries of one head, each warp 32 of them, a lane a column; grid: batch *
/// heads_q * seqlen_q_padded / 128.
template <class P>
__device__ void out_grads(const Params& p) {
  using Element = typename P::Element;
  constexpr int kRowsAtOnce = 8;
  const int tiles = p.seqlen_q_padded / 128;
  const int first =
      static_cast<int>(blockIdx.x % tiles) * 128 + static_cast<int>(threadIdx.x) / 32 * kRowsOfWarp;
  const int batch_head = static_cast<int>(blockIdx.x) / tiles, h = batch_head % p.heads_q;
  const Sequence<P> sequence(p, batch_head / p.heads_q);
  const auto head = sequence.head(p, h);
  const int end = min(first + kRowsOfWarp, sequence.seqlen_q(p));
  if (OutGradsByRows<P>::make(p, sequence, head, first, end)) return;
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
