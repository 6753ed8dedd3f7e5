// Backward pass for Hopper: one thread block a KV tile. Of one warp group a thread loads Q tiles through the
// TMA unit and two add dQ to global memory; the two other groups compute with wgmma. S and dP are computed
// transposed.
//
// Up to 128 columns each group has 64 keys, and P^T and dS^T feed dV and dK from registers. dS goes through
// shared memory for dQ, for which each group needs the other's too, but only a Q tile later, so that neither
// waits and one group's products run under the other's softmax.
//
// Above ("wide") one group's registers do not hold its rows of dK and dV. Then both groups have the same 64
// keys: of S and dP each computes half of the queries, of dK and dV half of the columns, from P and dS in
// shared memory.
#pragma once

#include "flashjit/common/tile_walk.cuh"
#include "flashjit/sm90/dq_fragments.cuh"
#include "flashjit/sm90/fragment.cuh"

namespace flashjit::sm90 {

template <class P>
struct BackwardTile {
  static constexpr BackwardLayout kLayout{P::kBr, P::kBc, P::kHeadDim, P::kHeadDimV, P::kStages};
  static constexpr int kGroups = 2;
  static constexpr int kHelperRegisters = 56, kConsumerRegisters = 224;        // of a thread
  static constexpr int kDim = kLayout.columns(), kDimV = kLayout.columns_v();  // in shared memory
  static constexpr int kKvSlice = P::kBc * kRowBytes, kQSlice = P::kBr * kRowBytes;
  static constexpr int kQBytes = tile_bytes(P::kBr, kDim), kDoutBytes = tile_bytes(P::kBr, kDimV);
  static constexpr int kKBytes = tile_bytes(P::kBc, kDim), kVBytes = tile_bytes(P::kBc, kDimV);
  static constexpr bool kWide = kLayout.wide();
  static constexpr int kShare = kWide ? 2 : 1;
  static constexpr int kQueries = P::kBr / kShare;                          // of S and dP, a group
  static constexpr int kOwnDim = kDim / kShare, kOwnDimV = kDimV / kShare;  // columns of dK and dV, a group
  // A group's part of dQ is 64 rows where there are 128, else half of the columns.
  static constexpr bool kSplitRows = P::kBr == 128;
  static constexpr int kDqColumns = kSplitRows ? kDim : kDim / 2;
  // It leaves through shared memory, eight columns a step: `kDqInDout` and `kDqInQ` steps lie in what this
  // group alone reads of dO and Q, when it has read it, the others in a place of their own.
  static constexpr int kDqSteps = kDqColumns / 8;
  static constexpr int kDqInDout = kLayout.dq_within(kDimV) / kDqStepBytes;
  static constexpr int kDqInQ = kLayout.dq_within(kDim) / kDqStepBytes;
  struct Place {
    Sequence<P> sequence;
    int h_kv, kv_tile;
    int kv_limit;  ///< keys of the sequence that are no padding
  };
  static_assert(sizeof(Place) == kPlaceBytes);
  static_assert(P::kBc == (kWide ? 64 : 128) && (P::kBr == 64 || (P::kBr == 128 && !kWide)));

  /// Of a group, in the tiles of S^T and dP^T.
  static __device__ int first_row(int group) { return kWide ? 0 : group * 64; }
  static __device__ int first_query(int group) { return kWide ? group * kQueries : 0; }

  unsigned base;       ///< of shared memory
  const Place* place;  ///< in shared memory, since registers are short and it is seldom read

  __device__ int kv_begin() const { return place->kv_tile * P::kBc; }
  __device__ int kv_limit(const Params& p) const { return kForeignKeys<P> ? place->kv_limit : p.seqlen_kv; }
  __device__ unsigned k() const { return base + kLayout.k(); }
  __device__ unsigned v() const { return base + kLayout.v(); }
  __device__ unsigned q(int slot) const { return base + kLayout.q() + slot * kQBytes; }
  __device__ unsigned dout(int slot) const { return base + kLayout.dout() + slot * kDoutBytes; }
  // Of Q tile i there are dS and, wide, P, and a barrier that says that both groups have written them and
  // have read those of the tile before.
  __device__ unsigned ds(unsigned i) const {
    return base + kLayout.ds() + i % 2 * tile_bytes(P::kBc, P::kBr);
  }
  __device__ unsigned p(unsigned i) const { return base + kLayout.p() + i % 2 * tile_bytes(P::kBc, P::kBr); }
  __device__ unsigned ds_full(unsigned i) const { return q_full(P::kStages) + i % 2 * 8; }
  /// Where a step of a group's dQ lies.
  __device__ unsigned dq(int group, int slot, int step) const {
    if (step < kDqInDout) return dout(slot) + group * kLayout.dq_within(kDimV) + step * kDqStepBytes;
    step -= kDqInDout;
    if (step < kDqInQ) return q(slot) + group * kLayout.dq_within(kDim) + step * kDqStepBytes;
    return base + kLayout.dq() + group * kLayout.dq_bytes() + (step - kDqInQ) * kDqStepBytes;
  }
  /// A column of a tile of slices.
  static __device__ unsigned column(unsigned at, int column, int slice_bytes) {
    return at + column / kSliceColumns * slice_bytes + column % kSliceColumns * 2;
  }
  // The first Q tile's are K's and V's, too.
  __device__ unsigned q_full(int slot) const { return base + kLayout.barriers() + slot * 4 * 8; }
  __device__ unsigned q_empty(int slot) const { return q_full(slot) + 8; }
  __device__ unsigned dout_full(int slot) const { return q_full(slot) + 16; }
  __device__ unsigned dout_empty(int slot) const { return q_full(slot) + 24; }
  __device__ unsigned dq_full(int group) const { return ds_full(0) + (2 + group * 2) * 8; }
  __device__ unsigned dq_empty(int group) const { return dq_full(group) + 8; }
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
  const int group_size = p.heads_q / p.heads_kv;
  int slot = 0, phase = 1;
  bool first = true;
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
      barrier_wait<P>(tile.q_empty(slot), phase);
      staged[slot] = next;
      barrier_expect(tile.q_full(slot), Tile::kQBytes + P::kBr * 4 + (first ? Tile::kKBytes : 0));
      if (first)
        load_tile<P::kBc, Tile::kDim>(tile.k(), maps.k, tile.q_full(slot), kv_row, place.h_kv, batch);
      load_tile<P::kBr, Tile::kDim>(tile.q(slot), maps.q, tile.q_full(slot), q_row, h, batch);
      load_line(tile.base + Tile::kLayout.lse() + slot * P::kBr * 4, p.lse_log2 + row, P::kBr * 4,
                tile.q_full(slot));
      barrier_wait<P>(tile.dout_empty(slot), phase);
      barrier_expect(tile.dout_full(slot), Tile::kDoutBytes + P::kBr * 4 + (first ? Tile::kVBytes : 0));
      if (first)
        load_tile<P::kBc, Tile::kDimV>(tile.v(), maps.v, tile.dout_full(slot), kv_row, place.h_kv, batch);
      load_tile<P::kBr, Tile::kDimV>(tile.dout(slot), maps.dout, tile.dout_full(slot), q_row, h, batch);
      load_line(tile.base + Tile::kLayout.d() + slot * P::kBr * 4, p.d + row, P::kBr * 4,
                tile.dout_full(slot));
      first = false;
      next_slot();
    }
  }
  barrier_wait<P>(tile.q_empty(slot), phase);
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

/// A thread adds a group's parts of dQ to global memory. Wide, it also gives back the stages in which they
/// lay.
template <class P>
__device__ __forceinline__ void add_dq(const Params& p, const BackwardTile<P>& tile, int group,
                                       const char* shared) {
  using Tile = BackwardTile<P>;
  constexpr int kColumns = dq_columns(P::kHeadDim);
  const int first_column = Tile::kSplitRows ? 0 : group * Tile::kDqColumns;
  const int steps = min(kColumns - first_column, Tile::kDqColumns) / 8;
  const StagedTile& now = reinterpret_cast<const StagedTile*>(shared + Tile::kLayout.adding())[group];
  for (unsigned n = 0;; ++n) {
    barrier_wait<P>(tile.dq_full(group), n & 1);
    if (now.head < 0) break;
    const Sequence<P>& sequence = tile.place->sequence;
    const int first_row = now.tile * P::kBr + (Tile::kSplitRows ? group * kDqRows : 0);
    float* to =
        p.dq_accum + (sequence.stats_row(p, now.head) + first_row) * kColumns + first_column / 8 * kDqStep;
    const auto add_steps = [&](int first, int end) {
      if (first < min(end, steps))
        add_line(to + first * kDqStep, tile.dq(group, n % P::kStages, first),
                 (min(end, steps) - first) * kDqStepBytes);
    };
    int* turn = nullptr;
    if constexpr (P::kDeterministic) {
      turn = turn_of<P>(p, sequence.b, now.head, now.tile, group);
      await_turn<P, 32>(turn, now.turn);
    }
    add_steps(0, Tile::kDqInDout);
    add_steps(Tile::kDqInDout, Tile::kDqInDout + Tile::kDqInQ);
    add_steps(Tile::kDqInDout + Tile::kDqInQ, Tile::kDqSteps);
    if constexpr (P::kDeterministic) {
      added_lines_done();
      __threadfence();
      atomicAdd(turn, 1);
    } else {
      added_lines_read();
    }
    barrier_arrive(tile.dq_empty(group));
    if constexpr (Tile::kWide) {
      barrier_arrive(tile.dout_empty(n % P::kStages));
      barrier_arrive(tile.q_empty(n % P::kStages));
    }
  }
}

/// Stores steps [kFirst, kEnd) of a group's dQ to shared memory.
template <int kFirst, int kEnd, class P>
__device__ __forceinline__ void stage_dq(const BackwardTile<P>& tile, int group, int slot,
                                         const float (&dq)[BackwardTile<P>::kDqColumns / 2], char* shared) {
#pragma unroll
  for (int step = kFirst; step < kEnd; ++step)
    *reinterpret_cast<float4*>(shared + (tile.dq(group, slot, step) - tile.base) + threadIdx.x % 128 * 16) = {
        dq[step * 4], dq[step * 4 + 1], dq[step * 4 + 2], dq[step * 4 + 3]};
}

/// Gives what a group has staged, or, without a head, the word that this was all, to the thread that adds it.
template <class P>
__device__ __forceinline__ void give_dq(const BackwardTile<P>& tile, int group, const StagedTile& now,
                                        char* shared) {
  if (threadIdx.x % 128 == 0)
    reinterpret_cast<StagedTile*>(shared + BackwardTile<P>::kLayout.adding())[group] = now;
  publish_to_async_proxy();
  barrier_arrive(tile.dq_full(group));
}

/// Waits for Q tile i; false when there are no more.
template <class P>
__device__ __forceinline__ bool find(const BackwardTile<P>& tile, unsigned i, StagedTile& now,
                                     const char* shared) {
  barrier_wait<P>(tile.q_full(i % P::kStages), i / P::kStages & 1);
  now = reinterpret_cast<const StagedTile*>(shared + BackwardTile<P>::kLayout.staged())[i % P::kStages];
  return now.head >= 0;
}

/// A group's part of P^T and dS^T of Q tile i, as left operands of a product. dS, and P where the other group
/// reads it, go to shared memory, too.
template <class P>
__device__ __forceinline__ void differentiate(const Params& p, const BackwardTile<P>& tile, unsigned i,
                                              const StagedTile& now, int group, char* shared,
                                              unsigned (&probability)[BackwardTile<P>::kQueries / 16][4],
                                              unsigned (&gradient)[BackwardTile<P>::kQueries / 16][4]) {
  using Element = typename P::Element;
  using Tile = BackwardTile<P>;
  constexpr int kS = Tile::kQueries / 2;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int first_row = Tile::first_row(group), first_query = Tile::first_query(group);
  const int kv_row = first_row + warp * 16 + lane / 4;  // in the tile; and kv_row + 8
  const int slot = i % P::kStages, phase = i / P::kStages & 1;
  const int h = now.head, q_begin = now.tile * P::kBr + first_query;
  // Of this thread's first query; opaque, so that the others' are offsets in the instructions.
  const int own = opaque((slot * P::kBr + first_query + lane % 4 * 2) * 4);
  const char* row_lse = shared + Tile::kLayout.lse() + own;
  const char* row_d = shared + Tile::kLayout.d() + own;
  const Position q_position = position(q_begin + lane % 4 * 2);
  const Position kv_position = position(tile.kv_begin() + kv_row);
  const auto at_q = [&](int n) { return q_position + (n / 4 * 8 + n % 2); };
  const auto at_kv = [&](int n) { return kv_position + n / 2 % 2 * 8; };
  const Sequence<P>& sequence = tile.place->sequence;
  [[maybe_unused]] const auto head = sequence.head(p, h);
  if constexpr (P::kVarlen) {
    if (const int valid = sequence.seqlen_q(p) - now.tile * P::kBr; valid < P::kBr) {
      // The rows behind belong to the next sequence.
      barrier_wait<P>(tile.dout_full(slot), phase);
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
  barrier_wait<P>(tile.dout_full(slot), phase);
  start_transposed<P, P::kHeadDimV>(dp, tile.v() + first_row * kRowBytes,
                                    tile.dout(slot) + first_query * kRowBytes);

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
      blocks = __ballot_sync(kWholeWarp, column[static_cast<long long>(q / P::kBlockQ) * p.map_columns] != 0);
    }
  }
  // Of sixteen queries of a tile in shared memory, [KV row][query], lane l says where row l % 8 of matrix l /
  // 8 is to be. The swizzle lets a step change two bits of the place.
  const int first_place =
      opaque(chunk_offset<P::kBc>(first_row + warp * 16 + lane % 16, first_query / 8 + lane / 16));
  const auto store_step = [&](unsigned to, int step, const unsigned(&words)[4]) {
    store_matrices(to + (first_place ^ (step % 4 * 32)) + step / 4 * Tile::kKvSlice, words);
  };
  const float scale_log2 = score_scale_log2<P>(p);
  multiply_wait<0>();
  pin(s);
  pin(dp);
  // When dS of the tile before is there, what this one overwrites has been read. The first does not wait.
  if constexpr (!Tile::kWide) barrier_wait<P>(tile.ds_full(i - 1), (i - 1) / 2 & 1);
  const auto eight_queries_at_a_time = [&](auto masked) {
#pragma unroll
    for (int n = 0; n < kS; n += 4) {
      const float2 lse = *reinterpret_cast<const float2*>(row_lse + n * 8);
      const float2 d = *reinterpret_cast<const float2*>(row_d + n * 8);
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
        const float probable = exp2_approx(fmaf(s[n + e], scale_log2, e % 2 ? -lse.y : -lse.x));
        const bool drop = P::kDropout && (dropped[(n + e) / 32] >> ((n + e) % 32) & 1u) != 0;
        const float slope_of_p = !P::kDropout ? dp[n + e] : drop ? 0.0f : dp[n + e] * p.keep_scale;
        s[n + e] = drop ? 0.0f : probable;
        dp[n + e] = probable * (slope_of_p - (e % 2 ? d.y : d.x));
        // A slope may be anything where P is zero.
        if constexpr (P::kScoreGrad) dp[n + e] = probable == 0.0f ? 0.0f : dp[n + e] * slope[e];
      }
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        probability[n / 8][n % 8 / 2 + e / 2] = pack<Element>(s[n + e], s[n + e + 1]);
        gradient[n / 8][n % 8 / 2 + e / 2] = pack<Element>(dp[n + e], dp[n + e + 1]);
      }
      if (n % 8 == 0) continue;
      if constexpr (Tile::kWide) store_step(tile.p(i), n / 8, probability[n / 8]);
      store_step(tile.ds(i), n / 8, gradient[n / 8]);
    }
  };
  // Two copies, since a branch inside costs what it saves.
  if (partial)
    eight_queries_at_a_time(Flag<true>{});
  else
    eight_queries_at_a_time(Flag<false>{});
  publish_to_async_proxy();
}

/// Starts a group's part of dQ of Q tile i.
template <class P>
__device__ __forceinline__ void start_dq(const BackwardTile<P>& tile, unsigned i, int group,
                                         float (&dq)[BackwardTile<P>::kDqColumns / 2]) {
  using Tile = BackwardTile<P>;
  const int first_column = Tile::kSplitRows ? 0 : group * Tile::kDqColumns;
  const unsigned long long left =
      tile_descriptor(tile.ds(i) + (Tile::kSplitRows ? group * Tile::kKvSlice : 0), Tile::kKvSlice);
  const unsigned long long right =
      tile_descriptor(Tile::column(tile.k(), first_column, Tile::kKvSlice), Tile::kKvSlice);
  pin(dq);
  multiply_fence();
#pragma unroll
  for (int step = 0; step < P::kBc / 16; ++step)
    P::multiply_dq(dq, left + (step * 16 * kRowBytes >> 4), right + (step * 16 * kRowBytes >> 4), step > 0);
  multiply_commit();
  pin(dq);
}

/// Starts a group's part of dV and then of dK of Q tile i.
template <class P>
__device__ __forceinline__ void start_gradients(
    const BackwardTile<P>& tile, unsigned i, int group,
    const unsigned (&probability)[BackwardTile<P>::kQueries / 16][4],
    const unsigned (&gradient)[BackwardTile<P>::kQueries / 16][4], float (&dk)[BackwardTile<P>::kOwnDim / 2],
    float (&dv)[BackwardTile<P>::kOwnDimV / 2]) {
  using Tile = BackwardTile<P>;
  const auto own_columns = [&](unsigned at, int columns) {
    return tile_descriptor(Tile::column(at, Tile::kWide ? group * columns : 0, Tile::kQSlice), Tile::kQSlice);
  };
  const unsigned long long dout = own_columns(tile.dout(i % P::kStages), Tile::kOwnDimV);
  const unsigned long long q = own_columns(tile.q(i % P::kStages), Tile::kOwnDim);
  pin(dv);
  pin(dk);
  multiply_fence();
  if constexpr (Tile::kWide) {
    // The summed queries are the columns of P^T and dS^T.
    const unsigned long long p_tile = tile_descriptor(tile.p(i), 0), ds_tile = tile_descriptor(tile.ds(i), 0);
#pragma unroll
    for (int step = 0; step < P::kBr / 16; ++step)
      P::multiply_dv(dv, p_tile + (step * 32 >> 4), dout + (step * 16 * kRowBytes >> 4), 1);
    multiply_commit();
#pragma unroll
    for (int step = 0; step < P::kBr / 16; ++step)
      P::multiply_dk(dk, ds_tile + (step * 32 >> 4), q + (step * 16 * kRowBytes >> 4), 1);
  } else {
#pragma unroll
    for (int step = 0; step < P::kBr / 16; ++step)
      P::multiply_dv(dv, probability[step], dout + (step * 16 * kRowBytes >> 4));
    multiply_commit();
#pragma unroll
    for (int step = 0; step < P::kBr / 16; ++step)
      P::multiply_dk(dk, gradient[step], q + (step * 16 * kRowBytes >> 4));
  }
  multiply_commit();
}

template <class P>
__device__ __forceinline__ void consume(const Params& p, const BackwardTile<P>& tile, int group,
                                        char* shared) {
  using Tile = BackwardTile<P>;
  constexpr int kSteps = Tile::kQueries / 16;
  float dk[Tile::kOwnDim / 2] = {}, dv[Tile::kOwnDimV / 2] = {};
  StagedTile now, before;
  if (kForeignKeys<P> && tile.kv_begin() + P::kBc > tile.kv_limit(p) && find(tile, 0, now, shared)) {
    // What stands behind the last key may be anything, and zero times anything is not zero.
    barrier_wait<P>(tile.dout_full(0), 0);
    const int valid = max(tile.kv_limit(p) - tile.kv_begin(), 0);
    clear_rows<P::kBc, P::kHeadDim>(shared + Tile::kLayout.k(), valid);
    clear_rows<P::kBc, P::kHeadDimV>(shared + Tile::kLayout.v(), valid);
    publish_to_async_proxy();
    named_barrier_sync(2 + group, 128);
  }
  // One counter for stage, phase and buffer: registers are short.
  unsigned i = 0;
  for (; find(tile, i, now, shared); ++i) {
    const int slot = i % P::kStages;
    unsigned probability[kSteps][4], gradient[kSteps][4];
    differentiate(p, tile, i, now, group, shared, probability, gradient);
    float dq[Tile::kDqColumns / 2];
    if constexpr (Tile::kWide) {
      barrier_arrive(tile.ds_full(i));
      barrier_wait<P>(tile.ds_full(i), i / 2 & 1);
      start_dq(tile, i, group, dq);
      start_gradients(tile, i, group, probability, gradient, dk, dv);
      multiply_wait<1>();
      pin(dq);
      pin(dv);
      barrier_wait<P>(tile.dq_empty(group), (i & 1) ^ 1);
      stage_dq<0, Tile::kDqInDout>(tile, group, slot, dq, shared);
      multiply_wait<0>();
      pin(dk);
      stage_dq<Tile::kDqInDout, Tile::kDqSteps>(tile, group, slot, dq, shared);
      give_dq(tile, group, now, shared);
    } else {
      // Before the first tile there is none: then nobody looks at the result, but a branch would serialise.
      start_dq(tile, i - 1, group, dq);
      start_gradients(tile, i, group, probability, gradient, dk, dv);
      multiply_wait<2>();
      pin(dq);
      barrier_arrive(tile.ds_full(i));
      if (i > 0) {
        barrier_wait<P>(tile.dq_empty(group), i & 1);
        stage_dq<0, Tile::kDqSteps>(tile, group, slot, dq, shared);
        give_dq(tile, group, before, shared);
      }
      before = now;
      multiply_wait<0>();
      pin(dk);
      pin(dv);
      // Every thread says for itself that it has read LSE, D and what the stage holds.
      barrier_arrive(tile.dout_empty(slot));
      barrier_arrive(tile.q_empty(slot));
    }
  }
  if (!Tile::kWide && i > 0) {
    float dq[Tile::kDqColumns / 2];
    barrier_wait<P>(tile.ds_full(i - 1), (i - 1) / 2 & 1);
    start_dq(tile, i - 1, group, dq);
    multiply_wait<0>();
    pin(dq);
    barrier_wait<P>(tile.dq_empty(group), i & 1);
    stage_dq<0, Tile::kDqSteps>(tile, group, 0, dq, shared);
    give_dq(tile, group, before, shared);
  }
  const auto& place = *tile.place;
  const int row = tile.kv_begin() + Tile::first_row(group) + own_row();
  const auto store = [&](auto& c, int columns, float scale, const TensorParam& to) {
    constexpr int kChunks = sizeof(c) / 16;  // of a group
    const int first_chunk = Tile::kWide ? group * kChunks : 0;
#pragma unroll
    for (float& value : c) value *= scale;
    store_rows<typename P::Element>(c, min(columns / 8 - first_chunk, kChunks),
                                    place.sequence.kv_pointer(to, place.h_kv, row) + first_chunk * 8,
                                    to.stride_s, place.sequence.seqlen_kv(p) - row);
  };
  store(dk, P::kHeadDim, p.softmax_scale, p.dk);
  store(dv, P::kHeadDimV, P::kDropout ? p.keep_scale : 1.0f, p.dv);
  // Only now, as the last dQ takes its time to leave.
  barrier_wait<P>(tile.dq_empty(group), (i & 1) ^ 1);
  give_dq(tile, group, {-1}, shared);
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
    for (int buffer = 0; buffer < 2; ++buffer) barrier_init(tile.ds_full(buffer), Tile::kGroups * 128);
    for (int slot = 0; slot < P::kStages; ++slot) {
      barrier_init(tile.q_full(slot), 1);
      barrier_init(tile.dout_full(slot), 1);
      barrier_init(tile.q_empty(slot), Tile::kGroups * (Tile::kWide ? 1 : 128));
      barrier_init(tile.dout_empty(slot), Tile::kGroups * (Tile::kWide ? 1 : 128));
    }
    for (int group = 0; group < Tile::kGroups; ++group) {
      barrier_init(tile.dq_full(group), 128);
      barrier_init(tile.dq_empty(group), 1);
    }
    barrier_init_fence();
  }
  __syncthreads();

  const int group = __shfl_sync(kWholeWarp, static_cast<int>(threadIdx.x) / 128, 0);
  if (group == 0) {
    lower_register_limit<Tile::kHelperRegisters>();
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (threadIdx.x % 32 != 0) return;
    if (warp == 0) produce(p, tile, maps, shared);
    if (warp == 1 || warp == 2) add_dq(p, tile, warp - 1, shared);
  } else {
    raise_register_limit<Tile::kConsumerRegisters>();
    consume(p, tile, group - 1, shared);
  }
}

}  // namespace flashjit::sm90
