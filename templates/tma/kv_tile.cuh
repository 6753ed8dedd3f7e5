// Where TMA finds a KV tile, and its copy to shared memory. A tile is one box a slice; with pages it is boxes
// of rows of one page, which the lanes of a warp copy.
#pragma once

#include "flashjit/async/mbarrier.cuh"
#include "flashjit/async/tma.cuh"
#include "flashjit/common/kv_source.cuh"
#include "flashjit/tma/forward_policy.cuh"
#include "flashjit/tma/tile.cuh"

namespace flashjit::tma {

template <class P>
constexpr bool kPaged = P::kPageRows > 0;
template <class P>
constexpr int kKvBoxRows = kv_box_rows(P::kPageRows, P::kBc, P::kMostBoxRows);

/// Whether the thread is the one that copies tiles, or the first of the warp that does.
template <class P>
__device__ __forceinline__ bool leads_kv_copies() {
  return !kPaged<P> || threadIdx.x % 32 == 0;
}

/// The coordinates of a KV tile, which KvTileCoord<P> names, and so of all its boxes.
template <class P>
struct DenseKvTile {
  int row = 0, head = 0, batch = 0;

  __device__ __forceinline__ DenseKvTile() {}
  /// `batch`: from page_of_tile().
  __device__ __forceinline__ DenseKvTile(const Params&, const Sequence<P>& sequence, int batch, int h_kv,
                                         int begin, int /*first_key*/)
      : head(h_kv), batch(batch) {
    row = sequence.kv_row(begin);
  }
  /// The batch index of K and V.
  static __device__ __forceinline__ int page_of_tile(const Params& p, const Sequence<P>& sequence, int, int) {
    return P::kCache ? page_of_key<P>(p, sequence.b, 0) : sequence.batch();
  }
};
/// Or the coordinates of the lane's box.
template <class P>
struct PagedKvTile {
  int row = 0, head = 0, batch = 0;

  __device__ __forceinline__ PagedKvTile() {}
  /// `page`: from page_of_tile(); `first_key`: the work tile's.
  __device__ __forceinline__ PagedKvTile(const Params& p, const Sequence<P>& sequence, int page, int h_kv,
                                         int begin, int first_key)
      : head(h_kv), batch(page) {
    const int kv = first_row(begin);
    row = kv % P::kPageRows;
    // Rows of a page that does not exist come as zeros.
    batch = has_keys(p, sequence, kv, first_key) ? existing_page(p, page) : p.page_table.count;
  }
  /// The table's entry for the lane's box, if that has keys.
  static __device__ __forceinline__ int page_of_tile(const Params& p, const Sequence<P>& sequence, int begin,
                                                     int first_key) {
    const int kv = first_row(begin);
    return has_keys(p, sequence, kv, first_key) ? table_entry<P>(p, sequence.b, kv) : 0;
  }

 private:
  static __device__ __forceinline__ int first_row(int begin) {
    return begin + static_cast<int>(threadIdx.x) % 32 * kKvBoxRows<P>;
  }
  /// Whether a box, whose first key is `kv`, has keys that a work tile reads.
  static __device__ __forceinline__ bool has_keys(const Params& p, const Sequence<P>& sequence, int kv,
                                                  int first_key) {
    if (kLeavesPages<P> && kv + kKvBoxRows<P> <= first_key) return false;
    return kv < sequence.seqused_kv(p);
  }
};
template <class P>
using KvTileCoord = Conditional<kPaged<P>, PagedKvTile<P>, DenseKvTile<P>>;

/// Which slices of a tile a copy has. Halves: see kTileInHalves.
enum class TileHalf { whole, left, right };
template <class P>
constexpr bool is_in_half(TileHalf half, int slice) {
  constexpr int kOwn = slices(kOwnColumns<P>);
  return half == TileHalf::whole || (slice >= kOwn && slice < 2 * kOwn) == (half == TileHalf::right);
}
template <class P>
constexpr TileHalf kKHalf = kTileInHalves<P> ? TileHalf::left : TileHalf::whole;
template <class P>
constexpr int slices_of_half(TileHalf half, int columns) {
  int count = 0;
  for (int slice = 0; slice < slices(columns); ++slice) count += is_in_half<P>(half, slice);
  return count;
}

/// Starts the copy of a tile of K or V, or of a half of it, which completes on `full`; KvTileCopy<P> names
/// one of four types. By one thread: a box a slice.
template <class P>
struct SliceCopy {
  template <int kColumns, TileHalf kHalf>
  static __device__ __forceinline__ void start(unsigned to, const TensorMap& map, unsigned full,
                                               const KvTileCoord<P>& at) {
    barrier_expect(full, slices_of_half<P>(kHalf, kColumns) * P::kBc * kRowBytes);
    for (int slice = 0; slice < slices(kColumns); ++slice)
      if (is_in_half<P>(kHalf, slice))
        load_box(to + slice * P::kBc * kRowBytes, map, full, slice * kSliceColumns, at.row, at.head,
                 at.batch);
  }
};
/// All slices of some rows, and then of the next: ../sm90/NOTES.md#boxes-of-few-rows. By one thread.
template <class P>
struct BoxesCopy {
  template <int kColumns, TileHalf kHalf>
  static __device__ __forceinline__ void start(unsigned to, const TensorMap& map, unsigned full,
                                               const KvTileCoord<P>& at) {
    barrier_expect(full, slices_of_half<P>(kHalf, kColumns) * P::kBc * kRowBytes);
#pragma unroll 1
    for (int first = 0; first < P::kBc; first += kKvBoxRows<P>)
      for (int slice = 0; slice < slices(kColumns); ++slice)
        if (is_in_half<P>(kHalf, slice))
          load_box(to + (slice * P::kBc + first) * kRowBytes, map, full, slice * kSliceColumns,
                   at.row + first, at.head, at.batch);
  }
};
/// By a warp: a box for each page's rows of a slice.
template <class P>
struct PagedSliceCopy {
  template <int kColumns, TileHalf kHalf>
  static __device__ __forceinline__ void start(unsigned to, const TensorMap& map, unsigned full,
                                               const KvTileCoord<P>& at) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (lane == 0) barrier_expect(full, slices_of_half<P>(kHalf, kColumns) * P::kBc * kRowBytes);
    __syncwarp();
    if (lane < P::kBc / kKvBoxRows<P>)
      for (int slice = 0; slice < slices(kColumns); ++slice)
        if (is_in_half<P>(kHalf, slice))
          load_box(to + (slice * P::kBc + lane * kKvBoxRows<P>)*kRowBytes, map, full, slice * kSliceColumns,
                   at.row, at.head, at.batch);
  }
};
/// Codes that are converted come in rows one after the other, not in slices. By one thread; with pages by a
/// warp.
template <class P>
struct RowCopy {
  template <int kColumns, TileHalf>
  static __device__ __forceinline__ void start(unsigned to, const TensorMap& map, unsigned full,
                                               const KvTileCoord<P>& at) {
    const int lane = kPaged<P> ? static_cast<int>(threadIdx.x) % 32 : 0;
    if (lane == 0) barrier_expect(full, P::kBc * kColumns);
    if (kPaged<P>) __syncwarp();
    if (lane < P::kBc / kKvBoxRows<P>)
      load_box(to + lane * kKvBoxRows<P> * kColumns, map, full, 0, at.row, at.head, at.batch);
  }
};
template <class P>
using KvTileCopy =
    Conditional<kScaledKv<P> && !P::kQCodes, RowCopy<P>,
                Conditional<kPaged<P>, PagedSliceCopy<P>,
                            Conditional<(kKvBoxRows<P> < P::kBc), BoxesCopy<P>, SliceCopy<P>>>>;

}  // namespace flashjit::tma
