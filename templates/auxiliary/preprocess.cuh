// Before the backward pass: D = rowsum(dO * O) - dLSE, LSE padded to whole tiles, the score's row terms,
// zeros in the dQ accumulator (all of it, or the first heads) and in rows of no sequence, and the semaphores.
#pragma once

#include "flashjit/common/semaphores.cuh"
#include "flashjit/common/unused_rows.cuh"
#include "flashjit/common/weight_rows.cuh"

namespace flashjit::auxiliary {

constexpr int kPreprocessedRows = 128;

/// Zeros where dQ is added up.
template <class P>
__device__ __forceinline__ void clear_dq(const Params& p, int head, int first) {
  constexpr int kColumns = (P::kHeadDim + 15) / 16 * 16;
  const long long row = static_cast<long long>(head) * p.seqlen_q_padded + first;
  float4* accumulator = reinterpret_cast<float4*>(p.dq_accum + row * kColumns);
  for (int i = threadIdx.x; i < kPreprocessedRows * kColumns / 4; i += 128)
    accumulator[i] = float4{0, 0, 0, 0};
}

/// Zeros where dK and dV are added up, with lists of keys. By all threads of the grid.
template <class P>
__device__ __forceinline__ void clear_dkdv(const Params& p) {
  const long long rows = static_cast<long long>(p.batch) * p.heads_kv * p.seqlen_kv,
                  threads = gridDim.x * 128ll;
  const auto clear = [&](float* to, int columns) {
    for (long long i = blockIdx.x * 128ll + threadIdx.x; i < rows * columns / 4; i += threads)
      reinterpret_cast<float4*>(to)[i] = float4{0, 0, 0, 0};
  };
  clear(p.dk_splits, P::kHeadDim);
  clear(p.dv_splits, P::kHeadDimV);
}

/// All of common/semaphores.cuh, or the two counters of simt/capture_grads.cuh. The heads that clear_dq()
/// clears count as cleared.
template <class P>
__device__ __forceinline__ void reset_semaphores(const Params& p) {
  const long long of_dq =
      P::kDeterministic ? static_cast<long long>(p.heads_q) * q_tiles<P>(p) * kDqSemaphores : 0;
  const long long count =
      kTileCounters + p.batch * (p.heads_kv * kHeadSemaphores + of_dq) + (P::kClaimsTiles ? kTileClaims : 0);
  const int heads = p.batch * p.heads_kv, pieces = pieces_to_clear(p);
#pragma unroll 1
  for (long long i = blockIdx.x * 128ll + threadIdx.x; i < count; i += gridDim.x * 128ll) {
    const long long of_head = i - kTileCounters;
    const bool is_of_head = of_head >= 0 && of_head < heads * kHeadSemaphores;
    const bool cleared = is_of_head && static_cast<int>(of_head) % heads < p.heads_cleared;
    p.semaphores[i] = cleared ? pieces : 0;
  }
  if (p.dq_accum != nullptr && blockIdx.x == 0 && threadIdx.x == clear_counter(p) - p.semaphores)
    *clear_counter(p) = p.heads_cleared * pieces;
}

/// One CTA of 128 threads for 128 queries of one head; grid: batch * heads_q * seqlen_q_padded / 128.
template <class P>
__device__ void preprocess(const Params& p) {
  // With kClaimsTiles the next grid reads what grids before this one have written, before it waits.
  if constexpr (!P::kClaimsTiles) let_next_grid_start<P>();
  wait_for_prior_grid<P>();
  if constexpr (P::kClaimsTiles) let_next_grid_start<P>();
  zero_unused_rows_of_gradients<P>(p);
  if constexpr (P::kIndices) clear_dkdv<P>(p);
  const int tiles = p.seqlen_q_padded / kPreprocessedRows;
  const int first = static_cast<int>(blockIdx.x % tiles) * kPreprocessedRows;
  const int head = static_cast<int>(blockIdx.x) / tiles, h = head % p.heads_q;
  const Sequence<P> sequence(p, head / p.heads_q);
  const int first_of_warp = first + static_cast<int>(threadIdx.x) / 32 * kRowsOfWarp;
  RowStatsFinder<P>::find(p, sequence, h, head, first_of_warp, [&] {
    if (p.dq_accum != nullptr && head / p.qhead_per_kvhead() < p.heads_cleared) clear_dq<P>(p, head, first);
    if (p.semaphores != nullptr) reset_semaphores<P>(p);
  });
}

}  // namespace flashjit::auxiliary
