// Loads of the kernel of O's tangent: tiles are twice as wide as Q, K and V, with the tangents' columns
// behind theirs.
#pragma once

#include "flashjit/common/jvp_params.cuh"
#include "flashjit/sm90/forward_producer.cuh"

namespace flashjit::sm90 {

/// The problem as the forward pass's parts take it, to which a tensor and its tangent are one tensor of twice
/// as many columns, with those that fill a slice.
template <class P>
struct JvpPart : P {
  using Plain = P;
  static constexpr int kHeadDim = jvp_columns(P::kHeadDim), kHeadDimV = jvp_columns(P::kHeadDimV),
                       kQTilesPerCta = 1;
  // Scores are found pair by pair, beside their tangents.
  static constexpr bool kBiasTile = false, kScoreRowTerm = false, kScoreColumnTerm = false,
                        kScoreLine = false;
  static constexpr bool kHoldsQ = false, kTmaStoresO = false, kStreamK = false, kQTilesAsHeads = false,
                        kCascade = false, kCountsTiles = false, kRaggedTiles = false, kFp16Products = false,
                        kSplitTailWave = false;
};

/// Copies the slices of a tile. An expanded tensor, with a stride of 0, has one head or batch entry in its
/// map.
template <int kRows, int kColumns>
__device__ __forceinline__ void load_slices(unsigned to, const TensorParam& tensor, const TensorMap& map,
                                            unsigned full, int row, int head, int batch) {
  load_tile<kRows, kColumns>(to, map, full, row, tensor.stride_h == 0 ? 0 : head,
                             tensor.stride_b == 0 ? 0 : batch);
}
/// A tile's, and behind them its tangent's, where there is one.
template <int kRows, int kColumns>
__device__ __forceinline__ void load_with_tangent(unsigned to, const TensorParam& tensor,
                                                  const TensorMap& map, const TensorParam& tangent,
                                                  const TensorMap& tangent_map, unsigned full, int row,
                                                  int head, int batch) {
  constexpr int kBytes = tile_bytes(kRows, kColumns);
  barrier_expect(full, tangent.data ? 2 * kBytes : kBytes);
  load_slices<kRows, kColumns>(to, tensor, map, full, row, head, batch);
  if (tangent.data) load_slices<kRows, kColumns>(to + kBytes, tangent, tangent_map, full, row, head, batch);
}

template <class P>
struct JvpQLoad {
  static __device__ __forceinline__ void load(const JvpParams& p, const ForwardStorage<P>& smem,
                                              const JvpTensorMaps& maps, int wg, int round, bool more) {
    const WorkTile<P>& work = smem.work(round);
    const unsigned full = smem.q_full(wg, round);
    if (!more) return barrier_expect(full, 0);
    load_with_tangent<kWarpgroupRows, P::Plain::kHeadDim>(
        smem.q(wg, round), p.q, maps.q, p.q_tangent, maps.q_tangent, full,
        work.sequence.q_row(work.q_begin) + wg * kWarpgroupRows, work.h, work.sequence.batch());
  }
};

/// Loads K and V in the order in which they are needed. By one thread.
template <class P>
__device__ __forceinline__ void load_kv_with_tangents(const JvpParams& p, const ForwardStorage<P>& smem,
                                                      const JvpTensorMaps& maps) {
  DenseKvTile<P> loaded;  // of the tile whose K was loaded last
  const auto load_v = [&](int n) {
    VRing<P>::acquire(smem, n);
    load_with_tangent<P::kBc, P::Plain::kHeadDimV>(smem.v(n), p.v, maps.v, p.v_tangent, maps.v_tangent,
                                                   smem.v_full(n), loaded.row, loaded.head, loaded.batch);
  };
  int n = 0;
  for_each_work_tile(smem, [&](const WorkTile<P>& work) {
    const int h_kv = work.h / p.qhead_per_kvhead();
    const int batch = DenseKvTile<P>::page_of_tile(p, work.sequence, 0, 0);
#pragma unroll 1
    for (int i = work.count() - 1; i >= 0; --i, ++n) {
      const int entry = work.kv_tiles.entry(i);
      const DenseKvTile<P> tile(p, work.sequence, batch, h_kv, tile_of_entry<P>(entry) * P::kBc, 0);
      KRing<P>::acquire(smem, n);
      if (kProducerPostsEntries<P>) post_entry(p, smem, work, n, entry);
      load_with_tangent<P::kBc, P::Plain::kHeadDim>(smem.k(n), p.k, maps.k, p.k_tangent, maps.k_tangent,
                                                    smem.k_full(n), tile.row, tile.head, tile.batch);
      if (n > 0) load_v(n - 1);
      loaded = tile;
    }
  });
  if (n > 0) load_v(n - 1);
}

/// Writes the rows of the Q tiles without keys, which the other warps skip. By one warp.
template <class P>
__device__ __forceinline__ void write_tangents_without_keys(const JvpParams& p) {
  using Element = typename P::Element;
  constexpr int kColumns = P::Plain::kHeadDimV;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const AllTiles<P> tiles(p);
#pragma unroll 1
  for (unsigned index = blockIdx.x; index < tiles.count(); index += gridDim.x) {
    const WorkTile<P> work(p, tiles.coord(index));
    if (work.count() > 0) continue;
    const int end = min(work.q_begin + P::kBr, work.sequence.seqlen_q(p));
#pragma unroll 1
    for (int q = work.q_begin; q < end; ++q) {
      for (const TensorParam* to : {&p.o, &p.o_tangent})
        for (int column = lane * 2; column < kColumns; column += 64)
          store_pair(reinterpret_cast<Element*>(work.sequence.q_pointer(*to, work.h, q)) + column, 0.0f,
                     0.0f);
      const RowEnd row = end_of_row<P>(p, work.h, -infinity());
      const long long at = work.sequence.lse_row(p, work.h, q);
      if (lane == 0 && p.lse.data) p.lse.data[at] = row.lse;
      if (lane == 0 && p.lse_tangent) p.lse_tangent[at] = with_sink_tangent<P>(p, work.h, 0.0f, row.factor);
    }
  }
}

/// The producer's warps.
template <class P>
__device__ __forceinline__ void run_jvp_producer(const JvpParams& p, const JvpTensorMaps& maps,
                                                 const ForwardStorage<P>& smem) {
  const int warp = __shfl_sync(kWholeWarp, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp == 0) {
    if (elected()) load_kv_with_tangents(p, smem, maps);
  } else if (warp == 1) {
    if (elected()) schedule_and_load_q<JvpQLoad>(p, smem, maps, SegmentStart{});
  } else if (warp == 2) {
    write_tangents_without_keys<P>(p);
  }
}

}  // namespace flashjit::sm90
