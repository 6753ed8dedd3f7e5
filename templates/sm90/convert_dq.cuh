// The fp32 dQ accumulator before and after the additions: idle warps of the backward pass clear it, a head
// shortly before its KV tiles begin, and convert it to dQ when all KV tiles have added to it.
// Most of it is in L2 at both times.
#pragma once

#include "flashjit/common/tile_walk.cuh"
#include "flashjit/common/wait.cuh"
#include "flashjit/sm90/dq_fragments.cuh"
#include "flashjit/sm90/fragment.cuh"

namespace flashjit::sm90 {

constexpr int kDqWarpRows = 16;  ///< rows of a warp's fragments, of the accumulator's 64

/// Columns that are converted at a time, as the producer's warpgroup has few registers; in a loop, as it
/// compiles sooner.
template <class P>
constexpr int kConvertedColumns = dq_columns(P::kHeadDim) <= 64 ? dq_columns(P::kHeadDim) : 32;
/// Parts of the columns that different warps may take.
template <class P>
constexpr int kColumnParts = dq_columns(P::kHeadDim) > 64 ? 2 : 1;

/// Converts sixteen rows of a head from query `first` on, in the columns [column, end), by a warp.
template <class P>
__device__ __forceinline__ void convert_dq_rows(const Params& p, const Sequence<P>& sequence, int h,
                                                int first, int column, int end, unsigned lane) {
  constexpr int kColumns = dq_columns(P::kHeadDim), kSlice = kConvertedColumns<P>;
  const int warp = first % kDqRows / kDqWarpRows;
  const int row = first + static_cast<int>(lane / 4), rows = sequence.seqlen_q(p) - row;
  const float4* from = reinterpret_cast<const float4*>(
      p.dq_accum + (sequence.stats_row(p, h) + first / kDqRows * kDqRows) * kColumns +
      (warp * 32 + lane) * 4);
  auto* to = sequence.template q_pointer<GradBits<P>>(p.dq, h, row);
  // A slice is loaded before the one before it is stored: the compiler cannot move loads across stores.
  // Stores in fp32 leave no registers for it.
  constexpr bool kLoadsAhead = !P::kFp32Grads;
  using Values = float[kSlice / 2];
  const auto load = [&](int at, Values& values) {
#pragma unroll
    for (int i = 0; i < kSlice / 8; ++i)
      if (kColumns % kSlice == 0 || at + i * 8 < kColumns)
        reinterpret_cast<float4&>(values[i * 4]) = __ldcg(from + (at / 8 + i) * (kDqStep / 4));
  };
  alignas(16) Values values = {}, next = {};
  load(column, values);
#pragma unroll 1
  while (true) {
    const int behind = column + kSlice;
    if (kLoadsAhead && behind < end) load(behind, next);
#pragma unroll
    for (float& value : values) value *= p.softmax_scale;
    store_grad_rows<P>(values, P::kHeadDim / 8 - column / 8, to + column, p.dq.stride_s, rows,
                       static_cast<int>(lane));
    if (behind >= end) break;
    column = behind;
    if constexpr (!kLoadsAhead) load(column, values);
#pragma unroll
    for (int i = 0; kLoadsAhead && i < kSlice / 2; ++i) values[i] = next[i];
  }
}

/// How many KV tiles have been taken, and how many pieces of the accumulator to clear.
struct Progress {
  int kv_tiles, pieces;
};
template <class P>
__device__ __forceinline__ Progress load_progress(const Params& p) {
  Progress now;
  asm volatile("ld.relaxed.gpu.global.v2.s32 {%0, %1}, [%2];"
               : "=r"(now.kv_tiles), "=r"(now.pieces)
               : "l"(p.semaphores));
  if constexpr (P::kClaimsTiles) now.kv_tiles += min(static_cast<int>(gridDim.x), kClaimableTiles);
  return now;
}
__device__ __forceinline__ bool is_left_to_clear(const Params& p, const Progress& now) {
  return now.pieces < pieces_to_clear(p) * p.heads_kv * p.batch;
}
/// Whether the next piece will be needed soon: within about a KV tile's time. In that time all CTAs begin
/// heads_cleared heads of K and V (so many does the preprocess entry clear) by heads_q / heads_kv. The heads
/// in LPT order begin together.
template <class P>
__device__ __forceinline__ bool is_to_clear(const Params& p, const Progress& now) {
  const long long tiles = kv_work_tiles_of_head<P>(p), pieces = pieces_to_clear(p);
  const long long qhead_per_kvhead = p.qhead_per_kvhead();
  if constexpr (kKvTileLptOrder<P>) {
    const long long before_lpt = (p.heads_kv * p.batch - p.lpt_heads) * tiles - now.kv_tiles;
    if (before_lpt * qhead_per_kvhead < (p.heads_cleared + qhead_per_kvhead) * tiles) return true;
  }
  return (now.pieces * tiles - now.kv_tiles * pieces) * qhead_per_kvhead <
         (p.heads_cleared + qhead_per_kvhead) * tiles * pieces;
}
/// Takes the next piece and clears it, by a warp.
template <class P>
__device__ __forceinline__ void clear_piece(const Params& p, unsigned lane) {
  const int taken = lane == 0 ? atomicAdd(clear_counter(p), 1) : 0;
  const int index = __shfl_sync(kWholeWarp, taken, 0), pieces = pieces_to_clear(p);
  if (index >= pieces * p.heads_kv * p.batch) return;
  constexpr int kFloats = kClearRows * dq_columns(P::kHeadDim);
  float4* to = reinterpret_cast<float4*>(p.dq_accum + static_cast<long long>(index) * kFloats) + lane;
#pragma unroll 8
  for (int i = 0; i < kFloats / 4; i += 32) to[i] = float4{0, 0, 0, 0};
  publish_to_adders();
  __syncwarp();
  if (lane != 0) return;
  __threadfence();
  atomicAdd(cleared_semaphore(p, 0, index / pieces), 1);
  atomicAdd(done_semaphore(p, 0, index / pieces), 1);
}

/// Waits until a head's accumulator is cleared, by a thread that adds to it.
template <class P>
__device__ __forceinline__ void wait_cleared(const Params& p, int b, int h_kv) {
  if (b * p.heads_kv + h_kv < p.heads_cleared) return;
  wait_semaphore<P, 32>(cleared_semaphore(p, b, h_kv), pieces_to_clear(p));
  publish_to_adders();
}

/// What a warp takes of dQ at a time: rows, and all of their columns or one of `column_parts`.
struct DqPiece {
  int rows, column_parts;
};
/// Where KV tiles are few, converting takes as long as everything else: then more rows, as each taking and
/// each look at a head is a wait. Else few, as the kernel ends with the last warp. Not so many that clearing,
/// which a warp looks at between its takings, comes too late. With so few rows that not all of the grid's
/// warps get some, the smallest piece: the kernel ends by one warp's waits for memory.
template <class P>
__device__ __forceinline__ DqPiece dq_piece(const Params& p) {
  constexpr int kMany = 32, kFewTiles = 8, kWarpsOfCta = 9;
  const int heads = p.batch * p.heads_q, warps = static_cast<int>(gridDim.x) * kWarpsOfCta;
  const int smallest = heads * (p.seqlen_q_padded / kDqWarpRows);
  if (smallest <= warps) return {kDqWarpRows, smallest * kColumnParts<P> <= warps ? kColumnParts<P> : 1};
  const bool many = kv_tiles<P>(p) <= kFewTiles && heads >= static_cast<int>(gridDim.x);
  return {many || P::kHeadDim <= 64 ? kMany : kMany / 2, 1};
}

/// How many parts are added to the accumulator of a head of K and V, and pieces of it cleared.
template <class P>
__device__ __forceinline__ int all_done(const Params& p) {
  return pieces_to_clear(p) + kDqParts<P> * kv_work_tiles_of_head<P>(p);
}

/// Rows that the consumers of a CTA convert at a time, sixteen a warp.
constexpr int kConsumerWarps = 8, kConvertedRows = kConsumerWarps * kDqWarpRows;
/// Whether each CTA converts rows of its own when it has computed: where that is once or twice. The warps of
/// all CTAs that ask a counter for rows, and a head's semaphore whether they are complete, would take longer.
template <class P>
__device__ __forceinline__ bool converts_own_rows(const Params& p) {
  constexpr int kMostTurns = 2;
  return p.heads_cleared == p.heads_kv * p.batch &&
         p.batch * p.heads_q * ((p.seqlen_q + kConvertedRows - 1) / kConvertedRows) <=
             kMostTurns * static_cast<int>(gridDim.x);
}
/// Converts these rows, by the consumers. Nobody waits for them, so a CTA that comes late may have rows, too.
template <class P>
__device__ __forceinline__ void convert_own_rows(const Params& p) {
  const int of_head = (p.seqlen_q + kConvertedRows - 1) / kConvertedRows;
#pragma unroll 1
  for (int index = blockIdx.x; index < p.batch * p.heads_q * of_head; index += gridDim.x) {
    const int head = index / of_head, b = head / p.heads_q, h = head % p.heads_q;
    const int warp = static_cast<int>(thread_now()) / 32 - 4;
    if (warp == 0) wait_semaphore<P, 64>(done_semaphore(p, b, h / p.qhead_per_kvhead()), all_done<P>(p));
    named_barrier_sync(1, kConsumerWarps * 32);
    const Sequence<P> sequence(p, b);
    const int first = index % of_head * kConvertedRows + warp * kDqWarpRows;
    if (first < sequence.seqlen_q(p))
      convert_dq_rows(p, sequence, h, first, 0, dq_columns(P::kHeadDim), thread_now() % 32);
  }
}

/// Takes rows of dQ until there are none, and converts them when their head's accumulator is complete: it was
/// cleared, and all KV tiles have added to it. While it waits it clears what is to be cleared. By any number
/// of warps; heads become complete in the order in which their KV tiles are taken.
template <class P>
__device__ __forceinline__ void convert_dq(const Params& p) {
  if (p.seqlen_q == 0) return;
  const DqPiece piece = dq_piece<P>(p);
  const int chunks = (p.seqlen_q + piece.rows - 1) / piece.rows * piece.column_parts;  // of a head
  const auto lane = [] { return thread_now() % 32; };  // read anew: registers are short
  const auto take = [&] { return lane() == 0 ? atomicAdd(convert_counter(p), 1) : 0; };
  int taken = take();
  Progress now = load_progress<P>(p);
  const int all = all_done<P>(p);
  const auto clear = [&] {
    if (!__shfl_sync(kWholeWarp, is_left_to_clear(p, now), 0)) return;
    if (__shfl_sync(kWholeWarp, is_to_clear<P>(p, now), 0)) clear_piece<P>(p, lane());
    now = load_progress<P>(p);
  };
#pragma unroll 1
  while (true) {
    const int index = __shfl_sync(kWholeWarp, taken, 0), head = index / chunks;
    if (head >= p.batch * p.heads_q) break;
    taken = take();  // the next one, early
    const int b = head / p.heads_q, h = head % p.heads_q;
    const int* done = done_semaphore(p, b, h / p.qhead_per_kvhead());
    wait_until<P>(
        [&] {
          clear();
          return __all_sync(kWholeWarp, load_acquire(done) == all);
        },
        [] { __nanosleep(200); });
    const Sequence<P> sequence(p, b);
    const int chunk = index % chunks, first = chunk / piece.column_parts * piece.rows;
    const int end = min(first + piece.rows, sequence.seqlen_q(p));
    constexpr int kColumns = dq_columns(P::kHeadDim),
                  kHalf = kColumns / 2 / kConvertedColumns<P> * kConvertedColumns<P>;
    const bool halves = piece.column_parts > 1, second = halves && chunk % 2 != 0;
#pragma unroll 1
    for (int row = first; row < end; row += kDqWarpRows)
      convert_dq_rows(p, sequence, h, row, second ? kHalf : 0, halves && !second ? kHalf : kColumns, lane());
  }
}

}  // namespace flashjit::sm90
