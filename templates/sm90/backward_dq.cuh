// dQ of the backward pass. The consumers compute partial dQ of each Q tile and KV tile, which goes through
// shared memory: a thread for each warpgroup adds it to the fp32 accumulator in global memory (`add_dq`), or,
// where the CTAs of a cluster sum up their partial dQ first, a warp does, or writes dQ itself (`sum_dq`).
// convert_dq.cuh has how the accumulator is cleared and converted.
#pragma once

#include "flashjit/sm90/backward_products.cuh"
#include "flashjit/sm90/backward_schedule.cuh"
#include "flashjit/sm90/convert_dq.cuh"
#include "flashjit/sm90/ds_grads.cuh"

namespace flashjit::sm90 {

// The consumers' side.

/// Stores steps [kFirst, kEnd) of a warpgroup's dQ to shared memory.
template <int kFirst, int kEnd, class P>
__device__ __forceinline__ void stage_dq(const BackwardSmem<P>& smem, unsigned i, int wg,
                                         const typename BackwardFragments<P>::Dq& dq) {
  using Policy = BackwardPolicy<P>;
  const int stage = i % P::kStages;
#pragma unroll
  for (int step = kFirst; step < kEnd; ++step)
    if (!Policy::kSplitsColumns || step < Policy::own_dq_columns(wg) / 8)
      *reinterpret_cast<float4*>(smem.pointer(smem.dq(wg, stage, step)) + threadIdx.x % 128 * 16) = {
          dq[step * 4], dq[step * 4 + 1], dq[step * 4 + 2], dq[step * 4 + 3]};
}

/// Sends a warpgroup's dQ of Q tile i to the CTAs that sum up its columns.
template <class P>
__device__ __forceinline__ void send_dq(const BackwardSmem<P>& smem, unsigned i, int wg,
                                        const typename BackwardFragments<P>::Dq& dq) {
  using Policy = BackwardPolicy<P>;
  const unsigned from_here = smem.dq_from(Policy::rank(), wg, i) + threadIdx.x % 128 * 16;
#pragma unroll
  for (int cta = 0; cta < Policy::kClusterSize; ++cta) {
    const unsigned to = in_cta(from_here, cta), full = in_cta(smem.partial_dq_full(wg, i), cta);
#pragma unroll
    for (int step = 0; step < Policy::kSummedSteps; ++step) {
      const float* part = dq + (cta * Policy::kSummedSteps + step) * 4;
      store_remote(to + step * kDqStepBytes, float4{part[0], part[1], part[2], part[3]}, full);
    }
  }
}

/// Says that a warpgroup's dQ of Q tile i is stored or sent; or that there is no Q tile i.
template <class P>
__device__ __forceinline__ void signal_dq_full(const BackwardSmem<P>& smem, unsigned i, int wg) {
  if (!BackwardPolicy<P>::kSumsDq) publish_to_async_proxy();
  DqRing<P>::commit_thread(smem, wg, i);
}

/// Where a warpgroup's whole dQ goes first; DqTarget<P> names one of these types.
template <class P>
struct DqToStage {
  using Dq = typename BackwardFragments<P>::Dq;
  static __device__ __forceinline__ void store(const BackwardSmem<P>& smem, unsigned i, int wg,
                                               const Dq& dq) {
    stage_dq<0, BackwardPolicy<P>::kDqSteps>(smem, i, wg, dq);
  }
};
template <class P>
struct DqToCluster {
  using Dq = typename BackwardFragments<P>::Dq;
  static __device__ __forceinline__ void store(const BackwardSmem<P>& smem, unsigned i, int wg,
                                               const Dq& dq) {
    send_dq(smem, i, wg, dq);
  }
};
template <class P>
using DqTarget = Conditional<BackwardPolicy<P>::kSumsDq, DqToCluster<P>, DqToStage<P>>;

/// Hands on a warpgroup's whole dQ of Q tile i.
template <class P>
__device__ __forceinline__ void hand_on_dq(const BackwardSmem<P>& smem, unsigned i, int wg,
                                           const typename BackwardFragments<P>::Dq& dq) {
  DqRing<P>::acquire(smem, wg, i);
  DqTarget<P>::store(smem, i, wg, dq);
  signal_dq_full(smem, i, wg);
}

// The side of the warps beside the producer.

/// Counts one more part of a KV tile's dQ as added to global memory, for a head of K and V.
__device__ __forceinline__ void count_done(int* done) {
  __threadfence();
  atomicAdd(done, 1);
}

/// Additions to a Q tile's dQ: in any order, or KV tile by KV tile (kDeterministic).
template <class P>
struct AnyDqOrder {
  __device__ __forceinline__ AnyDqOrder(const Params&, const BackwardSmem<P>&, const QTileInfo&, unsigned,
                                        int) {}
  /// dQ has been read from shared memory.
  __device__ __forceinline__ void end() const { bulk_wait_read(); }
};
template <class P>
struct KvTileDqOrder {
  int* semaphore;

  __device__ __forceinline__ KvTileDqOrder(const Params& p, const BackwardSmem<P>& smem, const QTileInfo& now,
                                           unsigned i, int wg)
      : semaphore(dq_semaphore<P>(p, smem.kv_tile_of(i).sequence.b, now.head, now.tile,
                                  BackwardPolicy<P>::dq_part(wg))) {
    wait_semaphore<P, 32>(semaphore, now.dq_order);
  }
  __device__ __forceinline__ void end() const {
    wait_lines_added();
    __threadfence();
    atomicAdd(semaphore, 1);
  }
};
template <class P>
using DqOrder = Conditional<P::kDeterministic, KvTileDqOrder<P>, AnyDqOrder<P>>;

/// Adds a warpgroup's dQ of each Q tile to global memory, by one thread. Wide, it also releases the stage,
/// over which dQ lay. Where there are gradients to make of dS, its whole warp makes them meanwhile.
template <class P>
__device__ __forceinline__ void add_dq(const Params& p, const BackwardSmem<P>& smem, int wg) {
  using Policy = BackwardPolicy<P>;
  constexpr int kColumns = dq_columns(P::kHeadDim);
  const int first_column = Policy::first_dq_column(wg);
  const int steps = min(Policy::end_column(kColumns) - first_column, Policy::own_dq_columns(wg)) / 8;
  const bool one = !DsGrads<P>::kWholeWarps || elected();
  // dS is so many Q tiles ahead of dQ.
  constexpr int kAhead = Policy::kWide ? 0 : 1;
  if (kAhead > 0) DsGrads<P>::add(p, smem, 0, wg);
  for (unsigned i = 0;; ++i) {
    DqRing<P>::wait_full(smem, wg, i);
    const QTileInfo& now = smem.q_tile(i);
    if (now.head < 0) break;
    // Read now, since the producer may overwrite what it said of the tile when the stage is released.
    int* done =
        now.last ? done_semaphore(p, smem.kv_tile_of(i).sequence.b, smem.kv_tile_of(i).h_kv) : nullptr;
    float* to =
        p.dq_accum + (now.stats_row + Policy::first_dq_row(wg)) * kColumns + first_column / 8 * kDqStep;
    const auto add_steps = [&](int first, int end) {
      if (first < min(end, steps))
        add_line(to + first * kDqStep, smem.dq(wg, i % P::kStages, first),
                 (min(end, steps) - first) * kDqStepBytes);
    };
    if (one && now.first) wait_cleared<P>(p, smem.kv_tile_of(i).sequence.b, smem.kv_tile_of(i).h_kv);
    const DqOrder<P> order(p, smem, now, i, wg);
    if (one) {
      constexpr int kOverQ = Policy::kDqStepsInDout, kBehindQ = kOverQ + Policy::kDqStepsInQ;
      add_steps(0, kOverQ);
      add_steps(kOverQ, kBehindQ);
      add_steps(kBehindQ, Policy::kDqSteps);
      ColumnSlices<P>::add_fifth(p, smem, now, i, wg);
    }
    DsGrads<P>::add(p, smem, i + kAhead, wg);  // while dQ is read
    if (!one) continue;
    order.end();
    DqRing<P>::release_thread(smem, wg, i);
    StageRelease<P>::after_dq(smem, i);
    if (done != nullptr) {
      wait_lines_added();
      count_done(done);
    }
  }
}

/// Sums up a lane's elements of sixteen rows of dQ over the cluster's CTAs, in the columns that this CTA sums
/// up. `partial`: the first CTA's.
template <class P>
__device__ __forceinline__ void sum_partial_dq(const char* partial,
                                               float (&sum)[BackwardPolicy<P>::kSummedSteps * 4]) {
  constexpr int kSteps = BackwardPolicy<P>::kSummedSteps;
#pragma unroll
  for (float& value : sum) value = 0.0f;
#pragma unroll
  for (int i = 0; i < BackwardPolicy<P>::kClusterSize * kSteps; ++i) {
    const float4 part = *reinterpret_cast<const float4*>(partial + i * kDqStepBytes);
    float* to = sum + i % kSteps * 4;
    to[0] += part.x, to[1] += part.y, to[2] += part.z, to[3] += part.w;
  }
}

/// Sums up, of a warpgroup's dQ of each Q tile, the columns that this CTA sums up, and writes them, or
/// adds them to global memory where the cluster does not have all keys. By a warp.
template <class P>
__device__ __forceinline__ void sum_dq(const Params& p, const BackwardSmem<P>& smem, int wg) {
  using Policy = BackwardPolicy<P>;
  constexpr int kSteps = Policy::kSummedSteps, kColumns = dq_columns(P::kHeadDim);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int first_column = Policy::first_dq_column(wg) + Policy::rank() * kSteps * 8;
  const int first_row = Policy::first_dq_row(wg);
#pragma unroll 1
  for (unsigned i = 0;; ++i) {
    // Not wait_full(), which finds the phase second (NOTES.md#ptxas-orders-equal-sources-differently).
    const int phase = DqRing<P>::phase(smem, wg, i);
    barrier_wait<P>(smem.dq_sent(i), phase);
    const QTileInfo& now = smem.q_tile(i);
    if (now.head < 0) break;
    const KvTileInfo<P>& kv_tile = smem.kv_tile_of(i);
    int* done = now.last ? done_semaphore(p, kv_tile.sequence.b, kv_tile.h_kv) : nullptr;
    if (!writes_dq<P>(p) && now.first) wait_cleared<P>(p, kv_tile.sequence.b, kv_tile.h_kv);
    const int row = now.tile * P::kBr + first_row + lane / 4, rows = kv_tile.sequence.seqlen_q(p) - row;
    auto* to = kv_tile.sequence.template q_pointer<GradBits<P>>(p.dq, now.head, row) + first_column;
    float* sum_at =
        p.dq_accum + (now.stats_row + first_row) * kColumns + first_column / 8 * kDqStep + lane * 4;
    const char* partial = smem.partial_dq(wg, i, lane * 16);
    if (lane == 0) barrier_expect(smem.partial_dq_full(wg, i), Policy::kDqSteps * kDqStepBytes);
    PartialDqRing<P>::wait_full(smem, wg, i);
#pragma unroll 1
    for (int warp = 0; warp < 4; ++warp) {  // of the warpgroup, whose sixteen rows these are
      alignas(16) float sum[kSteps * 4];
      sum_partial_dq<P>(partial + warp * kDqStepBytes / 4, sum);
      if (warp == 3) {
        DqRing<P>::release_thread(smem, wg, i);
        __syncwarp();
        if (lane < Policy::kClusterSize && lane != Policy::rank())
          barrier_arrive_remote(in_cta(smem.dq_read(i), lane));
      }
      if (writes_dq<P>(p)) {
#pragma unroll
        for (float& value : sum) value *= p.softmax_scale;
        store_grad_rows<P>(sum, min(P::kHeadDim / 8 - first_column / 8, kSteps),
                           to + warp * 16 * p.dq.stride_s, p.dq.stride_s, rows - warp * 16, lane);
      } else {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
          if (first_column + step * 8 < kColumns)
            add_global(sum_at + step * kDqStep + warp * kDqStep / 4,
                       reinterpret_cast<const float4&>(sum[step * 4]));
      }
    }
    if (writes_dq<P>(p) || done == nullptr) continue;
    __threadfence();
    __syncwarp();
    if (lane == 0) count_done(done);
  }
}

// The role of a warp for each consumer. kWhole: by all its lanes, else by one.
template <class P>
struct DqAdder {
  static constexpr bool kWhole = DsGrads<P>::kWholeWarps;
  static __device__ __forceinline__ void run(const Params& p, const BackwardSmem<P>& smem, int wg) {
    add_dq(p, smem, wg);
  }
};
template <class P>
struct DqSummer {
  static constexpr bool kWhole = true;
  static __device__ __forceinline__ void run(const Params& p, const BackwardSmem<P>& smem, int wg) {
    sum_dq(p, smem, wg);
  }
};
template <class P>
struct NoDqWarp {
  static constexpr bool kWhole = false;
  static __device__ __forceinline__ void run(const Params&, const BackwardSmem<P>&, int) {}
};
template <class P>
using DqWarp =
    Conditional<kOwnTiles<P>, NoDqWarp<P>, Conditional<BackwardPolicy<P>::kSumsDq, DqSummer<P>, DqAdder<P>>>;

}  // namespace flashjit::sm90
