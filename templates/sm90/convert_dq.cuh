// After the backward pass: dQ from its fp32 fragments to the element type.
#pragma once

#include "flashjit/common/visible.cuh"
#include "flashjit/sm90/dq_fragments.cuh"

namespace flashjit::sm90 {

/// Lane i of each four gives its i-th word to each of the four, by their numbers.
__device__ __forceinline__ uint4 transpose_among_four(const unsigned (&mine)[4]) {
  const int lane = threadIdx.x % 4;
  unsigned all[4];
#pragma unroll
  for (int round = 0; round < 4; ++round) {
    // Each pair of lanes swaps: an index known only at run time would put the words into local memory.
    const int other = lane ^ round;
    const unsigned send = other == 0 ? mine[0] : other == 1 ? mine[1] : other == 2 ? mine[2] : mine[3];
    const unsigned got = __shfl_xor_sync(kWholeWarp, send, round);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (i == other) all[i] = got;
  }
  return {all[0], all[1], all[2], all[3]};
}

/// One block of 128 threads for 128 queries of one head; grid: batch * heads_q * seqlen_q_padded / 128.
template <class P>
__device__ void convert_dq(const Params& p) {
  using Element = typename P::Element;
  constexpr int kRows = 128, kColumns = dq_columns(P::kHeadDim);
  const int tiles = p.seqlen_q_padded / kRows;
  const int first = static_cast<int>(blockIdx.x % tiles) * kRows;
  const long long head = blockIdx.x / tiles;
  const Sequence<P> sequence(p, static_cast<int>(head / p.heads_q));
  const int h = static_cast<int>(head % p.heads_q), seqlen_q = sequence.seqlen_q(p);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // Of each sixteen columns of rows lane / 4 and lane / 4 + 8 a lane stores the half of one row.
  const int row = warp * 16 + lane / 4 + lane % 4 / 2 * 8;
  for (int block = first; block < min(first + kRows, seqlen_q); block += kDqRows) {
    const float4* from = reinterpret_cast<const float4*>(
        p.dq_accum + (head * p.seqlen_q_padded + block) * kColumns + threadIdx.x * 4);
    // All of a slice's loads before its first store, which the compiler must not move them over.
    constexpr int kSlice = 64;
    for (int slice = 0; slice < kColumns; slice += kSlice) {
      float4 values[kSlice / 8];
#pragma unroll
      for (int i = 0; i < kSlice / 8; ++i)
        if (slice + i * 8 < kColumns) values[i] = from[(slice / 8 + i) * (kDqStep / 4)];
#pragma unroll
      for (int i = 0; i < kSlice / 8; i += 2) {
        const float4 left = values[i], right = values[i + 1];
        const float scale = p.softmax_scale;
        const unsigned words[4] = {
            pack<Element>(left.x * scale, left.y * scale), pack<Element>(right.x * scale, right.y * scale),
            pack<Element>(left.z * scale, left.w * scale), pack<Element>(right.z * scale, right.w * scale)};
        const uint4 whole = transpose_among_four(words);
        const int at = slice + i * 8 + lane % 2 * 8;
        if (block + row < seqlen_q && at < P::kHeadDim)
          *reinterpret_cast<uint4*>(sequence.q_pointer(p.dq, h, block + row) + at) = whole;
      }
    }
  }
}

}  // namespace flashjit::sm90
