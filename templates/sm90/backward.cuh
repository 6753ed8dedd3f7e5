// Backward pass for Hopper: one thread block a KV tile, one warp group loads Q tiles through the TMA unit,
// two compute with wgmma, each 64 rows of the KV tile. S and dP are computed transposed, so that P^T and dS^T
// feed dV and dK from registers; dS goes through shared memory for dQ, which is added up in fp32 in global
// memory.
#pragma once

#include "flashjit/common/tile_walk.cuh"
#include "flashjit/sm90/dq_fragments.cuh"
#include "flashjit/sm90/fragment.cuh"

namespace flashjit::sm90 {

template <class P>
struct BackwardTile {
  static constexpr BackwardLayout kLayout{P::kBr,       P::kBc,     P::kHeadDim,
                                          P::kHeadDimV, P::kStages, P::kDropout || P::kScoreGrad};
  static constexpr int kGroups = 2;
  static constexpr int kThreads = (kGroups + 1) * 128;
  static constexpr int kDim = kLayout.columns(), kDimV = kLayout.columns_v();  // in shared memory
  static constexpr int kKvSlice = P::kBc * kRowBytes, kQSlice = P::kBr * kRowBytes;
  static constexpr int kQBytes = tile_bytes(P::kBr, kDim), kDoutBytes = tile_bytes(P::kBr, kDimV);
  // Wide: both groups have all keys; of S and dP each computes half of the queries, of dK and dV half of the
  // columns.
  static constexpr bool kWide = kLayout.wide();
  static constexpr int kShare = kWide ? 2 : 1;
  // Whether P and dS feed dV and dK from shared memory, for want of registers.
  static constexpr bool kFromShared = kLayout.from_shared();
  static constexpr int kQueries = P::kBr / kShare;                          // of S and dP, a group
  static constexpr int kOwnDim = kDim / kShare, kOwnDimV = kDimV / kShare;  // columns of dK and dV, a group
  // dQ is 64 rows a warp group where there are 128, else half of the columns.
  static constexpr bool kSplitRows = P::kBr == 128;
  static constexpr int kDqColumns = kSplitRows ? kDim : kDim / 2;
  static constexpr int kDqFloats = kDqRows * kDqColumns;  // of a warp group
  struct Place {
    Sequence<P> sequence;
    int h_kv, kv_tile;
    int kv_limit;  ///< keys of the sequence that are no padding
  };
  static_assert(sizeof(Place) == kPlaceBytes);
  static_assert(P::kBc == (kWide ? 64 : kGroups * 64) && (P::kBr == 64 || (P::kBr == 128 && !kWide)));

  unsigned base;       ///< of shared memory
  const Place* place;  ///< in shared memory, since registers are short and it is seldom read

  __device__ int kv_begin() const { return place->kv_tile * P::kBc; }
  __device__ int kv_limit(const Params& p) const { return kForeignKeys<P> ? place->kv_limit : p.seqlen_kv; }
  __device__ unsigned k() const { return base + kLayout.k(); }
  __device__ unsigned v() const { return base + kLayout.v(); }
  __device__ unsigned q(int slot) const { return base + kLayout.q() + slot * kQBytes; }
  __device__ unsigned dout(int slot) const { return base + kLayout.dout() + slot * kDoutBytes; }
  __device__ unsigned ds(int buffer) const {
    return base + kLayout.ds() + buffer * tile_bytes(P::kBc, P::kBr);
  }
  __device__ unsigned p(int buffer) const { return base + kLayout.p() + buffer * tile_bytes(P::kBc, P::kBr); }
  /// Where a group's own columns begin in a tile of slices.
  static __device__ unsigned own_columns(int group, int columns, int slice_bytes) {
    return columns < kSliceColumns ? group * columns * 2 : group * (columns / kSliceColumns) * slice_bytes;
  }
  __device__ unsigned kv_full() const { return base + kLayout.barriers(); }
  __device__ unsigned q_full(int slot) const { return kv_full() + (1 + slot * 4) * 8; }
  __device__ unsigned q_empty(int slot) const { return q_full(slot) + 8; }
  __device__ unsigned dout_full(int slot) const { return q_full(slot) + 16; }
  __device__ unsigned dout_empty(int slot) const { return q_full(slot) + 24; }
};

template <class P>
__device__ __forceinline__ void produce(const Params& p, const BackwardTile<P>& tile, const TensorMaps& maps,
                                        char* shared) {
  using Tile = BackwardTile<P>;
  const auto& place = *tile.place;  // read again where needed: registers are short
  const Sequence<P>& sequence = place.sequence;
  const int kv_limit = tile.kv_limit(p), kv_row = sequence.kv_row(tile.kv_begin()), batch = sequence.batch();
  const Range kv = tile_range(place.kv_tile, P::kBc, kv_limit);
  StagedTile* staged = reinterpret_cast<StagedTile*>(shared + Tile::kLayout.staged());
  barrier_expect(tile.kv_full(), Tile::kLayout.q());
  load_tile<P::kBc, Tile::kDim>(tile.k(), maps.k, tile.kv_full(), kv_row, place.h_kv, batch);
  load_tile<P::kBc, Tile::kDimV>(tile.v(), maps.v, tile.kv_full(), kv_row, place.h_kv, batch);
  const int group_size = p.heads_q / p.heads_kv;
  int slot = 0, phase = 1;
  const auto next_slot = [&] {
    if (++slot == P::kStages) slot = 0, phase ^= 1;
  };
  const int end_head = tile.kv_begin() < kv_limit ? (place.h_kv + 1) * group_size : 0;
  for (int h = place.h_kv * group_size; h < end_head; ++h) {
    const auto head = sequence.head(p, h);
    const QTiles<P> tiles(p, head, place.kv_tile, kv);
    for (int i = 0; i < tiles.count; ++i) {
      const StagedTile next = tiles.at(p, head, i, place.kv_tile, kv, kv_limit);
      const int q_begin = next.tile * P::kBr, q_row = sequence.q_row(q_begin);
      const long long row = sequence.stats_row(p, h) + q_begin;
      barrier_wait(tile.q_empty(slot), phase);
      staged[slot] = next;
      barrier_expect(tile.q_full(slot), Tile::kQBytes + P::kBr * 4);
      load_tile<P::kBr, Tile::kDim>(tile.q(slot), maps.q, tile.q_full(slot), q_row, h, batch);
      load_line(tile.base + Tile::kLayout.lse() + slot * P::kBr * 4, p.lse_padded + row, P::kBr * 4,
                tile.q_full(slot));
      barrier_wait(tile.dout_empty(slot), phase);
      barrier_expect(tile.dout_full(slot), Tile::kDoutBytes + P::kBr * 4);
      load_tile<P::kBr, Tile::kDimV>(tile.dout(slot), maps.dout, tile.dout_full(slot), q_row, h, batch);
      load_line(tile.base + Tile::kLayout.d() + slot * P::kBr * 4, p.d + row, P::kBr * 4,
                tile.dout_full(slot));
      next_slot();
    }
  }
  barrier_wait(tile.q_empty(slot), phase);
  staged[slot].head = -1;
  barrier_arrive(tile.q_full(slot));
}

template <bool kValue>
struct Flag {
  static constexpr bool value = kValue;
};

/// Starts S^T or dP^T: a warp group's 64 rows of K or V times the rows of Q or dO.
template <class P, int kColumns, int kCount>
__device__ __forceinline__ void start_transposed(float (&c)[kCount], unsigned left, unsigned right) {
  const unsigned long long a = tile_descriptor(left, 0), b = tile_descriptor(right, 0);
  pin(c);
  multiply_fence();
#pragma unroll
  for (int step = 0; step < (kColumns + 15) / 16; ++step)
    P::multiply_scores(c, a + ((step / 4 * BackwardTile<P>::kKvSlice + step % 4 * 32) >> 4),
                       b + ((step / 4 * BackwardTile<P>::kQSlice + step % 4 * 32) >> 4), step > 0);
  multiply_commit();
  pin(c);
}

/// Adds a group's part of dQ: by the TMA unit from shared memory, or, where that is full, from registers.
template <class P>
__device__ __forceinline__ void add_dq(const Params& p, const BackwardTile<P>& tile, const StagedTile& now,
                                       int group, const float (&dq)[BackwardTile<P>::kDqColumns / 2],
                                       char* shared) {
  using Tile = BackwardTile<P>;
  constexpr int kColumns = dq_columns(P::kHeadDim);
  const Sequence<P>& sequence = tile.place->sequence;
  const int first_column = Tile::kSplitRows ? 0 : group * Tile::kDqColumns;
  const int columns = min(kColumns - first_column, Tile::kDqColumns);
  const int first_row = now.tile * P::kBr + (Tile::kSplitRows ? group * kDqRows : 0);
  float* to =
      p.dq_accum + (sequence.stats_row(p, now.head) + first_row) * kColumns + first_column / 8 * kDqStep;
  // The groups of a block take their turns one after the other.
  const auto turn = [&] {
    return p.tickets + 1 + (static_cast<long long>(sequence.b) * p.heads_q + now.head) * q_tiles<P>(p) +
           now.tile;
  };
  const auto wait_for_turn = [&] {
    while (*static_cast<volatile int*>(turn()) != now.turn * Tile::kGroups + group) __nanosleep(64);
    __threadfence();
  };
  const int thread = threadIdx.x % 128;
  if constexpr (Tile::kWide) {
    if constexpr (P::kDeterministic) {
      if (thread == 0) wait_for_turn();
      named_barrier_sync(2 + group, 128);
    }
#pragma unroll
    for (int n = 0; n < Tile::kDqColumns / 2; n += 4)
      if (n * 2 < columns)
        add_four(to + n / 4 * kDqStep + thread * 4, dq[n], dq[n + 1], dq[n + 2], dq[n + 3]);
    if constexpr (P::kDeterministic) {
      __threadfence();
      named_barrier_sync(2 + group, 128);
      if (thread == 0) atomicAdd(turn(), 1);
    }
  } else {
    float4* staged = reinterpret_cast<float4*>(shared + Tile::kLayout.dq()) + group * Tile::kDqFloats / 4;
#pragma unroll
    for (int n = 0; n < Tile::kDqColumns / 2; n += 4)
      staged[n / 4 * 128 + thread] = {dq[n], dq[n + 1], dq[n + 2], dq[n + 3]};
    publish_to_async_proxy();
    named_barrier_sync(2 + group, 128);
    if (thread == 0) {
      if constexpr (P::kDeterministic) wait_for_turn();
      if (columns > 0)
        add_line(to, tile.base + Tile::kLayout.dq() + group * Tile::kDqFloats * 4, columns / 8 * kDqStep * 4);
      if constexpr (P::kDeterministic) {
        added_lines_done();
        __threadfence();
        atomicAdd(turn(), 1);
      }
    }
  }
}

template <class P>
__device__ __forceinline__ void consume(const Params& p, const BackwardTile<P>& tile, int group,
                                        char* shared) {
  using Element = typename P::Element;
  using Tile = BackwardTile<P>;
  constexpr int kS = Tile::kQueries / 2, kSteps = Tile::kQueries / 16;
  constexpr int kConsumerThreads = Tile::kGroups * 128;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int first_row = Tile::kWide ? 0 : group * 64, first_query = Tile::kWide ? group * Tile::kQueries : 0;
  const int kv_row = first_row + warp * 16 + lane / 4;  // in the tile; and kv_row + 8
  const StagedTile* staged = reinterpret_cast<const StagedTile*>(shared + Tile::kLayout.staged());
  const auto natural = [&](float score) { return P::kHasScore ? score : __fmul_rn(score, p.softmax_scale); };
  // Every thread says for itself that it has read LSE, D and what the stage holds; wgmma's reads are the
  // group's.
  const auto release = [&](unsigned barrier) { barrier_arrive(barrier); };

  float dk[Tile::kOwnDim / 2] = {}, dv[Tile::kOwnDimV / 2] = {};
  barrier_wait(tile.kv_full(), 0);
  if (kForeignKeys<P> && tile.kv_begin() + P::kBc > tile.kv_limit(p)) {
    // What stands behind the last key may be anything, and zero times anything is not zero.
    clear_rows<P::kBc, P::kHeadDim>(shared + Tile::kLayout.k(), max(tile.kv_limit(p) - tile.kv_begin(), 0));
    clear_rows<P::kBc, P::kHeadDimV>(shared + Tile::kLayout.v(), max(tile.kv_limit(p) - tile.kv_begin(), 0));
    publish_to_async_proxy();
    named_barrier_sync(2 + group, 128);
  }
  // One counter for stage, phase and buffer: registers are short.
  for (unsigned i = 0;; ++i) {
    const int slot = i % P::kStages, phase = i / P::kStages & 1, buffer = i % Tile::kLayout.buffers();
    barrier_wait(tile.q_full(slot), phase);
    const StagedTile& now = staged[slot];  // read again where needed: registers are short
    if (now.head < 0) break;
    const int h = now.head, q_begin = now.tile * P::kBr + first_query;
    const float* lse =
        reinterpret_cast<const float*>(shared + Tile::kLayout.lse()) + slot * P::kBr + first_query;
    const float* row_d =
        reinterpret_cast<const float*>(shared + Tile::kLayout.d()) + slot * P::kBr + first_query;
    const Position q_position = position(q_begin + lane % 4 * 2);
    const Position kv_position = position(tile.kv_begin() + kv_row);
    const auto at_q = [&](int n) { return q_position + (n / 4 * 8 + n % 2); };
    const auto at_kv = [&](int n) { return kv_position + n / 2 % 2 * 8; };
    const Sequence<P>& sequence = tile.place->sequence;
    [[maybe_unused]] const auto head = sequence.head(p, h);
    if constexpr (P::kVarlen) {
      if (const int valid = sequence.seqlen_q(p) - now.tile * P::kBr; valid < P::kBr) {
        // The rows behind belong to the next sequence.
        barrier_wait(tile.dout_full(slot), phase);
        clear_rows<P::kBr, P::kHeadDim>(shared + (tile.q(slot) - tile.base), valid);
        clear_rows<P::kBr, P::kHeadDimV>(shared + (tile.dout(slot) - tile.base), valid);
        publish_to_async_proxy();
        named_barrier_sync(2 + group, 128);
      }
    }

    float s[kS], dp[kS];
    start_transposed<P, P::kHeadDim>(s, tile.k() + first_row * kRowBytes,
                                     tile.q(slot) + first_query * kRowBytes);
    [[maybe_unused]] unsigned dropped[(kS + 31) / 32];
    // Before dP takes its registers.
    if constexpr (P::kDropout)
      dropped_values<kS, true>(dropped, p, sequence.b * p.heads_q + h, at_kv(0).at, at_q(0).at);
    const bool partial = !now.full || tile.kv_begin() + P::kBc > tile.kv_limit(p);
    barrier_wait(tile.dout_full(slot), phase);
    start_transposed<P, P::kHeadDimV>(dp, tile.v() + first_row * kRowBytes,
                                      tile.dout(slot) + first_query * kRowBytes);
    multiply_wait<1>();
    pin(s);

    // Bit n / 4: the map lets these eight queries attend. Its blocks are multiples of 16, so that they and a
    // warp's sixteen keys lie in one.
    [[maybe_unused]] unsigned blocks = ~0u;
    if constexpr (P::kBlockMap) {
      if (partial) {
        const unsigned char* column =
            block_map_row<P>(p, sequence.b, h, 0) +
            min(tile.kv_begin() + kv_row - lane / 4, tile.kv_limit(p) - 1) / P::kBlockKv;
        // Lane i asks for the i-th eight queries.
        const int q = min(q_begin + lane % (kS / 4) * 8, sequence.seqlen_q(p) - 1);
        blocks =
            __ballot_sync(kWholeWarp, column[static_cast<long long>(q / P::kBlockQ) * p.map_columns] != 0);
      }
    }
    // P is never negative: unless a slope comes to it, its sign says that dropout drops the pair.
    constexpr bool kSignDrops = P::kDropout && !P::kScoreGrad;
    const auto drops = [&](int n) {
      if constexpr (!P::kDropout) {
        return false;
      } else if constexpr (kSignDrops) {
        return signbit(s[n]) != 0;
      } else {
        return (dropped[n / 32] >> (n % 32) & 1u) != 0;
      }
    };
    // Word r of sixteen queries of a tile of P^T or dS^T in shared memory, as [KV row][query].
    const auto store_word = [&](unsigned to, int step, int r, unsigned word) {
      const int at = chunk_offset<P::kBc>(kv_row + r % 2 * 8, first_query / 8 + step * 2 + r / 2);
      *reinterpret_cast<unsigned*>(shared + (to - tile.base) + at + lane % 4 * 4) = word;
    };
    // S becomes P, eight queries at a time, and P times the slope of the score program.
    [[maybe_unused]] unsigned probability[kSteps][4];
    const auto exponentials = [&](auto masked) {
#pragma unroll
      for (int n = 0; n < kS; n += 4) {
        const float2 row_lse = *reinterpret_cast<const float2*>(lse + n * 2 + lane % 4 * 2);
        [[maybe_unused]] float slope[4];
        if constexpr (P::kHasScore) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float dot = s[n + e];
            if constexpr (P::kScoreGrad) slope[e] = P::score_grad(p, head, dot, at_q(n + e), at_kv(n + e));
            s[n + e] = P::score(p, head, dot, at_q(n + e), at_kv(n + e));
          }
        }
        if constexpr (masked.value) {
          const bool block = !P::kBlockMap || (blocks >> (n / 4) & 1u) != 0;
#pragma unroll
          for (int e = 0; e < 4; ++e)
            s[n + e] = mask_score(s[n + e], block, at_kv(n + e).at < tile.kv_limit(p),
                                  P::mask(p, head, at_q(n + e), at_kv(n + e)));
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          s[n + e] = exp2_approx((natural(s[n + e]) - (e % 2 ? row_lse.y : row_lse.x)) * kLog2E);
          if constexpr (kSignDrops)
            if (dropped[(n + e) / 32] >> ((n + e) % 32) & 1u) s[n + e] = -s[n + e];
        }
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
          const unsigned word =
              pack<Element>(drops(n + e) ? 0.0f : s[n + e], drops(n + e + 1) ? 0.0f : s[n + e + 1]);
          if constexpr (Tile::kFromShared)
            store_word(tile.p(buffer), n / 8, n % 8 / 2 + e / 2, word);
          else
            probability[n / 8][n % 8 / 2 + e / 2] = word;
        }
        // A slope may be anything where P is zero.
        if constexpr (P::kScoreGrad) {
#pragma unroll
          for (int e = 0; e < 4; ++e) s[n + e] = s[n + e] == 0.0f ? 0.0f : s[n + e] * slope[e];
        }
      }
    };
    // Two copies, since a branch inside costs what it saves.
    if (partial)
      exponentials(Flag<true>{});
    else
      exponentials(Flag<false>{});
    multiply_wait<0>();
    pin(dp);

    const unsigned long long dout = tile_descriptor(
        tile.dout(slot) + (Tile::kWide ? Tile::own_columns(group, Tile::kOwnDimV, Tile::kQSlice) : 0),
        Tile::kQSlice);
    if constexpr (!Tile::kFromShared) {
      pin(dv);
      multiply_fence();
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        P::multiply_dv(dv, probability[step], dout + (step * 16 * kRowBytes >> 4));
      multiply_commit();
    }

    unsigned gradient[kSteps][4];
#pragma unroll
    for (int n = 0; n < kS; n += 4) {
      const float2 d = *reinterpret_cast<const float2*>(row_d + n * 2 + lane % 4 * 2);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if constexpr (P::kDropout) dp[n + e] = drops(n + e) ? 0.0f : dp[n + e] * p.keep_scale;
        dp[n + e] = (kSignDrops ? fabsf(s[n + e]) : s[n + e]) * (dp[n + e] - (e % 2 ? d.y : d.x));
      }
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        unsigned& word = gradient[n / 8][n % 8 / 2 + e / 2];
        word = pack<Element>(dp[n + e], dp[n + e + 1]);
        store_word(tile.ds(buffer), n / 8, n % 8 / 2 + e / 2, word);
      }
    }
    publish_to_async_proxy();
    if (!Tile::kWide && threadIdx.x % 128 == 0) added_lines_read();  // then dQ's place is free
    named_barrier_sync(1, kConsumerThreads);

    float dq[Tile::kDqColumns / 2];
    const unsigned long long left =
        tile_descriptor(tile.ds(buffer) + (Tile::kSplitRows ? group * Tile::kKvSlice : 0), Tile::kKvSlice);
    const unsigned long long right = tile_descriptor(
        tile.k() + (Tile::kSplitRows ? 0 : Tile::own_columns(group, Tile::kDqColumns, Tile::kKvSlice)),
        Tile::kKvSlice);
    const unsigned long long q = tile_descriptor(
        tile.q(slot) + (Tile::kWide ? Tile::own_columns(group, Tile::kOwnDim, Tile::kQSlice) : 0),
        Tile::kQSlice);
    pin(dq);
    multiply_fence();
#pragma unroll
    for (int step = 0; step < P::kBc / 16; ++step)
      P::multiply_dq(dq, left + (step * 16 * kRowBytes >> 4), right + (step * 16 * kRowBytes >> 4), step > 0);
    multiply_commit();
    pin(dq);
    pin(dk);
    multiply_fence();
    if constexpr (Tile::kFromShared) {
      // The summed queries are the columns of P^T and dS^T.
      const unsigned long long p_tile = tile_descriptor(tile.p(buffer) + first_row * kRowBytes, 0);
      const unsigned long long ds_tile = tile_descriptor(tile.ds(buffer) + first_row * kRowBytes, 0);
      pin(dv);
#pragma unroll
      for (int step = 0; step < P::kBr / 16; ++step)
        P::multiply_dv(dv, p_tile + ((step / 4 * Tile::kKvSlice + step % 4 * 32) >> 4),
                       dout + (step * 16 * kRowBytes >> 4), 1);
#pragma unroll
      for (int step = 0; step < P::kBr / 16; ++step)
        P::multiply_dk(dk, ds_tile + ((step / 4 * Tile::kKvSlice + step % 4 * 32) >> 4),
                       q + (step * 16 * kRowBytes >> 4), 1);
    } else {
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        P::multiply_dk(dk, gradient[step], q + (step * 16 * kRowBytes >> 4));
    }
    multiply_commit();
    multiply_wait<1>();
    pin(dq);
    if constexpr (!Tile::kFromShared) {
      pin(dv);
      release(tile.dout_empty(slot));
    }
    add_dq<P>(p, tile, now, group, dq, shared);
    multiply_wait<0>();
    pin(dk);
    pin(dv);
    if constexpr (Tile::kFromShared) release(tile.dout_empty(slot));
    release(tile.q_empty(slot));
    // With two buffers of dS, who writes one knows that the other is read.
    if constexpr (Tile::kLayout.buffers() == 1) named_barrier_sync(1, kConsumerThreads);
  }

  if (threadIdx.x % 128 == 0) added_lines_done();
  named_barrier_sync(1, kConsumerThreads);  // K and V are read no more: dK and dV take their place
  const auto& place = *tile.place;
  const int first = first_row + warp * 16;
  const float v_scale = P::kDropout ? p.keep_scale : 1.0f;
  const int seqlen_kv = place.sequence.seqlen_kv(p);
  const auto store = [&](char* at, int columns, const auto& c, float scale, const TensorParam& to) {
    constexpr int kChunks = sizeof(c) / 16;  // of a group
    const int first_chunk = Tile::kWide ? group * kChunks : 0;
    const int chunks = min(columns / 8 - first_chunk, kChunks);
    if (chunks > 0)
      store_rows<Element, P::kBc>(at, first, first_chunk, chunks, c, scale, scale,
                                  place.sequence.kv_pointer(to, place.h_kv, 0), to.stride_s, tile.kv_begin(),
                                  seqlen_kv);
  };
  store(shared + Tile::kLayout.k(), P::kHeadDim, dk, p.softmax_scale, p.dk);
  store(shared + Tile::kLayout.v(), P::kHeadDimV, dv, v_scale, p.dv);
}

template <class P>
__device__ void backward(const Params& p, const TensorMaps& maps) {
  using Tile = BackwardTile<P>;
  extern __shared__ __align__(kAlignment) char shared[];
  const KvWork work = next_work<P>(p, shared);
  const Sequence<P> sequence(p, work.b);
  auto* place = reinterpret_cast<typename Tile::Place*>(shared + Tile::kLayout.place());
  const Tile tile{shared_address(shared), place};
  if (P::kVarlen && work.kv_tile * P::kBc >= sequence.seqlen_kv(p)) return;

  if (threadIdx.x == 0) {
    *place = {sequence, work.h_kv, work.kv_tile, sequence.kv_limit(p)};
    barrier_init(tile.kv_full(), 1);
    for (int slot = 0; slot < P::kStages; ++slot) {
      barrier_init(tile.q_full(slot), 1);
      barrier_init(tile.dout_full(slot), 1);
      barrier_init(tile.q_empty(slot), Tile::kGroups * 128);
      barrier_init(tile.dout_empty(slot), Tile::kGroups * 128);
    }
    barrier_init_fence();
  }
  __syncthreads();

  const int group = __shfl_sync(kWholeWarp, static_cast<int>(threadIdx.x) / 128, 0);
  if (group == 0) {
    lower_register_limit<24>();
    if (threadIdx.x == 0) produce(p, tile, maps, shared);
  } else {
    raise_register_limit<240>();
    consume(p, tile, group - 1, shared);
  }
}

}  // namespace flashjit::sm90
