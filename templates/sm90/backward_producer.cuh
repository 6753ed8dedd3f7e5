// The producer of the backward pass: one thread that takes KV tiles and loads them, and the Q tiles that they
// meet, as soon as there is room.
#pragma once

#include "flashjit/common/lse_log2.cuh"
#include "flashjit/sm90/backward_schedule.cuh"
#include "flashjit/sm90/convert_dq.cuh"
#include "flashjit/tma/bias_tile.cuh"

namespace flashjit::sm90 {

/// Loads Q, if it is not loaded ahead, LSE and the score's row term.
template <class P>
__device__ __forceinline__ void load_q(const Params& p, const TensorMaps& maps, const BackwardSmem<P>& smem,
                                       bool ahead, int stage, unsigned full, int row, int head, int batch,
                                       long long stats_row, const float* lse) {
  using Policy = BackwardPolicy<P>;
  if (!ahead)
    load_tile<P::kBr, Policy::kDim>(smem.q(stage), maps.q, full, row, head, batch,
                                    Policy::first_column(P::kHeadDim));
  load_line(smem.lse(stage), lse + stats_row, P::kBr * 4, full);
  if constexpr (P::kScoreRowTerm) load_line(smem.row_terms(stage), p.row_terms + stats_row, P::kBr * 4, full);
}

/// Says how many bytes of dO, D and, on the first tile, V come to a stage, and loads the bias tile beside
/// them. BiasLoad<P> names one of two types.
template <class P>
struct NoBiasLoad {
  static __device__ __forceinline__ void expect(const Params&, const TensorMaps&, const BackwardSmem<P>&, int,
                                                unsigned full, int bytes, const Sequence<P>&, int, int, int) {
    barrier_expect(full, bytes);
  }
};
template <class P>
struct BiasTileLoad {
  static __device__ __forceinline__ void expect(const Params& p, const TensorMaps& maps,
                                                const BackwardSmem<P>& smem, const int& stage,
                                                const unsigned& full, const int& bytes,
                                                const Sequence<P>& sequence, const int& head,
                                                const int& q_begin, const int& kv_begin) {
    expect_and_load_bias_tile<P::kBr, BackwardPolicy<P>::kKeys>(p, maps, full, bytes,
                                                                P::bias_tile(p, sequence.head(p, head)),
                                                                smem.bias_tile(stage), q_begin, kv_begin);
  }
};
template <class P>
using BiasLoad = Conditional<BackwardPolicy<P>::kHasBiasTile, BiasTileLoad<P>, NoBiasLoad<P>>;

/// Loads dO, if it is not loaded ahead, and D.
template <class P>
__device__ __forceinline__ void load_dout(const Params& p, const TensorMaps& maps,
                                          const BackwardSmem<P>& smem, bool ahead, int stage, int dout_stage,
                                          unsigned full, int row, int head, int batch, long long stats_row) {
  using Policy = BackwardPolicy<P>;
  if (!ahead)
    load_tile<P::kBr, Policy::kDimV>(smem.dout(dout_stage), maps.o, full, row, head, batch,
                                     Policy::first_column(P::kHeadDimV));
  load_line(smem.d(stage), p.d + stats_row, P::kBr * 4, full);
}

/// The second Q tile of a stage, with dO, LSE and D, where each warpgroup has a KV tile of its own;
/// SecondQTile<P> names one of two types. `behind()`: by how many rows it is behind the first; without a
/// second the first comes again, with an LSE by which its P is 0.
template <class P>
struct NoSecondQTile {
  static __device__ __forceinline__ unsigned large_lse(const Params&, const Sequence<P>&, const StagedTile&) {
    return 0;
  }
  static __device__ __forceinline__ void wait_cleared(const Params&, const KvWorkTile<P>&) {}
  static __device__ __forceinline__ void fill(const BackwardSmem<P>&, const StagedTile&, int) {}
  template <class... Rest>
  static __device__ __forceinline__ void load_q(Rest&&...) {}
  template <class... Rest>
  static __device__ __forceinline__ void load_dout(Rest&&...) {}
};
template <class P>
struct SecondQTileOfStage {
  using Policy = BackwardPolicy<P>;

  static __device__ __forceinline__ bool lacks(const StagedTile& now) { return now.dq_order < 0; }
  static __device__ __forceinline__ int behind(const StagedTile& now) {
    return lacks(now) ? 0 : (now.dq_order - now.tile) * P::kBr;
  }
  static __device__ __forceinline__ unsigned large_lse(const Params& p, const Sequence<P>& sequence,
                                                       const StagedTile& now) {
    return large_lse_of_tile<P>(p, sequence.stats_row(p, now.head) + now.tile * P::kBr + behind(now));
  }
  /// The consumers add to dQ themselves.
  static __device__ __forceinline__ void wait_cleared(const Params& p, const KvWorkTile<P>& work) {
    sm90::wait_cleared<P>(p, work.b, work.h_kv);
  }
  /// Without a second, its LSE. The bytes of a stage are expected after that.
  static __device__ __forceinline__ void fill(const BackwardSmem<P>& smem, const StagedTile& now, int stage) {
    if (!lacks(now)) return;
    constexpr float kLarge = 1e30f;
    auto* to = reinterpret_cast<float4*>(smem.pointer(smem.lse(stage) + P::kBr * 4));
#pragma unroll 1
    for (int at = 0; at < P::kBr / 4; ++at) to[at] = {kLarge, kLarge, kLarge, kLarge};
  }
  static __device__ __forceinline__ void load_q(const TensorMaps& maps, const BackwardSmem<P>& smem,
                                                const StagedTile& now, int stage, unsigned full, int row,
                                                int batch, const float* lse) {
    load_tile<P::kBr, Policy::kDim>(smem.q(stage) + tile_bytes(P::kBr, Policy::kDim), maps.q, full,
                                    row + behind(now), now.head, batch);
    const unsigned to = smem.lse(stage) + P::kBr * 4;
    if (!lacks(now)) load_line(to, lse + behind(now), P::kBr * 4, full);
  }
  static __device__ __forceinline__ void load_dout(const TensorMaps& maps, const BackwardSmem<P>& smem,
                                                   const StagedTile& now, int stage, unsigned full, int row,
                                                   int batch, const float* d) {
    load_tile<P::kBr, Policy::kDimV>(smem.dout(stage) + tile_bytes(P::kBr, Policy::kDimV), maps.o, full,
                                     row + behind(now), now.head, batch);
    load_line(smem.d(stage) + P::kBr * 4, d + behind(now), P::kBr * 4, full);
  }
};
template <class P>
using SecondQTile = Conditional<kOwnTiles<P>, SecondQTileOfStage<P>, NoSecondQTile<P>>;

/// The other CTA's rows of K, where CTAs exchange dS; OtherK<P> names one of two types.
template <class P>
struct NoOtherK {
  static __device__ __forceinline__ void load(const TensorMaps&, const BackwardSmem<P>&, unsigned, int, int,
                                              int) {}
};
template <class P>
struct OtherCtaK {
  static __device__ __forceinline__ void load(const TensorMaps& maps, const BackwardSmem<P>& smem,
                                              unsigned full, int row, int h_kv, int batch) {
    using Policy = BackwardPolicy<P>;
    constexpr int kSlices = Policy::kLayout.other_columns() - Policy::kFifthSlice;
    load_tile<Policy::kKeys, kSlices>(smem.other_k(), maps.k, full, row, h_kv, batch, 0,
                                      smem.first_other_column() / kSliceColumns);
    load_tile<Policy::kKeys, Policy::kFifthSlice>(smem.other_k() + tile_bytes(Policy::kKeys, kSlices), maps.k,
                                                  full, row, h_kv, batch, kMostCtaColumns);
  }
};
template <class P>
using OtherK = Conditional<BackwardPolicy<P>::kExchangesDs, OtherCtaK<P>, NoOtherK<P>>;

/// Loads K and V, which arrive with Q and dO of Q tile i.
template <class P>
__device__ __forceinline__ void load_kv(const TensorMaps& maps, const BackwardSmem<P>& smem, unsigned q_full,
                                        unsigned dout_full, int row, int own, int h_kv, int batch) {
  using Policy = BackwardPolicy<P>;
  load_tile<Policy::kKeys, Policy::kDim>(smem.k(), maps.k, q_full, row, h_kv, batch,
                                         Policy::first_column(P::kHeadDim));
  OtherK<P>::load(maps, smem, q_full, row + Policy::kKeys - 2 * own, h_kv, batch);
  load_tile<Policy::kKeys, Policy::kDimV>(smem.v(), maps.v, dout_full, row, h_kv, batch,
                                          Policy::first_column(P::kHeadDimV));
}

/// Loads the first Q and dO tiles with K and V, where nothing has to be read before.
template <class P>
__device__ __forceinline__ void load_first_tiles(const TensorMaps& maps, const BackwardSmem<P>& smem,
                                                 const Sequence<P>& sequence, const StagedTile& tile,
                                                 int kv_begin, int own, int h_kv, int batch, bool has_keys) {
  using Policy = BackwardPolicy<P>;
  const int q_row = sequence.q_row(tile.tile * P::kBr);
  load_tile<P::kBr, Policy::kDim>(smem.q(0), maps.q, smem.q_full(0), q_row, tile.head, batch);
  if (has_keys)
    load_kv(maps, smem, smem.q_full(0), smem.dout_full(0), sequence.kv_row(kv_begin), own, h_kv, batch);
  load_tile<P::kBr, Policy::kDimV>(smem.dout(0), maps.o, smem.dout_full(0), q_row, tile.head, batch);
}

/// Says that there are no Q tiles, where the first are being loaded.
template <class P>
__device__ __forceinline__ void leave_loaded_tile(const BackwardSmem<P>& smem) {
  using Smem = BackwardSmem<P>;
  smem.q_tile(0).head = -1;
  barrier_expect(smem.q_full(0), Smem::kQBytes + Smem::kKBytes);
  barrier_expect(smem.dout_full(0), Smem::kDoutBytes + Smem::kVBytes);
  QTileRing<P>::wait_full(smem, 0u);
  DoutRing<P>::wait_full(smem, 0u);
}

/// Says that there are no more Q tiles, in the place of tile i.
template <class P>
__device__ __forceinline__ void end_q_tiles(const BackwardSmem<P>& smem, unsigned i) {
  QTileRing<P>::acquire(smem, i);
  smem.q_tile(i).head = -1;
  QTileRing<P>::commit_thread(smem, i);
}

template <class P>
__device__ __forceinline__ void produce(const Params& p, const TensorMaps& maps,
                                        const BackwardSmem<P>& smem) {
  using Policy = BackwardPolicy<P>;
  using Smem = BackwardSmem<P>;
  using Scheduler = KvTileScheduler<P>;
  unsigned n = 0, i = 0;
  bool own_tile = Scheduler::first(p);
  // Without queries there are no KV tiles, and the counter is not cleared.
  while (p.seqlen_q > 0) {
    const bool claims = own_tile;
    own_tile = false;
    const unsigned index = Scheduler::next(p, smem, n, claims);
    if (index >= kv_work_tiles<P>(p)) {
      send_tile_index(p, smem, n, index);  // there are no more
      break;
    }
    const KvWorkTile<P> work(p, index);
    const Sequence<P> sequence(p, work.b);
    QWalk<P> walk(p, sequence, work, cta_keys<P>(p, Policy::rank()));
    StagedTile now = walk.next(p, sequence);
    if (now.head < 0) {
      Scheduler::finish_tile(p, index, claims);
      continue;
    }
    send_tile_index(p, smem, n, index);
    SecondQTile<P>::wait_cleared(p, work);
    const int kv_slot = n % Policy::kLayout.kept_kv_tiles(), batch = sequence.batch();
    const int own = Policy::first_key_of_cta(Policy::rank()), kv_begin = work.kv_tile * P::kBc + own;
    smem.kv_tiles()[kv_slot] = {sequence, work.h_kv, kv_begin, sequence.seqused_kv(p)};
    // Without keys of its own a CTA loads none, and the consumers clear the tile.
    const bool has_keys = !Policy::kSumsDq || !kOutOfRangeKeys<P> || kv_begin < sequence.seqused_kv(p);
    const auto acquire_kv = [&] { KvTileRing<P>::acquire(smem, n); };
    // Whether rows of a Q tile have a large LSE: read a tile ahead.
    const auto large_of = [&](const StagedTile& tile) {
      if (!P::kLseLog2 || tile.head < 0) return 0u;
      return large_lse_of_tile<P>(p, sequence.stats_row(p, tile.head) + tile.tile * P::kBr) |
             (kOwnTiles<P> ? SecondQTile<P>::large_lse(p, sequence, tile) : 0u);
    };
    // The first tiles are loaded before anything is read for their stats, or, where this cluster finds these,
    // meanwhile.
    bool ahead = n == 0 && Policy::kLoadsAhead;
    if constexpr (Policy::kLoadsAhead) {
      if (ahead) {
        load_first_tiles(maps, smem, sequence, now, kv_begin, own, work.h_kv, batch, has_keys);
        if (finds_row_stats<P>(p)) wait_row_stats(smem);
        if constexpr (P::kClaimsTiles)
          if (!Scheduler::finish_tile(p, index, claims)) return leave_loaded_tile(smem);
      }
    }
    const auto mark_large = [&](StagedTile& tile, unsigned large) {
      if (P::kLseLog2 && large != 0) tile.full = kLargeLse;
    };
    mark_large(now, large_of(now));
    bool first = true;
#pragma unroll 1
    while (now.head >= 0) {
      const StagedTile next = walk.next(p, sequence);
      const unsigned next_large = large_of(next);
      const int q_begin = now.tile * P::kBr, q_row = sequence.q_row(q_begin);
      const long long stats_row = sequence.stats_row(p, now.head) + q_begin;
      const int last = next.head < 0 ? work.split + 1 : 0;
      const float* lse = P::kLseLog2 && now.full != kLargeLse ? lse_log2(p) : p.lse_padded;
      smem.q_tile(i) = {now, stats_row, kv_slot, first, static_cast<short>(last)};
      const int stage = i % P::kStages, dout_stage = i % Policy::kDoutStages;
      const unsigned q_full = smem.q_full(stage), dout_full = smem.dout_full(dout_stage);
      QTileRing<P>::acquire(smem, i);
      SecondQTile<P>::fill(smem, now, stage);
      barrier_expect(q_full, Smem::kQStageBytes - (kOwnTiles<P> && now.dq_order < 0 ? P::kBr * 4 : 0) +
                                 (first && has_keys ? Smem::kKBytes + Smem::kOtherKBytes : 0));
      SecondQTile<P>::load_q(maps, smem, now, stage, q_full, q_row, batch, lse + stats_row);
      load_q(p, maps, smem, ahead, stage, q_full, q_row, now.head, batch, stats_row, lse);
      DoutRing<P>::acquire(smem, i);
      // Consumers that clear K and V begin when dO is here.
      if (first && !has_keys) acquire_kv();
      const int dout_bytes = Smem::kDoutStageBytes + (first && has_keys ? Smem::kVBytes : 0);
      BiasLoad<P>::expect(p, maps, smem, dout_stage, dout_full, dout_bytes, sequence, now.head, q_begin,
                          kv_begin);
      load_dout(p, maps, smem, ahead, stage, dout_stage, dout_full, q_row, now.head, batch, stats_row);
      SecondQTile<P>::load_dout(maps, smem, now, stage, dout_full, q_row, batch, p.d + stats_row);
      if (first && has_keys && !ahead) {
        const int kv_row = sequence.kv_row(kv_begin);
        acquire_kv();
        load_kv(maps, smem, q_full, dout_full, kv_row, own, work.h_kv, batch);
      }
      first = ahead = false;
      now = next;
      mark_large(now, next_large);
      ++i;
    }
    ++n;
  }
  end_q_tiles(smem, i);
}

}  // namespace flashjit::sm90
