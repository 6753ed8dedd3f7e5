// dQ of the backward pass, from a warp group's registers to global memory.
#pragma once

#include "flashjit/sm90/backward_schedule.cuh"
#include "flashjit/sm90/convert_dq.cuh"
#include "flashjit/sm90/ds_grads.cuh"

namespace flashjit::sm90 {

/// Adds one of two warps' share of what dS of Q tile n gives to gradients of captures. Those who compute wait
/// for that before they write dS of the next tile but one.
template <class P>
__device__ __forceinline__ void add_ds(const Params& p, const BackwardTile<P>& tile, unsigned n, int half) {
  using Tile = BackwardTile<P>;
  using Element = typename P::Element;
  barrier_wait<P>(tile.ds_full(n), n / 2 & 1);
  __syncwarp();  // one lane was adding dQ
  const typename Tile::QTile& now = tile.staged(n);
  if (now.head < 0) return;
  const typename Tile::Place& place = tile.place(n);
  const auto head = place.sequence.head(p, now.head);
  const int q = now.tile * P::kBr, kv = place.kv_begin;
  if constexpr (P::kDifferenceGrads > 0)
    sum_diagonals<Element, Tile::kKeys, P::kBr>(
        tile.ds(n), tile.zeros(), half, [&](int difference, float sum) {
          P::add_capture_grads(p, head, sum, 0.0f, position(0), position(kv - q + difference),
                               [&](auto which, float* at, float value) {
                                 if constexpr (which.kPlaces == Places::by_difference)
                                   add_by_runs(at, which.kOfScore ? sum : value);
                               });
        });
  if constexpr (Tile::kAddsPlane) {
    const PlaneGrad to = P::plane_grad(p, head);
    constexpr int kKeys = Tile::kKeys / 2;
    add_plane_grads<Element, Tile::kKeys, kKeys, P::kBr>(to, to.in_fours(p.seqlen_kv), tile.ds(n), q, kv,
                                                         half * kKeys);
  }
  barrier_arrive(tile.ds_added(n));
}

/// Says of a head that one more part of a KV tile's dQ has been added, for which this thread has waited.
__device__ __forceinline__ void count_done(int* done) {
  __threadfence();
  atomicAdd(done, 1);
}

/// A thread adds a group's parts of dQ to global memory. Wide, it also gives back the stages in which they
/// lay. Where there are gradients to add, its whole warp comes for them.
template <class P>
__device__ __forceinline__ void add_dq(const Params& p, const BackwardTile<P>& tile, int group) {
  using Tile = BackwardTile<P>;
  constexpr int kColumns = dq_columns(P::kHeadDim);
  const int first_column = tile.first_dq_column(group);
  const int steps = min(kColumns - first_column, Tile::kDqColumns) / 8;
  const bool one = !Tile::kAddsDs || elected();
  // When there is dQ of a tile, there is dS of so many more.
  constexpr int kAhead = Tile::kWide ? 0 : 1;
  if constexpr (Tile::kAddsDs && kAhead > 0) add_ds(p, tile, 0, group);
  for (unsigned n = 0;; ++n) {
    barrier_wait<P>(tile.dq_full(group), n & 1);
    const typename Tile::QTile& now = tile.staged(n);
    if (now.head < 0) break;
    // Now, since all that is known of the tile is gone when it is given back.
    int* done = now.last ? done_of(p, tile.place(n).sequence.b, tile.place(n).h_kv) : nullptr;
    float* to = p.dq_accum + (now.row + (Tile::kSplitRows ? group * kDqRows : 0)) * kColumns +
                first_column / 8 * kDqStep;
    const auto add_steps = [&](int first, int end) {
      if (first < min(end, steps))
        add_line(to + first * kDqStep, tile.dq(group, n % P::kStages, first),
                 (min(end, steps) - first) * kDqStepBytes);
    };
    if (one && now.first) await_cleared<P>(p, tile.place(n).sequence.b, tile.place(n).h_kv);
    int* turn = nullptr;
    if constexpr (P::kDeterministic) {
      turn = turn_of<P>(p, tile.place(n).sequence.b, now.head, now.tile, tile.dq_part(group));
      await_turn<P, 32>(turn, now.turn);
    }
    if (one) {
      add_steps(0, Tile::kDqInDout);
      add_steps(Tile::kDqInDout, Tile::kDqInDout + Tile::kDqInQ);
      add_steps(Tile::kDqInDout + Tile::kDqInQ, Tile::kDqSteps);
    }
    if constexpr (Tile::kAddsDs) add_ds(p, tile, n + kAhead, group);  // while that is read
    if (!one) continue;
    if constexpr (P::kDeterministic) {
      added_lines_done();
      __threadfence();
      atomicAdd(turn, 1);
    } else {
      bulk_wait_read();
    }
    barrier_arrive(tile.dq_empty(group));
    if constexpr (Tile::kWide) {
      if constexpr (!Tile::kExchangesDs) barrier_arrive(tile.dout_empty(n % P::kStages));
      barrier_arrive(tile.q_empty(n % P::kStages));
    }
    if (done != nullptr) {
      added_lines_done();
      count_done(done);
    }
  }
}

/// Of sixteen rows of dQ this lane's fragments of the columns that are this block's, summed up over the
/// blocks' parts, of which the first is at `parts`.
template <class P>
__device__ __forceinline__ void sum_parts(const char* parts,
                                          float (&sum)[BackwardTile<P>::kSummedSteps * 4]) {
  constexpr int kSteps = BackwardTile<P>::kSummedSteps;
#pragma unroll
  for (float& value : sum) value = 0.0f;
#pragma unroll
  for (int i = 0; i < BackwardTile<P>::kCluster * kSteps; ++i) {
    const float4 part = *reinterpret_cast<const float4*>(parts + i * kDqStepBytes);
    float* to = sum + i % kSteps * 4;
    to[0] += part.x, to[1] += part.y, to[2] += part.z, to[3] += part.w;
  }
}

/// A warp sums up those columns of a group's dQ that are this block's, of each Q tile, and writes them, or
/// adds them to global memory where there are more keys than the cluster has.
template <class P>
__device__ __forceinline__ void sum_dq(const Params& p, const BackwardTile<P>& tile, int group) {
  using Tile = BackwardTile<P>;
  constexpr int kSteps = Tile::kSummedSteps, kColumns = dq_columns(P::kHeadDim);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int first_column = tile.first_dq_column(group) + tile.rank() * kSteps * 8;
  const int first_row = Tile::kSplitRows ? group * kDqRows : 0;
#pragma unroll 1
  for (unsigned n = 0;; ++n) {
    const int phase = n / kDqSlots & 1;
    barrier_wait<P>(tile.dq_given(n), phase);
    const typename Tile::QTile& now = tile.staged(n);
    if (now.head < 0) break;
    const typename Tile::Place& place = tile.place(n);
    int* done = now.last ? done_of(p, place.sequence.b, place.h_kv) : nullptr;
    if (!writes_dq<P>(p) && now.first) await_cleared<P>(p, place.sequence.b, place.h_kv);
    const int row = now.tile * P::kBr + first_row + lane / 4, rows = place.sequence.seqlen_q(p) - row;
    unsigned short* to = place.sequence.q_pointer(p.dq, now.head, row) + first_column;
    float* sum_at = p.dq_accum + (now.row + first_row) * kColumns + first_column / 8 * kDqStep + lane * 4;
    const char* parts = tile.shared + (tile.dq_from(0, group, n) - tile.base) + lane * 16;
    if (lane == 0) barrier_expect(tile.dq_there(group, n), Tile::kDqSteps * kDqStepBytes);
    barrier_wait<P>(tile.dq_there(group, n), phase);
#pragma unroll 1
    for (int warp = 0; warp < 4; ++warp) {  // of the group, whose sixteen rows these are
      alignas(16) float sum[kSteps * 4];
      sum_parts<P>(parts + warp * kDqStepBytes / 4, sum);
      if (warp == 3) {
        barrier_arrive(tile.dq_read(n));
        __syncwarp();
        if (lane < Tile::kCluster && lane != tile.rank())
          barrier_arrive_remote(in_block(tile.dq_read(n), lane));
      }
      if (writes_dq<P>(p)) {
#pragma unroll
        for (float& value : sum) value *= p.softmax_scale;
        store_rows<typename P::Element>(sum, min(P::kHeadDim / 8 - first_column / 8, kSteps),
                                        to + warp * 16 * p.dq.stride_s, p.dq.stride_s, rows - warp * 16,
                                        lane);
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

/// Stores a group's part of dQ of Q tile n with the blocks that sum it up.
template <class P>
__device__ __forceinline__ void send_dq(const BackwardTile<P>& tile, unsigned n, int group,
                                        const float (&dq)[BackwardTile<P>::kDqColumns / 2]) {
  using Tile = BackwardTile<P>;
  const unsigned place = tile.dq_from(tile.rank(), group, n) + threadIdx.x % 128 * 16;
#pragma unroll
  for (int block = 0; block < Tile::kCluster; ++block) {
    const unsigned to = in_block(place, block), there = in_block(tile.dq_there(group, n), block);
#pragma unroll
    for (int step = 0; step < Tile::kSummedSteps; ++step) {
      const float* part = dq + (block * Tile::kSummedSteps + step) * 4;
      store_remote(to + step * kDqStepBytes, float4{part[0], part[1], part[2], part[3]}, there);
    }
  }
}

/// Stores steps [kFirst, kEnd) of a group's dQ to shared memory.
template <int kFirst, int kEnd, class P>
__device__ __forceinline__ void stage_dq(const BackwardTile<P>& tile, int group, int slot,
                                         const float (&dq)[BackwardTile<P>::kDqColumns / 2]) {
#pragma unroll
  for (int step = kFirst; step < kEnd; ++step)
    *reinterpret_cast<float4*>(tile.shared + (tile.dq(group, slot, step) - tile.base) +
                               threadIdx.x % 128 * 16) = {dq[step * 4], dq[step * 4 + 1], dq[step * 4 + 2],
                                                          dq[step * 4 + 3]};
}

/// Until what a group's dQ of Q tile n is stored over has been read.
template <class P>
__device__ __forceinline__ void await_dq_room(const BackwardTile<P>& tile, unsigned n, int group) {
  if constexpr (BackwardTile<P>::kSumsDq)
    barrier_wait<P>(tile.dq_read(n), n / kDqSlots & 1 ^ 1);
  else
    barrier_wait<P>(tile.dq_empty(group), (n & 1) ^ 1);
}

/// Gives what a group has stored of Q tile n, or the word that this was all, to those who add it or sum up.
template <class P>
__device__ __forceinline__ void give_dq(const BackwardTile<P>& tile, unsigned n, int group) {
  if constexpr (BackwardTile<P>::kSumsDq) {
    barrier_arrive(tile.dq_given(n));
  } else {
    publish_to_async_proxy();
    barrier_arrive(tile.dq_full(group));
  }
}

/// Gives a group's part of dQ of Q tile n, when what it overwrites has been read.
template <class P>
__device__ __forceinline__ void give_whole_dq(const BackwardTile<P>& tile, unsigned n, int group,
                                              const float (&dq)[BackwardTile<P>::kDqColumns / 2]) {
  using Tile = BackwardTile<P>;
  await_dq_room(tile, n, group);
  if constexpr (Tile::kSumsDq)
    send_dq(tile, n, group, dq);
  else
    stage_dq<0, Tile::kDqSteps>(tile, group, n % P::kStages, dq);
  give_dq(tile, n, group);
}

}  // namespace flashjit::sm90
