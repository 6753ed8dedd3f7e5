// Shared memory of the forward pass by name, as ForwardLayout lays it out, and the barriers of the pipelines
// between producer and consumers. Nothing overlaps but segment_scratch(), which is there before work tiles
// are.
#pragma once

#include "flashjit/async/mbarrier.cuh"
#include "flashjit/common/ptx.cuh"
#include "flashjit/sm90/forward_policy.cuh"
#include "flashjit/tma/stream_k.cuh"

namespace flashjit::sm90 {

/// What goes with P from the first of two warpgroups with the same rows to the second.
struct PHandoff {
  float rescale[kWarpgroupRows];  ///< what O so far must be multiplied by
  float scale[kWarpgroupRows];    ///< and after a work tile's last KV tile
  int keys;                       ///< of the KV tile that exist
};

/// The shared memory of one Q tile slot. `n` counts the slot's KV tiles and `round` its work tiles with keys,
/// from the kernel's start: a stage is the count modulo the number of stages, its phase the quotient's
/// parity.
template <class P>
struct ForwardStorage {
  static constexpr ForwardLayout kLayout = kForwardLayout<P>;
  static_assert(kLayout.bytes() == P::kSharedBytes, "what the planner counts on");
  static constexpr int kRowGroups = kLayout.warpgroups(), kWarpgroups = kRowGroups * P::kDSplit,
                       kQStages = kLayout.q_stages();
  static constexpr int kQBytes = tile_bytes(warpgroup_rows(P::kBr), kQkColumns<P>);  // a warpgroup's
  static constexpr int kKBytes = kLayout.k_bytes(), kVBytes = kLayout.v_bytes();
  static constexpr int kSliceBytes = P::kBc * kRowBytes;
  static constexpr int kCodeSlots = max(kLayout.code_slots(), 1);
  static_assert(sizeof(WorkTile<P>) <= kWorkTileBytes);
  using Count = PipelineCount<P>;

  int slot;
  char* shared;   ///< the slot's part, aligned
  unsigned base;  ///< the address of that

  __device__ ForwardStorage(int slot, char* all) : slot(slot) {
    const unsigned begin = (shared_address(all) + kAlignment - 1) / kAlignment * kAlignment;
    base = begin + slot * kLayout.slot_bytes();
    shared = all + (base - shared_address(all));
  }

  // Tiles.
  __device__ unsigned q(int wg, Count round) const {
    return base + kLayout.q() + (row_group<P>(wg) + round % kQStages * kRowGroups) * kQBytes;
  }
  __device__ unsigned k(Count n) const { return base + kLayout.k() + n % P::kStages * kKBytes; }
  __device__ unsigned v(Count n) const {
    return P::kSharedKv ? k(n) : base + kLayout.v() + n % P::kStages * kVBytes;
  }
  __device__ unsigned bias_tile(Count n) const {
    return base + kLayout.bias_tile() + n % P::kStages * kLayout.bias_tile_bytes();
  }
  __device__ unsigned p_tile() const { return base + kLayout.p_tile(); }
  __device__ PHandoff& handoff() const {
    static_assert(sizeof(PHandoff) <= kHandoffBytes);
    return *reinterpret_cast<PHandoff*>(shared + kLayout.handoff());
  }
  __device__ unsigned joined_parts() const { return base + kLayout.joined_parts(); }
  __device__ unsigned o(int wg) const {
    return base + kLayout.o() + wg * tile_bytes(kWarpgroupRows, P::kHeadDimV);
  }
  __device__ unsigned out_tile(int wg) const {
    return base + kLayout.out_tile() + wg * tile_bytes(kWarpgroupRows, P::kHeadDimV);
  }
  __device__ char* parts() const { return shared + kLayout.parts(); }
  /// A tile of codes of K or V, and its keys' scales. `c` is code_index_k() or code_index_v().
  __device__ unsigned codes(Count c) const {
    return base + kLayout.code_tiles() + c % kCodeSlots * kLayout.code_slot_bytes();
  }
  __device__ float* code_scales(Count c) const {
    return reinterpret_cast<float*>(shared + (codes(c) - base) + kLayout.code_scales());
  }
  /// Scales of the keys of K of tile n, or three factors of each, see KeyFactors.
  __device__ float* key_scales(Count n) const {
    return reinterpret_cast<float*>(shared + kLayout.key_scales_begin() +
                                    n % P::kStages * kLayout.key_scales_bytes());
  }
  /// The score's column terms: what it reads of the keys of tile n.
  __device__ float* column_terms(Count n) const {
    return reinterpret_cast<float*>(shared + kLayout.column_terms() +
                                    n % P::kStages * kLayout.column_terms_bytes());
  }
  __device__ WorkTile<P>& work(Count round) const {
    return *reinterpret_cast<WorkTile<P>*>(shared + kLayout.work_tiles() +
                                           round % kKeptWorkTiles * kWorkTileBytes);
  }
  /// For stream-K, where work tiles come later.
  __device__ SegmentScratch& segment_scratch() const {
    static_assert(sizeof(SegmentScratch) <= kKeptWorkTiles * kWorkTileBytes);
    return *reinterpret_cast<SegmentScratch*>(shared + kLayout.work_tiles());
  }
  /// The list entry of tile n, where KV tiles are listed.
  __device__ int& entry(Count n) const {
    return reinterpret_cast<int*>(shared + kLayout.list_entries())[n % P::kStages];
  }

  /// Lists of keys: which entries of tile n are keys, a bit for each.
  __device__ unsigned* present_keys(Count n) const {
    return reinterpret_cast<unsigned*>(shared + kLayout.present_keys() +
                                       n % (2 * P::kStages) * kLayout.present_keys_of_tile());
  }

  // mbarriers: of Q, each warpgroup's; of K and V, four a stage; of work tiles; of what the score reads.
  __device__ unsigned q_full(int wg, Count round) const {
    return base + kLayout.barriers() + (row_group<P>(wg) + round % kQStages * kRowGroups) * 16;
  }
  __device__ unsigned q_empty(int wg, Count round) const { return q_full(wg, round) + 8; }
  __device__ int q_phase(Count round) const { return round / kQStages & 1; }
  __device__ unsigned k_full(Count n) const {
    return base + kLayout.barriers() + kQStages * kRowGroups * 16 + n % P::kStages * 32;
  }
  __device__ unsigned k_empty(Count n) const { return k_full(n) + 8; }
  // With kSharedKv K's: it is released when P V has read it. But halves have their own.
  static constexpr bool kHasVBarriers = !P::kSharedKv || kTileInHalves<P>;
  __device__ unsigned v_full(Count n) const { return kHasVBarriers ? k_full(n) + 16 : k_full(n); }
  __device__ unsigned v_empty(Count n) const { return kHasVBarriers ? k_full(n) + 24 : k_empty(n); }
  __device__ int phase(Count n) const { return n / P::kStages & 1; }
  __device__ unsigned work_full(Count round) const {
    return k_full(0) + P::kStages * 32 + round % kKeptWorkTiles * 8;
  }
  __device__ int work_phase(Count round) const { return round / kKeptWorkTiles & 1; }
  /// The barrier of the bias tile or the column terms of tile n.
  __device__ unsigned terms_full(Count n) const {
    return work_full(0) + kKeptWorkTiles * 8 + n % P::kStages * 16;
  }
  __device__ unsigned terms_empty(Count n) const { return terms_full(n) + 8; }
  __device__ unsigned codes_full(Count c) const {
    constexpr int kTermBarriers = P::kBiasTile || P::kScoreColumnTerm ? 2 : 0;
    return work_full(0) + (kKeptWorkTiles + kTermBarriers * P::kStages) * 8 + c % kCodeSlots * 16;
  }
  __device__ unsigned codes_empty(Count c) const { return codes_full(c) + 8; }
  __device__ int codes_phase(Count c) const { return c / kCodeSlots & 1; }

  // The raw stage of tile n of K or V, which TMA fills: K's or V's own, or a slot for codes. These are one
  // ring, in the order of their loads: K of the next tile before V of this one. Where codes are multiplied it
  // has V's alone. Where rows are decoded K and V have every second slot each: their readers do not wait for
  // each other, so that neither may meet the other's phase of a barrier. Latents have all.
  __device__ Count code_index_k(Count n) const {
    if (kDecodesLatents<P>) return n;
    return kDecodesKv<P> ? 2 * n : n > 0 ? 2 * n - 1 : 0;
  }
  __device__ Count code_index_v(Count n) const {
    return kDecodesKv<P> ? 2 * n + 1 : kCodeProducts<P> ? n : 2 * n + 2;
  }
  __device__ unsigned raw_k(Count n) const { return kConvertsKv<P> ? codes(code_index_k(n)) : k(n); }
  __device__ unsigned raw_v(Count n) const { return kLoadsCodes<P> ? codes(code_index_v(n)) : v(n); }
  __device__ unsigned raw_k_full(Count n) const {
    return kConvertsKv<P> ? codes_full(code_index_k(n)) : k_full(n);
  }
  __device__ unsigned raw_v_full(Count n) const {
    return kLoadsCodes<P> ? codes_full(code_index_v(n)) : v_full(n);
  }
  __device__ unsigned raw_k_empty(Count n) const {
    return kConvertsKv<P> ? codes_empty(code_index_k(n)) : k_empty(n);
  }
  __device__ unsigned raw_v_empty(Count n) const {
    return kLoadsCodes<P> ? codes_empty(code_index_v(n)) : v_empty(n);
  }
  __device__ int raw_k_phase(Count n) const {
    return kConvertsKv<P> ? codes_phase(code_index_k(n)) : phase(n);
  }
  __device__ int raw_v_phase(Count n) const {
    return kLoadsCodes<P> ? codes_phase(code_index_v(n)) : phase(n);
  }

  // Named barriers: the ping-pong among warpgroups, and one for the four warps of a warpgroup. Where
  // warpgroups share rows there is no ping-pong: P is in shared memory, and has been read there; and the
  // second one may start P V.
  __device__ int ping_pong(int wg) const {
    return 1 + (kQTilesPerCta<P> > 1 ? slot * 2 * kWarpgroups : 0) + wg;
  }
  __device__ int warpgroup_barrier(int wg) const { return ping_pong(wg) + kWarpgroups; }
  __device__ int p_full() const { return ping_pong(0); }
  __device__ int p_empty() const { return ping_pong(1); }
  __device__ int may_start_pv() const { return warpgroup_barrier(1) + 1; }

  /// By one thread. A consumer warp arrives once on what TMA wrote; on what threads wrote each thread
  /// arrives, since racecheck does not take a lane's arrival for its warp's reads.
  __device__ void init_barriers() const {
    for (int wg = 0; wg < kRowGroups; ++wg) {
      for (int round = 0; round < kQStages; ++round) {
        barrier_init(q_full(wg, round), 1);
        barrier_init(q_empty(wg, round), kHasFewRows<P> ? kFewRowsWarps : 4);
      }
    }
    for (int round = 0; round < kKeptWorkTiles; ++round) barrier_init(work_full(round), 1);
    for (int stage = 0; stage < P::kStages; ++stage) {
      constexpr int kLoads = kConvertsKv<P> ? kConverterThreads : kGathers<P> ? kGatherWarps * 32 : 1;
      constexpr int kListArrivals = P::kIndices && !kConvertsKv<P> ? kGatherWarps : 0;
      barrier_init(k_full(stage), kLoads + kListArrivals + (kKeyFactors<P> ? 32 : 0));
      if (kHasVBarriers) barrier_init(v_full(stage), kCodeProducts<P> ? kTransposers<P> * 32 : kLoads);
      // Where warpgroups share rows, only the first reads K, and only the second the right half.
      barrier_init(k_empty(stage), kRowGroups * (kThreadsReleaseK<P> ? 128 : 4));
      if (kHasVBarriers) barrier_init(v_empty(stage), (kTileInHalves<P> ? 1 : kWarpgroups) * 4);
      if (P::kBiasTile) {
        barrier_init(terms_full(stage), 1);
        barrier_init(terms_empty(stage), kRowGroups * 4);
      } else if (P::kScoreColumnTerm) {
        barrier_init(terms_full(stage), 32);
        barrier_init(terms_empty(stage), kRowGroups * 128);
      }
    }
    for (int c = 0; c < kLayout.code_slots(); ++c) {
      constexpr int kOfLane = kDecodesKv<P> && !kDecodesLatents<P> ? 2 : 1,
                    kLoads = kOfLane * (kGathers<P> ? kGatherWarps * 32 : 1);
      barrier_init(codes_full(c), kLoads + (P::kKeyScales && !kKeyFactors<P> ? 32 : 0));
      barrier_init(codes_empty(c), kHasFewRows<P>     ? kFewRowsWarps
                                   : kCodeProducts<P> ? kTransposers<P>
                                                      : kConverterReleases<P>);
    }
  }
};

}  // namespace flashjit::sm90
