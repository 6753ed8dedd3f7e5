// Loads of K and V where TMA cannot copy tiles: two of the producer's warps copy them row by row.
#pragma once

#include "flashjit/sm90/forward_rings.cuh"
#include "flashjit/tma/gather_rows.cuh"

namespace flashjit::sm90 {

/// Loads K and V as KvLoader does, in the same order. By each of kGatherWarps warps.
template <class P, int kWarp>
struct KvRowLoader {
  static __device__ __forceinline__ void run(const Params& p, const ForwardStorage<P>& smem,
                                             const TensorMaps&, const SegmentStart&, int) {
    struct Tile {
      GatheredKeys<P> keys;
      Sequence<P> sequence;
      int h_kv;
    } loaded;  // whose K was loaded last
    const auto load_v = [&](int n, const Tile& tile) {
      if (P::kSharedKv) return;
      RawVRing<P>::acquire(smem, n);
      gather_rows<P, P::kHeadDimV>(smem.raw_v(n), {p, p.v, tile.sequence, tile.h_kv}, tile.keys, kWarp);
      barrier_arrive_after_copies(smem.raw_v_full(n));
    };
    int n = 0;
    for_each_work_tile(smem, [&](const WorkTile<P>& work) {
      const int h_kv = work.h / p.qhead_per_kvhead();
      const FirstKey<kLeavesPages<P>> first_key(work.first_key_read(p));
      KeyEntries<P> entries(p, work, work.kv_begin(work.count() - 1), first_key, kWarp);
#pragma unroll 1
      for (int i = work.count() - 1; i >= 0; --i, ++n) {
        const Tile tile{GatheredKeys<P>(p, work, work.kv_begin(i), first_key, entries, kWarp), work.sequence,
                        h_kv};
        if (i > 0) entries = KeyEntries<P>(p, work, work.kv_begin(i - 1), first_key, kWarp);
        RawKRing<P>::acquire(smem, n);
        if constexpr (P::kIndices) tile.keys.publish(smem.present_keys(n), smem.k_full(n), kWarp);
        if constexpr (kTileInHalves<P>) {
#pragma unroll 1  // two copies of the code spill
          for (int half = 0; half < 2; ++half) {
            if (half == 1) VRing<P>::acquire(smem, n);
            gather_rows<P, P::kHeadDim>(smem.k(n), {p, p.k, tile.sequence, h_kv}, tile.keys, kWarp,
                                        half == 0 ? TileHalf::left : TileHalf::right);
            barrier_arrive_after_copies(half == 0 ? smem.k_full(n) : smem.v_full(n));
          }
          continue;
        }
        gather_rows<P, P::kHeadDim>(smem.raw_k(n), {p, p.k, tile.sequence, h_kv}, tile.keys, kWarp);
        barrier_arrive_after_copies(smem.raw_k_full(n));
        if constexpr (kSharesRows<P>) {
          load_v(n, tile);
          continue;
        }
        if (n > 0) load_v(n - 1, loaded);
        loaded = tile;
      }
    });
    if (!kSharesRows<P> && n > 0) load_v(n - 1, loaded);
  }
};

}  // namespace flashjit::sm90
