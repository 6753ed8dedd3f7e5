// Rows of K and V that lie anywhere: where a box of TMA would span pages, and where a query's list names its
// keys. Warps copy a KV tile row by row, by cp.async, to where TMA would have put it; rows that are no keys
// become zeros.
#pragma once

#include "flashjit/async/mbarrier.cuh"
#include "flashjit/common/index_list.cuh"
#include "flashjit/common/kv_source.cuh"
#include "flashjit/tma/kv_tile.cuh"
#include "flashjit/tma/tile_scheduler.cuh"

namespace flashjit::tma {

/// The slots of a warp's keys of a KV tile; -1: no key. Warps take turns of 32 keys, one a lane.
template <class P>
struct GatheredKeys {
  static constexpr int kGroups = (P::kBc + 31) / 32;
  static constexpr int kOwn = (kGroups + kGatherWarps - 1) / kGatherWarps;
  int slot[kOwn];

  __device__ __forceinline__ GatheredKeys() {}
  __device__ __forceinline__ GatheredKeys(const Params& p, const WorkTile<P>& work, int begin,
                                          const FirstKey<kLeavesPages<P>>& first_key, int warp) {
    const int seqused_kv = work.sequence.seqused_kv(p), lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      const int at = first(own, warp) + lane;
      int kv = begin + at;
      if constexpr (P::kIndices)
        kv = at < P::kBc ? IndexList<P>(p, work.sequence, work.h_kv, work.q_begin).key(kv) : -1;
      else if (kv >= seqused_kv || !first_key.reads(kv))
        kv = -1;
      slot[own] = kv >= 0 ? slot_of_key<P>(p, work.sequence.b, kv) : -1;
    }
  }
  /// Marks for the consumers which entries of a list are keys, and arrives on K's barrier.
  __device__ __forceinline__ void publish(unsigned* present, unsigned full, int warp) const {
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      const unsigned exist = __ballot_sync(kWholeWarp, slot[own] >= 0);
      if (threadIdx.x % 32 == 0 && first(own, warp) < P::kBc) present[first(own, warp) / 32] = exist;
    }
    if (threadIdx.x % 32 == 0) barrier_arrive(full);
  }
  /// The first key of a warp's `own`th group.
  static __device__ __forceinline__ int first(int own, int warp) { return (own * kGatherWarps + warp) * 32; }
};

/// Calls copy(row of the tile, its memory, whether it is a key) for a warp's rows of a tile, in the
/// kLanesOfRow lanes that copy the row together.
template <class P, int kLanesOfRow, class Copy>
__device__ __forceinline__ void for_each_row(const KvSource<P>& from, const GatheredKeys<P>& keys, int warp,
                                             Copy&& copy) {
  constexpr int kRowsAtOnce = 32 / kLanesOfRow;
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int own = 0; own < GatheredKeys<P>::kOwn; ++own) {
    const int first = GatheredKeys<P>::first(own, warp);
    if (first >= P::kBc) break;
    const int slot = keys.slot[own];
    const auto row =
        reinterpret_cast<unsigned long long>(slot >= 0 ? from.row_in_slot(slot) : from.some_row());
    const unsigned exist = __ballot_sync(kWholeWarp, slot >= 0);
#pragma unroll 4
    for (int step = 0; step < min(32, P::kBc - first); step += kRowsAtOnce) {
      const int of_group = step + lane / kLanesOfRow;
      copy(first + of_group, __shfl_sync(kWholeWarp, row, of_group), (exist >> of_group & 1u) != 0);
    }
  }
}

/// Starts the copies of a warp's rows of a tile of codes, which are not swizzled. Lanes side by side copy a
/// row.
template <class P, int kColumns>
__device__ __forceinline__ void gather_codes(unsigned to, const KvSource<P>& from,
                                             const GatheredKeys<P>& keys, int warp) {
  constexpr int kChunks = kColumns / 16, kLanes = next_power_of_two(kChunks);
  const int lane = static_cast<int>(threadIdx.x) % 32, chunk = lane % kLanes;
  for_each_row<P, kLanes>(from, keys, warp, [&](int at, unsigned long long row, bool exists) {
    const auto* codes = reinterpret_cast<const unsigned char*>(row) + chunk * 16;
    if ((kChunks == kLanes || chunk < kChunks) && (32 / kLanes <= 16 || at < P::kBc))
      copy_async_16(to + at * kColumns + chunk * 16, codes, exists);
  });
}

/// Starts the copies of a warp's rows of a tile of K or V. Eight lanes copy a row's 128 bytes of a slice, in
/// the order that the swizzle gives its chunks.
template <class P, int kColumns>
__device__ __forceinline__ void gather_rows(unsigned to, const KvSource<P>& from, const GatheredKeys<P>& keys,
                                            int warp, TileHalf half = TileHalf::whole) {
  if constexpr (kScaledKv<P>) return gather_codes<P, kColumns>(to, from, keys, warp);
  constexpr int kLanes = kRowBytes / 16;
  constexpr int kRead = (kColumns + 15) / 16 * 16;  // products read whole steps
  const int lane = static_cast<int>(threadIdx.x) % 32, chunk = lane % kLanes;
  for_each_row<P, kLanes>(from, keys, warp, [&](int at, unsigned long long row, bool exists) {
    const auto* columns = reinterpret_cast<const unsigned short*>(row) + chunk * 8;
    const unsigned line = to + at * kRowBytes + (chunk ^ at % 8) * 16;
#pragma unroll
    for (int slice = 0; slice < slices(kColumns); ++slice) {
      if (!is_in_half<P>(half, slice)) continue;
      const int column = slice * kSliceColumns + chunk * 8;
      if ((slice + 1) * kSliceColumns <= kColumns)
        copy_async_16(line + slice * P::kBc * kRowBytes, columns + slice * kSliceColumns, exists);
      else if (column < kRead)
        copy_async_16(line + slice * P::kBc * kRowBytes,
                      column < kColumns ? columns + slice * kSliceColumns : columns,
                      exists && column < kColumns);
    }
  });
}

}  // namespace flashjit::tma
