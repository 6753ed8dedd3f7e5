// Forward pass for Hopper: one warp group loads tiles through the TMA unit, the others each own 64 rows of Q
// and compute with wgmma. The products of one tile run under the softmax of the tile before, and the warp
// groups take turns, so that one group's softmax runs under another's products (FlashAttention-3,
// sections 3.1 and 3.2).
#pragma once

#include "flashjit/common/sink.cuh"
#include "flashjit/common/tile_walk.cuh"
#include "flashjit/sm90/fragment.cuh"

namespace flashjit::sm90 {

/// Registers of a producer and of a consumer thread, by the number of consumer warp groups.
constexpr int producer_registers(int groups) { return groups == 1 ? 56 : groups == 2 ? 24 : 32; }
constexpr int consumer_registers(int groups) { return groups == 1 ? 256 - 16 : groups == 2 ? 240 : 160; }

template <class P>
struct ForwardTile {
  static constexpr ForwardLayout kLayout{P::kBr, P::kBc, P::kHeadDim, P::kHeadDimV, P::kStages};
  static constexpr int kGroups = P::kWarps / 4;
  static constexpr int kKBytes = tile_bytes(P::kBc, P::kHeadDim), kVBytes = tile_bytes(P::kBc, P::kHeadDimV);
  static constexpr int kSliceBytes = P::kBc * kRowBytes;

  unsigned base;  ///< of shared memory, aligned
  Sequence<P> sequence;
  int h, q_begin;
  KvTiles<P> tiles;  ///< visited from the last to the first

  __device__ unsigned q() const { return base + kLayout.q(); }
  __device__ unsigned k(int slot) const { return base + kLayout.k() + slot * kKBytes; }
  __device__ unsigned v(int slot) const { return base + kLayout.v() + slot * kVBytes; }
  __device__ unsigned q_full() const { return base + kLayout.barriers(); }
  __device__ unsigned k_full(int slot) const { return q_full() + (1 + slot * 4) * 8; }
  __device__ unsigned k_empty(int slot) const { return k_full(slot) + 8; }
  __device__ unsigned v_full(int slot) const { return k_full(slot) + 16; }
  __device__ unsigned v_empty(int slot) const { return k_full(slot) + 24; }
  __device__ int count() const { return tiles.count; }
  __device__ int kv_begin(int i) const { return tiles.tile(tiles.count - 1 - i) * P::kBc; }
};

template <class P>
__device__ __forceinline__ void produce(const Params& p, const ForwardTile<P>& tile, const TensorMaps& maps) {
  using Tile = ForwardTile<P>;
  const int h_kv = tile.h / (p.heads_q / p.heads_kv), batch = tile.sequence.batch();
  const auto load_v = [&](int i) {
    const int slot = i % P::kStages;
    barrier_wait(tile.v_empty(slot), (i / P::kStages & 1) ^ 1);
    barrier_expect(tile.v_full(slot), Tile::kVBytes);
    load_tile<P::kBc, P::kHeadDimV>(tile.v(slot), maps.v, tile.v_full(slot),
                                    tile.sequence.kv_row(tile.kv_begin(i)), h_kv, batch);
  };
  if (tile.count() == 0) return;  // nobody would wait for Q
  barrier_expect(tile.q_full(), tile_bytes(P::kBr, P::kHeadDim));
  load_tile<P::kBr, P::kHeadDim>(tile.q(), maps.q, tile.q_full(), tile.sequence.q_row(tile.q_begin), tile.h,
                                 batch);
  for (int i = 0; i < tile.count(); ++i) {
    const int slot = i % P::kStages;
    barrier_wait(tile.k_empty(slot), (i / P::kStages & 1) ^ 1);
    barrier_expect(tile.k_full(slot), Tile::kKBytes);
    load_tile<P::kBc, P::kHeadDim>(tile.k(slot), maps.k, tile.k_full(slot),
                                   tile.sequence.kv_row(tile.kv_begin(i)), h_kv, batch);
    if (i > 0) load_v(i - 1);
  }
  load_v(tile.count() - 1);
}

template <class P>
__device__ __forceinline__ void consume(const Params& p, const ForwardTile<P>& tile, int group,
                                        char* shared) {
  using Element = typename P::Element;
  using Tile = ForwardTile<P>;
  constexpr int kS = P::kBc / 2, kO = P::kHeadDimV / 2;  // accumulators of a thread
  constexpr int kKSteps = (P::kHeadDim + 15) / 16, kPSteps = P::kBc / 16;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int row = tile.q_begin + group * 64 + warp * 16 + lane / 4;  // and row + 8
  const int seqlen_q = tile.sequence.seqlen_q(p), kv_limit = tile.sequence.kv_limit(p);
  const Range q_range{tile.q_begin, min(tile.q_begin + P::kBr, seqlen_q)};
  [[maybe_unused]] const auto head = tile.sequence.head(p, tile.h);
  [[maybe_unused]] const Position row_position = position(row);
  const float scale_log2 = P::kHasScore ? kLog2E : p.softmax_scale * kLog2E;

  float o[kO] = {};
  float s[kS];
  unsigned probability[kPSteps][4];
  float row_max[2] = {-infinity(), -infinity()}, row_sum[2] = {0.0f, 0.0f};

  const auto start_scores = [&](int i) {
    const int slot = i % P::kStages;
    const unsigned long long q = tile_descriptor(tile.q() + group * 64 * kRowBytes, 0);
    const unsigned long long k = tile_descriptor(tile.k(slot), 0);
    pin(s);
    multiply_fence();
#pragma unroll
    for (int step = 0; step < kKSteps; ++step) {
      // Four steps of 16 columns (32 bytes) make a slice.
      const int q_offset = step / 4 * P::kBr * kRowBytes + step % 4 * 32;
      const int k_offset = step / 4 * Tile::kSliceBytes + step % 4 * 32;
      P::multiply_scores(s, q + (q_offset >> 4), k + (k_offset >> 4), step > 0);
    }
    multiply_commit();
    pin(s);
  };
  // What stands behind the last key may be anything, and zero times anything is not zero.
  const auto wait_for_v = [&](int i) {
    const int slot = i % P::kStages, valid = kv_limit - tile.kv_begin(i);
    barrier_wait(tile.v_full(slot), i / P::kStages & 1);
    if (kForeignKeys<P> && valid < P::kBc) {
      clear_rows<P::kBc, P::kHeadDimV>(shared + (tile.v(slot) - shared_address(shared)), valid);
      publish_to_async_proxy();
      named_barrier_sync(1 + Tile::kGroups + group, 128);
    }
  };
  const auto start_output = [&](int i) {
    const unsigned long long v = tile_descriptor(tile.v(i % P::kStages), Tile::kSliceBytes);
    pin(o);
    multiply_fence();
#pragma unroll
    for (int step = 0; step < kPSteps; ++step)
      P::multiply_output(o, probability[step], v + (step * 16 * kRowBytes >> 4));
    multiply_commit();
    pin(o);
  };
  // One arrival a warp, when all of its lanes have read.
  const auto release = [&](unsigned barrier) {
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier);
  };
  // Scores to exponentials; returns what O and the sums so far are multiplied with.
  const auto softmax = [&](int i, float(&rescale)[2]) {
    const int kv_begin = tile.kv_begin(i);
    [[maybe_unused]] const Position column_position = position(kv_begin + lane % 4 * 2);
    [[maybe_unused]] const auto at_kv = [&](int n) { return column_position + (n / 4 * 8 + n % 2); };
    if constexpr (P::kHasScore) {
#pragma unroll
      for (int n = 0; n < kS; ++n) s[n] = P::score(p, head, s[n], row_position + n / 2 % 2 * 8, at_kv(n));
    }
    const bool full =
        kv_begin + P::kBc <= kv_limit && tile.tiles.full(p, head, q_range, tile.count() - 1 - i);
    if (!full) {
#pragma unroll
      for (int n = 0; n < kS; n += 4) {
        // The map's blocks are multiples of 16, so a warp's sixteen rows and these eight columns lie in one.
        bool block = true;
        if constexpr (P::kBlockMap) {
          const int q = min(row - lane / 4, seqlen_q - 1), kv = min(kv_begin + n * 2, kv_limit - 1);
          block = block_map_row<P>(p, tile.sequence.b, tile.h, q)[kv / P::kBlockKv] != 0;
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const Position kv = at_kv(n + e);
          if (!block || kv.at >= kv_limit || !P::mask(p, head, row_position + e / 2 * 8, kv))
            s[n + e] = -infinity();
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float highest = row_max[half];
#pragma unroll
      for (int n = 2 * half; n < kS; n += 4) highest = fmaxf(highest, fmaxf(s[n], s[n + 1]));
      highest = fmaxf(highest, __shfl_xor_sync(kWholeWarp, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(kWholeWarp, highest, 2));
      const float shift = highest == -infinity() ? 0.0f : __fmul_rn(highest, scale_log2);
      rescale[half] =
          row_max[half] == -infinity() ? 0.0f : exp2_approx(__fmul_rn(row_max[half], scale_log2) - shift);
      row_max[half] = highest;
      float sum = 0.0f;
#pragma unroll
      for (int n = 2 * half; n < kS; n += 4)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          s[n + e] = exp2_approx(fmaf(s[n + e], scale_log2, -shift));
          sum += s[n + e];
        }
      row_sum[half] = row_sum[half] * rescale[half] + sum;
    }
    if constexpr (P::kDropout) {
      unsigned dropped[(kS + 31) / 32];
      dropped_values<kS, false>(dropped, p, tile.sequence.b * p.heads_q + tile.h, row,
                                kv_begin + lane % 4 * 2);
#pragma unroll
      for (int n = 0; n < kS; ++n)
        if (dropped[n / 32] >> (n % 32) & 1u) s[n] = 0.0f;
    }
  };
  constexpr int kTurnThreads = 256;
  const auto wait_for_turn = [&] {
    if constexpr (Tile::kGroups > 1) named_barrier_sync(1 + group, kTurnThreads);
  };
  const auto pass_turn = [&] {
    if constexpr (Tile::kGroups > 1)
      named_barrier_arrive(1 + (group + 1 == Tile::kGroups ? 0 : group + 1), kTurnThreads);
  };

  if (tile.count() > 0) {
    float rescale[2];
    if (group == Tile::kGroups - 1) pass_turn();
    barrier_wait(tile.q_full(), 0);
    barrier_wait(tile.k_full(0), 0);
    wait_for_turn();
    start_scores(0);
    pass_turn();
    multiply_wait<0>();
    pin(s);
    release(tile.k_empty(0));
    softmax(0, rescale);
    as_left_operand<Element>(probability, s);
    for (int i = 1; i < tile.count(); ++i) {
      const int slot = i % P::kStages, previous = (i - 1) % P::kStages;
      barrier_wait(tile.k_full(slot), i / P::kStages & 1);
      wait_for_turn();
      start_scores(i);
      wait_for_v(i - 1);
      start_output(i - 1);
      pass_turn();
      multiply_wait<1>();
      pin(s);
      release(tile.k_empty(slot));
      softmax(i, rescale);
      multiply_wait<0>();
      pin(o);
      release(tile.v_empty(previous));
#pragma unroll
      for (int n = 0; n < kO; ++n) o[n] *= rescale[n / 2 % 2];
      as_left_operand<Element>(probability, s);
    }
    const int last = tile.count() - 1;
    wait_for_v(last);
    start_output(last);
    multiply_wait<0>();
    pin(o);
    if (group == 0) wait_for_turn();  // takes the turn that nobody else wants
  }

  float scale[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = row_sum[half];
    sum += __shfl_xor_sync(kWholeWarp, sum, 1);
    sum += __shfl_xor_sync(kWholeWarp, sum, 2);
    // As in sm80/forward.cuh: the sum is relative to a rounded shift, and the LSE is not.
    const float highest = P::kHasScore ? row_max[half] : __fmul_rn(row_max[half], p.softmax_scale);
    const float rest = fmaf(row_max[half], scale_log2, -__fmul_rn(row_max[half], scale_log2));
    const float lse = sum > 0.0f ? highest + (log2f(sum) - rest) * kLn2 : -infinity();
    const RowEnd end = end_of_row<P>(p, tile.h, lse);
    const int q = row + half * 8;
    if (p.lse != nullptr && lane % 4 == 0 && q < seqlen_q)
      p.lse[tile.sequence.lse_row(p, tile.h) + q] = end.lse;
    scale[half] = sum > 0.0f ? (P::kDropout ? p.keep_scale : 1.0f) / sum * end.factor : 0.0f;
  }
  // O takes the place of the rows of Q that only this warp group has read.
  named_barrier_sync(1 + Tile::kGroups + group, 128);
  const int first_row = group * 64 + warp * 16;
  store_rows<Element, P::kBr, P::kHeadDimV>(shared + (tile.q() - shared_address(shared)), first_row, o,
                                            scale[0], scale[1], tile.sequence.q_pointer(p.o, tile.h, 0),
                                            p.o.stride_s, tile.q_begin, seqlen_q);
}

template <class P>
__device__ void forward(const Params& p, const TensorMaps& maps) {
  using Tile = ForwardTile<P>;
  extern __shared__ __align__(kAlignment) char shared[];
  Tile tile;
  tile.base = (shared_address(shared) + kAlignment - 1) / kAlignment * kAlignment;
  const int tile_count = q_tiles<P>(p);
  const int tile_index =
      tile_count - 1 - static_cast<int>(blockIdx.x % tile_count);  // the longest causal rows first
  tile.h = static_cast<int>(blockIdx.x / tile_count % p.heads_q);
  tile.sequence = Sequence<P>(p, static_cast<int>(blockIdx.x / tile_count / p.heads_q));
  tile.q_begin = tile_index * P::kBr;
  const Range q_range = tile_range(tile_index, P::kBr, tile.sequence.seqlen_q(p));
  if (P::kVarlen && q_range.begin == q_range.end) return;
  tile.tiles = KvTiles<P>(p, tile.sequence.head(p, tile.h), tile_index, q_range, tile.sequence.kv_limit(p));

  if (threadIdx.x == 0) {
    barrier_init(tile.q_full(), 1);
    for (int slot = 0; slot < P::kStages; ++slot) {
      barrier_init(tile.k_full(slot), 1);
      barrier_init(tile.v_full(slot), 1);
      barrier_init(tile.k_empty(slot), Tile::kGroups * 4);
      barrier_init(tile.v_empty(slot), Tile::kGroups * 4);
    }
    barrier_init_fence();
  }
  __syncthreads();

  const int group = __shfl_sync(kWholeWarp, static_cast<int>(threadIdx.x) / 128, 0);
  if (group == 0) {
    lower_register_limit<producer_registers(Tile::kGroups)>();
    if (threadIdx.x == 0) produce(p, tile, maps);
  } else {
    raise_register_limit<consumer_registers(Tile::kGroups)>();
    consume(p, tile, group - 1, shared);
  }
}

}  // namespace flashjit::sm90
