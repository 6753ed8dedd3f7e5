// Before the backward pass: D = rowsum(dO * O) - dLSE, LSE padded to whole tiles, what the score reads of
// each query where that is wanted, the counters, and zeros where dQ is added up (all, or those of the first
// heads) and in rows of no sequence.
#pragma once

#include "flashjit/common/ptx.cuh"
#include "flashjit/common/tile_walk.cuh"
#include "flashjit/common/unused_rows.cuh"

namespace flashjit::auxiliary {

/// One block of 128 threads for 128 queries of one head; grid: batch * heads_q * seqlen_q_padded / 128.
template <class P>
__device__ void preprocess(const Params& p) {
  let_next_grid_start<P>();
  zero_unused_rows_of_gradients<P>(p);
  using Element = typename P::Element;
  constexpr int kRows = 128, kVector = 16 / sizeof(Element), kChunks = P::kHeadDimV / kVector;
  const int tiles = p.seqlen_q_padded / kRows;
  const int first = static_cast<int>(blockIdx.x % tiles) * kRows;
  const long long head = blockIdx.x / tiles;
  const int h = static_cast<int>(head % p.heads_q);
  const Sequence<P> sequence(p, static_cast<int>(head / p.heads_q));
  const int seqlen_q = sequence.seqlen_q(p);
  const Element* o = sequence.template q_pointer<Element>(p.o, h, 0);
  const Element* dout = sequence.template q_pointer<Element>(p.dout, h, 0);

  // Eight neighbouring lanes share a row.
  const int part = threadIdx.x % 8;
  for (int row = first + static_cast<int>(threadIdx.x) / 8; row < first + kRows; row += 128 / 8) {
    float sum = 0.0f;
    if (row < seqlen_q) {
      for (int chunk = part; chunk < kChunks; chunk += 8) {
        union Vector {
          uint4 whole;
          Element element[kVector];
        } x, y;
        x.whole = *reinterpret_cast<const uint4*>(o + row * p.o.stride_s + chunk * kVector);
        y.whole = *reinterpret_cast<const uint4*>(dout + row * p.dout.stride_s + chunk * kVector);
#pragma unroll
        for (int i = 0; i < kVector; ++i) sum = fmaf(to_float(x.element[i]), to_float(y.element[i]), sum);
      }
    }
#pragma unroll
    for (int lanes = 4; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(kWholeWarp, sum, lanes);
    if (part == 0) {
      const long long at = head * p.seqlen_q_padded + row;
      const float lse = row < seqlen_q ? p.lse[head * p.seqlen_q + row] : -infinity();
      const bool has_p = tells_probabilities(lse);
      // dS = P (dP - D) + P dLSE. Without P dLSE does not count, and may be NaN.
      const float dlse = p.dlse != nullptr && has_p ? p.dlse[head * p.seqlen_q + row] : 0.0f;
      p.d[at] = sum - dlse;
      p.lse_log2[at] = has_p ? lse * kLog2E : infinity();
      // Behind the last row, too: of a score that is no number P would not be 0.
      if constexpr (P::kScoreRowTerm)
        if (p.row_terms != nullptr)
          p.row_terms[at] = P::score_row_term(p, sequence.head(p, h), position(row));
    }
  }
  if (p.dq_accum != nullptr && head / p.qhead_per_kvhead() < p.heads_cleared) {
    constexpr int kColumns = (P::kHeadDim + 15) / 16 * 16;
    float4* accumulator =
        reinterpret_cast<float4*>(p.dq_accum + (head * p.seqlen_q_padded + first) * kColumns);
    for (int i = threadIdx.x; i < kRows * kColumns / 4; i += 128) accumulator[i] = float4{0, 0, 0, 0};
  }
  if (p.semaphores != nullptr) {
    // All of common/tile_walk.cuh, or the two counters of simt/capture_grads.cuh.
    const long long turns =
        P::kDeterministic ? static_cast<long long>(p.heads_q) * q_tiles<P>(p) * kDqSemaphores : 0;
    const long long count = kTileCounters + p.batch * (p.heads_kv * kHeadSemaphores + turns);
    const int heads = p.batch * p.heads_kv, pieces = pieces_to_clear(p);
    for (long long i = blockIdx.x * 128ll + threadIdx.x; i < count; i += gridDim.x * 128ll) {
      const long long of_head = i - kTileCounters;
      const bool cleared =
          of_head >= 0 && of_head < heads * kHeadSemaphores && of_head % heads < p.heads_cleared;
      p.semaphores[i] = cleared ? pieces : 0;
    }
    if (p.dq_accum != nullptr && blockIdx.x == 0 && threadIdx.x == clear_counter(p) - p.semaphores)
      *clear_counter(p) = p.heads_cleared * pieces;
  }
}

}  // namespace flashjit::auxiliary
