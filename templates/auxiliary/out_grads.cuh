// Before the backward pass of a spec with out_mod: dO of O before that program, from the gradient of what the
// program gave, and the gradients of the captured tensors that it reads. All other kernels read this dO.
#pragma once

#include "flashjit/common/element.cuh"
#include "flashjit/common/ptx.cuh"
#include "flashjit/common/visible.cuh"

namespace flashjit::auxiliary {

/// What a lane's elements of a column add to gradients of captured tensors: successive additions to one
/// element are summed first. Where columns share the element, a warp's are.
template <class P>
class OutGradSums {
 public:
  __device__ __forceinline__ auto adder() {
    return [this](auto which, float* at, float value) {
      if (!which.kByColumn) {
#pragma unroll
        for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(kWholeWarp, value, lanes);
        if (threadIdx.x % 32 != 0) return;
      }
      Sum& sum = sums_[which.kIndex];
      if (sum.at != at) {
        add_to_memory(sum.at, sum.value);
        sum = {at, 0.0f};
      }
      sum.value += value;
    };
  }
  __device__ __forceinline__ void end() {
#pragma unroll
    for (const Sum& sum : sums_) add_to_memory(sum.at, sum.value);
  }

 private:
  struct Sum {
    float* at = nullptr;
    float value = 0.0f;
  };
  Sum sums_[P::kOutModGrads > 0 ? P::kOutModGrads : 1];
};

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
    OutGradSums<P> sums;
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
        if (P::kOutModGrads > 0) P::add_out_mod_grads(p, head, dout[i], out[i], q, column, sums.adder());
      }
    }
    if (P::kOutModGrads > 0) sums.end();
  }
}

}  // namespace flashjit::auxiliary
