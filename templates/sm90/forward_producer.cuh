// The producer warpgroup of the forward pass: one thread loads K and V, another schedules work tiles and
// loads Q, a warp finds the score's column terms, and a warp writes the rows that have no keys.
#pragma once

#include "flashjit/common/running_state.cuh"
#include "flashjit/common/sink.cuh"
#include "flashjit/sm90/forward_cluster.cuh"
#include "flashjit/sm90/forward_out_mod.cuh"
#include "flashjit/sm90/forward_q_columns.cuh"
#include "flashjit/sm90/forward_rings.cuh"
#include "flashjit/tma/bias_tile.cuh"
#include "flashjit/tma/forward_scheduler.cuh"
#include "flashjit/tma/kv_tile.cuh"

namespace flashjit::sm90 {

/// Posts the list entry of tile n for the consumers, by one thread of those that fill K's stage.
template <class P>
__device__ __forceinline__ void post_entry(const Params& p, const ForwardStorage<P>& smem,
                                           const WorkTile<P>& work, int n, int entry) {
  const int end = (tile_of_entry<P>(entry) + 1) * P::kBc;
  smem.entry(n) = end <= work.sequence.seqused_kv(p) ? entry : entry & ~1;
}

/// What a warp loads.
enum class KvTensors { both, k, v };

/// Loads K and V in the order in which they are needed: K of the next KV tile, which may be another work
/// tile's, before V of this one, but where warpgroups share rows. The bias tile comes with K, since the
/// scores read it before P V. By one thread; with pages by one warp, or by a warp each.
template <class P, KvTensors kTensors = KvTensors::both>
__device__ __forceinline__ void load_kv(const Params& p, const ForwardStorage<P>& smem,
                                        const TensorMaps& maps) {
  KvTileCoord<P> loaded;  // of the tile whose K was loaded last
  const auto load_v = [&](int n) {
    if constexpr (!ForwardStorage<P>::kHasVBarriers || kTensors == KvTensors::k) return;
    RawVRing<P>::acquire(smem, n);
    if constexpr (kTileInHalves<P>)
      KvTileCopy<P>::template start<P::kHeadDim, TileHalf::right>(smem.raw_k(n), maps.k, smem.raw_v_full(n),
                                                                  loaded);
    else
      KvTileCopy<P>::template start<tile_columns(P::kHeadDimV, kCodeProducts<P>), TileHalf::whole>(
          smem.raw_v(n), maps.v, smem.raw_v_full(n), loaded);
  };
  int n = 0;
  for_each_work_tile(smem, [&](const WorkTile<P>& work) {
    const int h_kv = work.h / p.qhead_per_kvhead();
    const auto begin_of = [&](int i) { return tile_of_entry<P>(work.kv_tiles.entry(i)) * P::kBc; };
    const int first_key = work.first_key_read(p);
    int page = KvTileCoord<P>::page_of_tile(p, work.sequence, begin_of(work.count() - 1), first_key);
#pragma unroll 1
    for (int i = work.count() - 1; i >= 0; --i, ++n) {
      // The KV tile: the next of the work tile's range or list.
      const int entry = work.kv_tiles.entry(i), begin = tile_of_entry<P>(entry) * P::kBc;
      const KvTileCoord<P> tile(p, work.sequence, page, h_kv, begin, first_key);
      if constexpr (kTensors != KvTensors::v) {
        RawKRing<P>::acquire(smem, n);
        if constexpr (kProducerPostsEntries<P> && !kConvertsKv<P>)
          if (leads_kv_copies<P>()) post_entry(p, smem, work, n, entry);
        KvTileCopy<P>::template start<kQkColumns<P>, kKHalf<P>>(smem.raw_k(n), maps.k, smem.raw_k_full(n),
                                                                tile);
      }
      if constexpr (P::kBiasTile) {
        TermsRing<P>::acquire(smem, n);
        if (leads_kv_copies<P>())
          expect_and_load_bias_tile<P::kBr, P::kBc>(p, maps, smem.terms_full(n), 0,
                                                    P::bias_tile(p, work.sequence.head(p, work.h)),
                                                    smem.bias_tile(n), work.q_begin, begin);
      }
      // The page table is read a tile ahead of its copies.
      if (kPaged<P> && i > 0)
        page = KvTileCoord<P>::page_of_tile(p, work.sequence, begin_of(i - 1), first_key);
      constexpr bool kVFollows = !kSharesRows<P> && kTensors != KvTensors::v;
      if (kVFollows && n > 0) load_v(n - 1);
      loaded = tile;
      if (!kVFollows) load_v(n);
    }
  });
  if (!kSharesRows<P> && kTensors != KvTensors::v && n > 0) load_v(n - 1);
}
template <class P, KvTensors kTensors = KvTensors::both>
struct KvLoader {
  static __device__ __forceinline__ void run(const Params& p, const ForwardStorage<P>& smem,
                                             const TensorMaps& maps, const SegmentStart&, int) {
    if (kPaged<P> || elected()) load_kv<P, kTensors>(p, smem, maps);
  }
};

// How a warpgroup's rows of Q are loaded, none where there is no more work; QTileLoad<P> names one of these
// types.

/// Rows of one head.
template <class P>
struct PlainQLoad {
  static __device__ __forceinline__ void load(const Params&, const ForwardStorage<P>& smem,
                                              const TensorMaps& maps, const int& wg, const int& round,
                                              const bool& more) {
    const WorkTile<P>& work = smem.work(round);
    barrier_expect(smem.q_full(wg, round), more ? ForwardStorage<P>::kQBytes : 0);
    if (!more) return;
    QColumns<P>::for_each_part(maps, [&](const TensorMap& map, auto part) {
      load_tile<warpgroup_rows(P::kBr), decltype(part)::kColumns>(
          smem.q(wg, round) + part.kFirst * kWarpgroupRows * kRowBytes, map, smem.q_full(wg, round),
          work.sequence.q_row(work.q_begin) + wg * kWarpgroupRows, work.h, work.sequence.batch());
    });
  }
};
/// PackGQA: rows of all heads of the work tile.
template <class P>
struct PackedQLoad {
  static __device__ __forceinline__ void load(const Params& p, const ForwardStorage<P>& smem,
                                              const TensorMaps& maps, int wg, int round, bool more) {
    const WorkTile<P>& work = smem.work(round);
    const int row = work.sequence.q_row(work.q_begin) + wg * p.packed.queries;
    const unsigned full = smem.q_full(wg, round);
    const int row_bytes = ForwardStorage<P>::kQBytes / kWarpgroupRows;
    barrier_expect(full, more ? p.packed.queries * p.packed.heads * row_bytes : 0);
    QColumns<P>::for_each_part(maps, [&](const TensorMap& map, auto part) {
      for (int slice = 0; more && slice < slices(part.kColumns); ++slice)
        load_packed_box(smem.q(wg, round) + (part.kFirst + slice) * kWarpgroupRows * kRowBytes, map, full,
                        slice * kSliceColumns, work.h - work.h_kv * p.packed.shared, row, work.h_kv,
                        work.sequence.batch());
    });
  }
};
template <class P>
using QTileLoad = Conditional<P::kPackGqa, PackedQLoad<P>, PlainQLoad<P>>;

/// Runs the tile scheduler, and loads each warpgroup's Q as soon as its stage is free, by a load as above. By
/// one thread.
template <template <class> class Load = QTileLoad, class P, class CallParams, class Maps>
__device__ __forceinline__ void schedule_and_load_q(const CallParams& p, const ForwardStorage<P>& smem,
                                                    const Maps& maps, const SegmentStart& start) {
  using Storage = ForwardStorage<P>;
  auto scheduler = ForwardScheduler<P>::first(p, start, smem.slot);
  const auto finish_tile = [&](const TileCoord& coord) { scheduler.finish_tile(p, start, coord); };
#pragma unroll 1
  for (int round = 0, taken = 0;; ++taken) {
    WorkTile<P>& work = smem.work(round);
    TileCoord coord;
    const bool more = scheduler.next(p, taken, coord);
    if (more && is_behind_keys<P>(p, coord.batch_head, coord.split)) continue;
    work = more ? WorkTile<P>(p, coord) : WorkTile<P>();
    if (more && work.count() == 0) {
      finish_tile(coord);
      continue;
    }
    WorkRing<P>::commit_thread(smem, round);
#pragma unroll 1
    for (int wg = 0; wg < Storage::kRowGroups; ++wg) {
      QRing<P>::acquire(smem, wg, round);
      Load<P>::load(p, smem, maps, wg, round, more);
    }
    if (!more) break;
    finish_tile(coord);
    ++round;
  }
}

/// Finds the score's column terms of each KV tile, once for all rows of the Q tile. By one warp.
template <class P>
struct ColumnTermFinder {
  static __device__ __forceinline__ void run(const Params& p, const ForwardStorage<P>& smem,
                                             const TensorMaps&, const SegmentStart&, int) {
    constexpr int kPerLane = (P::kBc + 31) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    int n = 0;
    for_each_work_tile(smem, [&](const WorkTile<P>& work) {
      const auto head = work.sequence.head(p, work.h);
#pragma unroll 1
      for (int i = work.count() - 1; i >= 0; --i, ++n) {
        float terms[kPerLane];
#pragma unroll
        for (int own = 0; own < kPerLane; ++own)
          terms[own] = P::score_column_term(p, head, position(work.kv_begin(i) + own * 32 + lane));
        TermsRing<P>::acquire(smem, n);
#pragma unroll
        for (int own = 0; own < kPerLane; ++own)
          if (own * 32 + lane < P::kBc) smem.column_terms(n)[own * 32 + lane] = terms[own];
        TermsRing<P>::commit_thread(smem, n);
      }
    });
  }
};

// O of rows without keys: a running state's, as an output has it, or for a split nothing.
template <class P>
struct StateOfNoKeys {
  static __device__ __forceinline__ void write(const Params& p, const WorkTile<P>& work, const int& count,
                                               const int& thread, const int& threads) {
    copy_state<P>(p, work.sequence, work.h, work.q_begin, count, thread, threads);
  }
};
template <class P>
struct NoOutput {
  static __device__ __forceinline__ void write(const Params&, const WorkTile<P>&, const int&, const int&,
                                               const int&) {}
};
template <class P>
using OutputOfNoKeys =
    Conditional<kJoinsState<P>, StateOfNoKeys<P>, Conditional<P::kSplit, NoOutput<P>, EmptyOutput<P>>>;

template <class P>
using PartsWithoutRows =
    Conditional<P::kClusterSplit, ClusterPartsWithoutKeys<P>,
                Conditional<P::kFixedParts, FixedPartsWithoutKeys<P>, PartsWithoutKeys<P>>>;

/// Writes O and LSE, and the largest scores, of the Q tiles without keys, which the other warps skip: not O
/// for a split of the keys. By the threads of one warp, or most of them.
template <class P>
__device__ __forceinline__ void write_empty_rows(const Params& p, const SegmentStart& start, int slot,
                                                 int thread, int threads) {
  if constexpr (kSharesWork<P> || P::kClusterSplit)
    return PartsWithoutRows<P>::write(p, start, thread, threads);
  const AllTiles<P> tiles(p);
#pragma unroll 1
  for (unsigned index = slot_index<P>(slot); index < tiles.count(); index += grid_slots<P>()) {
    const TileCoord coord = tiles.coord(index);
    if (is_behind_keys<P>(p, coord.batch_head, coord.split)) continue;
    const WorkTile<P> work(p, coord);
    if (work.count() > 0) continue;
    if constexpr (kScattersRows<P>) {
      write_rows_without_keys(p, work, thread, threads);
      continue;
    }
    const int count = min(work.sequence.seqlen_q(p) - work.q_begin, queries_per_tile<P>(p));
    OutputOfNoKeys<P>::write(p, work, count, thread, threads);
    if (P::kRowMax) {
      for (int h = work.h; h < work.end(work.h); ++h) {
        float* to = row_max_of<P>(p, work.split);
        for (int row = thread; row < count; row += threads)
          to[work.sequence.written_row(p, h, work.q_begin + row)] = -infinity();
      }
    }
    float* lse = kJoinsState<P> ? nullptr : lse_of<P>(p, work.split);
    if (lse == nullptr) continue;
#pragma unroll 1
    for (int h = work.h; h < work.end(work.h); ++h) {
#pragma unroll 1
      for (int row = thread; row < count; row += threads)
        lse[work.sequence.written_row(p, h, work.q_begin + row)] = end_of_row<P>(p, h, -infinity()).lse;
    }
  }
}

}  // namespace flashjit::sm90
