// dQ from its fp32 fragments to the element type, by the warps of the backward pass that have nothing else to
// do: most of it has just been added, and is in L2.
#pragma once

#include "flashjit/common/tile_walk.cuh"
#include "flashjit/common/wait.cuh"
#include "flashjit/sm90/dq_fragments.cuh"
#include "flashjit/sm90/fragment.cuh"

namespace flashjit::sm90 {

/// Of each four lanes the i-th gives its i-th word to each of the four, by their numbers.
__device__ __forceinline__ uint4 transpose_among_four(const unsigned (&mine)[4], unsigned lane) {
  unsigned all[4];
#pragma unroll
  for (int round = 0; round < 4; ++round) {
    // Each pair of lanes swaps: an index known only at run time would put the words into local memory.
    const unsigned other = lane ^ round;
    const unsigned send = other == 0 ? mine[0] : other == 1 ? mine[1] : other == 2 ? mine[2] : mine[3];
    const unsigned got = __shfl_xor_sync(kWholeWarp, send, round);
#pragma unroll
    for (unsigned i = 0; i < 4; ++i)
      if (i == other) all[i] = got;
  }
  return {all[0], all[1], all[2], all[3]};
}

constexpr int kDqWarpRows = 16;  ///< of a block, that a warp's fragments have

/// Converts a warp's rows of a head from query `first` on.
template <class P>
__device__ __forceinline__ void convert_dq_rows(const Params& p, const Sequence<P>& sequence, int h,
                                                int first, unsigned lane) {
  using Element = typename P::Element;
  constexpr int kColumns = dq_columns(P::kHeadDim);
  constexpr int kSlice = 48;  // columns at a time: the loading group is short of registers
  const int warp = first % kDqRows / kDqWarpRows;
  // Of each sixteen columns of rows lane / 4 and lane / 4 + 8 a lane stores the half of one row.
  const int row = first + static_cast<int>(lane / 4 + lane % 4 / 2 * 8);
  const bool inside = row < sequence.seqlen_q(p);
  const float4* from = reinterpret_cast<const float4*>(
      p.dq_accum + (sequence.stats_row(p, h) + first / kDqRows * kDqRows) * kColumns +
      (warp * 32 + lane) * 4);
  auto* to = sequence.q_pointer(p.dq, h, row) + lane % 2 * 8;
#pragma unroll
  for (int slice = 0; slice < kColumns; slice += kSlice) {
    // All of a slice's loads before its first store, which the compiler must not move them over.
    float4 values[kSlice / 8];
#pragma unroll
    for (int i = 0; i < kSlice / 8; ++i)
      if (slice + i * 8 < kColumns) values[i] = __ldcg(from + (slice / 8 + i) * (kDqStep / 4));
#pragma unroll
    for (int i = 0; i < kSlice / 8; i += 2) {
      const int column = slice + i * 8;
      if (column >= kColumns) break;
      const float4 left = values[i], right = values[i + 1];
      const float scale = p.softmax_scale;
      const unsigned words[4] = {
          pack<Element>(left.x * scale, left.y * scale), pack<Element>(right.x * scale, right.y * scale),
          pack<Element>(left.z * scale, left.w * scale), pack<Element>(right.z * scale, right.w * scale)};
      const uint4 whole = transpose_among_four(words, lane % 4);
      if (inside && (column + 16 <= P::kHeadDim || lane % 2 == 0))
        *reinterpret_cast<uint4*>(to + column) = whole;
    }
  }
}

/// Takes rows of dQ until there are none, and converts them when all KV tiles have added to their head's. By
/// whole warps, of any number: heads end in the order in which they are begun.
template <class P>
__device__ __forceinline__ void convert_dq(const Params& p) {
  if (p.seqlen_q == 0) return;
  constexpr int kRows = P::kHeadDim > 64 ? 16 : 32;
  const unsigned parts = (p.seqlen_q + kRows - 1) / kRows, heads = p.heads_q, all = parts * heads * p.batch;
  const unsigned lane = thread_now() % 32;
  const auto take = [&] { return lane == 0 ? atomicAdd(next_dq_work(p), 1) : 0; };
  int taken = take();
#pragma unroll 1
  while (true) {
    const unsigned number = __shfl_sync(kWholeWarp, taken, 0), head = number / parts;
    if (number >= all) break;
    taken = take();  // the next, to be there in time
    const int b = static_cast<int>(head / heads), h = static_cast<int>(head % heads);
    const int h_kv = static_cast<int>(head % heads / (heads / p.heads_kv));
    await_turn<P, 200>(done_of(p, b, h_kv), kDqParts<P> * kv_tiles<P>(p));
    const Sequence<P> sequence(p, b);
    const int first = static_cast<int>(number % parts) * kRows,
              end = min(first + kRows, sequence.seqlen_q(p));
#pragma unroll 1
    for (int row = first; row < end; row += kDqWarpRows) convert_dq_rows(p, sequence, h, row, lane);
  }
}

}  // namespace flashjit::sm90
