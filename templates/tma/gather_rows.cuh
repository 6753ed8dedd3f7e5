// Rows of K and V that lie anywhere: where a box of TMA would span pages, and where a query's list names its
// keys. Warps copy a KV tile row by row, by cp.async, to where TMA would have put it; rows that are no keys
// become zeros.
#pragma once

#include "flashjit/async/mbarrier.cuh"
#include "flashjit/common/joined_list.cuh"
#include "flashjit/common/kv_source.cuh"
#include "flashjit/tma/kv_tile.cuh"
#include "flashjit/tma/tile_scheduler.cuh"

namespace flashjit::tma {

/// A warp's keys of a KV tile: groups of 32, one a lane, dealt to the warps round-robin.
template <class P>
struct KeyGroups {
  static constexpr int kGroups = (P::kBc + 31) / 32;
  static constexpr int kOwn = (kGroups + kGatherWarps - 1) / kGatherWarps;
  /// The first key of a warp's `own`th group.
  static __device__ __forceinline__ int first(int own, int warp) { return (own * kGatherWarps + warp) * 32; }
  /// The lane's.
  static __device__ __forceinline__ int at(int own, int warp) {
    return first(own, warp) + static_cast<int>(threadIdx.x) % 32;
  }
};

/// What the page table, or a query's list, says of a warp's keys. Nothing waits for it here, so that it is
/// read a tile ahead.
template <class P>
struct KeyEntries {
  using Groups = KeyGroups<P>;
  using List = KeyList<P>;
  typename List::Entry entry[Groups::kOwn];

  __device__ __forceinline__ KeyEntries(const Params& p, const WorkTile<P>& work, int begin,
                                        const FirstKey<kLeavesPages<P>>& first_key, int warp) {
#pragma unroll
    for (int own = 0; own < Groups::kOwn; ++own) {
      const int at = Groups::at(own, warp);
      if constexpr (P::kIndices)
        entry[own] =
            at < P::kBc ? List(p, work.sequence, work.h_kv, work.q_begin).entry(begin + at) : List::none();
      else
        entry[own] = P::kPageRows > 0 && is_read(p, work, begin + at, first_key)
                         ? table_entry<P>(p, work.sequence.b, begin + at)
                         : 0;
    }
  }
  static __device__ __forceinline__ bool is_read(const Params& p, const WorkTile<P>& work, int kv,
                                                 const FirstKey<kLeavesPages<P>>& first_key) {
    return kv < work.sequence.seqused_kv(p) && first_key.reads(kv);
  }
};

// How a warp tells the consumers which of its entries of a list are keys; EntryMarks<P> names one of two
// types.

/// One bit for each entry.
template <class P>
struct MarksOfQuery {
  __device__ __forceinline__ void keep(int, int) {}
  __device__ __forceinline__ void mark(unsigned* present, int, int first, bool exists) const {
    const unsigned exist = __ballot_sync(kWholeWarp, exists);
    if (threadIdx.x % 32 == 0 && first < P::kBc) present[first / 32] = exist;
  }
};
/// Joined lists: by a bit for each entry and each query.
template <class P>
struct MarksOfQueries {
  unsigned queries[KeyGroups<P>::kOwn];

  template <class Entry>
  __device__ __forceinline__ void keep(int own, const Entry& entry) {
    queries[own] = entry.queries;
  }
  __device__ __forceinline__ void mark(unsigned* present, int own, int first, bool exists) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    unsigned of_lane = 0;
#pragma unroll
    for (int query = 0; query < kMostJoinedQueries; ++query) {
      const unsigned exist = __ballot_sync(kWholeWarp, exists && (queries[own] >> query & 1u) != 0);
      if (lane == query) of_lane = exist;
    }
    if (lane < kMostJoinedQueries && first < P::kBc) present[lane * (P::kBc / 32) + first / 32] = of_lane;
    __syncwarp();
  }
};
template <class P>
using EntryMarks = Conditional<P::kJoinsLists, MarksOfQueries<P>, MarksOfQuery<P>>;

/// The slots of a warp's keys of a KV tile; -1: no key.
template <class P>
struct GatheredKeys : EntryMarks<P> {
  using Groups = KeyGroups<P>;
  int slot[Groups::kOwn];

  __device__ __forceinline__ GatheredKeys() {}
  __device__ __forceinline__ GatheredKeys(const Params& p, const WorkTile<P>& work, int begin,
                                          const FirstKey<kLeavesPages<P>>& first_key,
                                          const KeyEntries<P>& entries, int warp) {
#pragma unroll
    for (int own = 0; own < Groups::kOwn; ++own) {
      const int n = begin + Groups::at(own, warp);
      const auto& entry = entries.entry[own];
      if constexpr (P::kIndices) {
        this->keep(own, entry);
        const int kv = KeyList<P>(p, work.sequence, work.h_kv, work.q_begin).key_of(n, entry);
        slot[own] = kv >= 0 ? slot_of_key<P>(p, work.sequence.b, kv) : -1;
      } else {
        slot[own] = KeyEntries<P>::is_read(p, work, n, first_key) ? slot_of_entry<P>(p, entry, n) : -1;
      }
    }
  }
  /// Marks for the consumers which entries of a list are keys, and arrives on K's barrier.
  __device__ __forceinline__ void publish(unsigned* present, unsigned full, int warp) const {
#pragma unroll
    for (int own = 0; own < Groups::kOwn; ++own) {
      this->mark(present, own, Groups::first(own, warp), slot[own] >= 0);
    }
    if (threadIdx.x % 32 == 0) barrier_arrive(full);
  }
};

/// Calls copy(row of the tile, its memory, whether it is a key) for a warp's rows of a tile, in the
/// kLanesOfRow lanes that copy the row together.
template <class P, int kLanesOfRow, class Copy>
__device__ __forceinline__ void for_each_row(const KvSource<P>& from, const GatheredKeys<P>& keys, int warp,
                                             Copy&& copy) {
  constexpr int kRowsAtOnce = 32 / kLanesOfRow;
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int own = 0; own < KeyGroups<P>::kOwn; ++own) {
    const int first = KeyGroups<P>::first(own, warp);
    if (first >= P::kBc) break;
    const int slot = keys.slot[own];
    const auto row =
        reinterpret_cast<unsigned long long>(slot >= 0 ? from.row_in_slot(slot) : from.some_row());
    const unsigned exist = __ballot_sync(kWholeWarp, slot >= 0);
    const int rows = min(32, P::kBc - first);
    if (exist == kWholeWarp) {  // as most are: no copy then asks
#pragma unroll 4
      for (int step = 0; step < rows; step += kRowsAtOnce) {
        const int of_group = step + lane / kLanesOfRow;
        copy(first + of_group, __shfl_sync(kWholeWarp, row, of_group), true);
      }
    } else {
#pragma unroll 1
      for (int step = 0; step < rows; step += kRowsAtOnce) {
        const int of_group = step + lane / kLanesOfRow;
        copy(first + of_group, __shfl_sync(kWholeWarp, row, of_group), (exist >> of_group & 1u) != 0);
      }
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
