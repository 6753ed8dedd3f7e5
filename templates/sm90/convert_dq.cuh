// What the warps of the backward pass that have nothing else to do, do for dQ: zeros where it will soon be
// added up, and from its fp32 fragments the element type when all has been added. Most of both is in L2 then.
#pragma once

#include "flashjit/common/tile_walk.cuh"
#include "flashjit/common/wait.cuh"
#include "flashjit/sm90/dq_fragments.cuh"
#include "flashjit/sm90/fragment.cuh"

namespace flashjit::sm90 {

constexpr int kDqWarpRows = 16;  ///< of a block, that a warp's fragments have

/// Converts a warp's rows of a head from query `first` on.
template <class P>
__device__ __forceinline__ void convert_dq_rows(const Params& p, const Sequence<P>& sequence, int h,
                                                int first, unsigned lane) {
  using Element = typename P::Element;
  constexpr int kColumns = dq_columns(P::kHeadDim);
  // Columns at a time, as the loading group is short of registers; in a loop, as it compiles sooner.
  constexpr int kSlice = kColumns <= 64 ? kColumns : 32;
  const int warp = first % kDqRows / kDqWarpRows;
  const int row = first + static_cast<int>(lane / 4), rows = sequence.seqlen_q(p) - row;
  const float4* from = reinterpret_cast<const float4*>(
      p.dq_accum + (sequence.stats_row(p, h) + first / kDqRows * kDqRows) * kColumns +
      (warp * 32 + lane) * 4);
  unsigned short* to = sequence.q_pointer(p.dq, h, row);
#pragma unroll 1
  for (int column = 0; column < kColumns; column += kSlice) {
    // All of a slice's loads before its first store, which the compiler must not move them over.
    alignas(16) float values[kSlice / 2] = {};
#pragma unroll
    for (int i = 0; i < kSlice / 8; ++i)
      if (kColumns % kSlice == 0 || column + i * 8 < kColumns)
        reinterpret_cast<float4&>(values[i * 4]) = __ldcg(from + (column / 8 + i) * (kDqStep / 4));
#pragma unroll
    for (float& value : values) value *= p.softmax_scale;
    store_rows<Element>(values, P::kHeadDim / 8 - column / 8, to + column, p.dq.stride_s, rows,
                        static_cast<int>(lane));
  }
}

/// What has been begun: KV tiles, and pieces of the accumulator to clear.
struct Begun {
  int kv_work, clear_work;
};
__device__ __forceinline__ Begun begun(const Params& p) {
  Begun now;
  asm volatile("ld.relaxed.gpu.global.v2.s32 {%0, %1}, [%2];"
               : "=r"(now.kv_work), "=r"(now.clear_work)
               : "l"(p.semaphores));
  return now;
}
__device__ __forceinline__ bool is_left_to_clear(const Params& p, const Begun& now) {
  return now.clear_work < pieces_to_clear(p) * p.heads_kv * p.batch;
}
/// Whether what is left will be needed soon: about a KV tile's time after those that are begun, in which all
/// blocks begin as many heads as the preprocess entry has cleared, by as many query heads as share one. The
/// mixed heads begin together.
template <class P>
__device__ __forceinline__ bool is_to_clear(const Params& p, const Begun& now) {
  const long long works = kv_work_tiles_of_head<P>(p), pieces = pieces_to_clear(p),
                  group = p.qhead_per_kvhead();
  if constexpr (kLptOrder<P>) {
    const long long before_mixed = (p.heads_kv * p.batch - p.lpt_heads) * works - now.kv_work;
    if (before_mixed * group < (p.heads_cleared + group) * works) return true;
  }
  return (now.clear_work * works - now.kv_work * pieces) * group < (p.heads_cleared + group) * works * pieces;
}
/// By a whole warp.
template <class P>
__device__ __forceinline__ void clear_piece(const Params& p, unsigned lane) {
  const int taken = lane == 0 ? atomicAdd(clear_counter(p), 1) : 0;
  const int number = __shfl_sync(kWholeWarp, taken, 0), pieces = pieces_to_clear(p);
  if (number >= pieces * p.heads_kv * p.batch) return;
  constexpr int kFloats = kClearRows * dq_columns(P::kHeadDim);
  float4* to = reinterpret_cast<float4*>(p.dq_accum + static_cast<long long>(number) * kFloats) + lane;
#pragma unroll 8
  for (int i = 0; i < kFloats / 4; i += 32) to[i] = float4{0, 0, 0, 0};
  publish_to_adders();
  __syncwarp();
  if (lane != 0) return;
  __threadfence();
  atomicAdd(cleared_semaphore(p, 0, number / pieces), 1);
  atomicAdd(done_semaphore(p, 0, number / pieces), 1);
}

/// Until a head's accumulator is clear. By a thread that adds to it.
template <class P>
__device__ __forceinline__ void wait_cleared(const Params& p, int b, int h_kv) {
  if (b * p.heads_kv + h_kv < p.heads_cleared) return;
  wait_semaphore<P, 32>(cleared_semaphore(p, b, h_kv), pieces_to_clear(p));
  publish_to_adders();
}

/// How many rows a warp takes at a time. Where there are few KV tiles, converting takes as long as all else:
/// then more, as each taking and each look at a head is a wait; else few, as all wait for the last. Not so
/// many that clearing, of which each taking reminds, comes too late.
template <class P>
__device__ __forceinline__ int dq_rows_taken(const Params& p) {
  constexpr int kMany = 32, kFewTiles = 8;
  const bool many = kv_tiles<P>(p) <= kFewTiles && p.batch * p.heads_q >= static_cast<int>(gridDim.x);
  return many || P::kHeadDim <= 64 ? kMany : kMany / 2;
}

/// Takes rows of dQ until there are none, and converts them when their head's accumulator was cleared and all
/// KV tiles have added to it; clears what is to be cleared first. By whole warps, of any number: heads end in
/// the order in which they are begun.
template <class P>
__device__ __forceinline__ void convert_dq(const Params& p) {
  if (p.seqlen_q == 0) return;
  const int taken_rows = dq_rows_taken<P>(p);
  const int parts = (p.seqlen_q + taken_rows - 1) / taken_rows;
  const auto lane = [] { return thread_now() % 32; };  // asked for anew: registers are short
  const auto take = [&] { return lane() == 0 ? atomicAdd(convert_counter(p), 1) : 0; };
  int taken = take();
  Begun now = begun(p);
  const auto clear = [&] {
    if (!__shfl_sync(kWholeWarp, is_left_to_clear(p, now), 0)) return;
    if (__shfl_sync(kWholeWarp, is_to_clear<P>(p, now), 0)) clear_piece<P>(p, lane());
    now = begun(p);
  };
#pragma unroll 1
  while (true) {
    const int number = __shfl_sync(kWholeWarp, taken, 0), head = number / parts;
    if (head >= p.batch * p.heads_q) break;
    taken = take();  // the next, to be there in time
    const int b = head / p.heads_q, h = head % p.heads_q;
    const int* done = done_semaphore(p, b, h / p.qhead_per_kvhead());
    const int all_done = pieces_to_clear(p) + kDqParts<P> * kv_work_tiles_of_head<P>(p);
    wait_until<P>(
        [&] {
          clear();
          return __all_sync(kWholeWarp, load_acquire(done) == all_done);
        },
        [] { __nanosleep(200); });
    const Sequence<P> sequence(p, b);
    const int first = number % parts * taken_rows, end = min(first + taken_rows, sequence.seqlen_q(p));
#pragma unroll 1
    for (int row = first; row < end; row += kDqWarpRows) convert_dq_rows(p, sequence, h, row, lane());
  }
}

}  // namespace flashjit::sm90
