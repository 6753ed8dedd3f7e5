// After the backward pass: dQ from its fp32 accumulator's layout to rows, of elements or fp32.
#pragma once

#include "flashjit/common/out_element.cuh"
#include "flashjit/common/visible.cuh"
#include "flashjit/sm80/dq_layout.cuh"

namespace flashjit::sm80 {

/// One CTA of 128 threads for 128 queries of one head; grid: batch * heads_q * seqlen_q_padded / 128.
template <class P>
__device__ void convert_dq(const Params& p) {
  using Element = GradElement<P>;
  constexpr int kVectors = sizeof(Element) / 2;  // of eight columns
  constexpr int kRows = 128, kColumns = (P::kHeadDim + 15) / 16 * 16, kGroups = kColumns / 16;
  const int tiles = p.seqlen_q_padded / kRows;
  const int first = static_cast<int>(blockIdx.x % tiles) * kRows;
  const long long head = blockIdx.x / tiles;
  const int h = static_cast<int>(head % p.heads_q);
  const Sequence<P> sequence(p, static_cast<int>(head / p.heads_q));
  const int seqlen_q = sequence.seqlen_q(p);
  Element* dq = sequence.template q_pointer<Element>(p.dq, h, 0);
  const float* accumulator = p.dq_accum + (head * p.seqlen_q_padded + first) * kColumns;

  for (int i = threadIdx.x; i < kRows * kGroups; i += 128) {
    const int row = i / kGroups, group = i % kGroups;
    if (first + row >= seqlen_q) break;
    union Vector {
      uint4 whole[2 * kVectors];
      Element element[16];
    } out;
    const float4* from = reinterpret_cast<const float4*>(accumulator + row * kColumns + group * 16);
#pragma unroll
    for (int lane = 0; lane < 4; ++lane) {
      const float4 four = from[lane];
      const float values[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int value = 0; value < 4; ++value)
        out.element[dq_column(lane * 4 + value)] = from_float<Element>(values[value] * p.softmax_scale);
    }
    Element* at = dq + (first + row) * p.dq.stride_s + group * 16;
    if constexpr (P::kAddGrads) {
#pragma unroll
      for (int column = 0; column < 16; ++column)
        if (group * 16 + column < P::kHeadDim) out.element[column] += at[column];
    }
    uint4* to = reinterpret_cast<uint4*>(at);
    to[0] = out.whole[0];
    if constexpr (P::kFp32Grads) to[1] = out.whole[1];
    if (P::kHeadDim % 16 == 0 || group + 1 < kGroups) {
      to[kVectors] = out.whole[kVectors];
      if constexpr (P::kFp32Grads) to[kVectors + 1] = out.whole[kVectors + 1];
    }
  }
}

}  // namespace flashjit::sm80
