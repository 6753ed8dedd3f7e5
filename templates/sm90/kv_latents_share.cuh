// Which rows of a tile of latents a CTA decodes; LatentShare<P> names one of two types. The CTAs of a pair
// (kCtaPair), a cluster whose heads have the same keys, decode every second group of eight rows each, and
// send each other the elements. So a row is read and decoded once for both.
// NOTES.md#latents-that-are-decoded
#pragma once

#include "flashjit/async/cluster.cuh"
#include "flashjit/sm90/forward_rings.cuh"

namespace flashjit::sm90 {

template <class P>
struct AllRows {
  static constexpr int kGroups = P::kBc / 8;  ///< of eight rows, that the CTA decodes
  static constexpr int kParts = 1;            ///< of a group's slices, which different warps decode

  static __device__ __forceinline__ bool has(int) { return true; }
  static __device__ __forceinline__ int row_in_slot(int row) { return row; }
  static __device__ __forceinline__ int group_in_tile(int group) { return group; }
  /// Says that half of a tile has been written. By each thread of the decoding warpgroup.
  template <TileHalf kHalf>
  static __device__ __forceinline__ void finish(const ForwardStorage<P>&, unsigned, unsigned full) {
    publish_to_async_proxy();
    barrier_arrive(full);
  }
  static __device__ __forceinline__ void end(const ForwardStorage<P>&, int) {}
};

template <class P>
struct RowsOfPair {
  static constexpr int kGroups = P::kBc / 16, kParts = kGroups % 4 == 0 ? 1 : 2;
  static constexpr int kGroupBytes = 8 * kRowBytes;  // of a slice

  static __device__ __forceinline__ bool has(int row) { return row / 8 % 2 == cluster_rank(); }
  static __device__ __forceinline__ int row_in_slot(int row) { return row / 16 * 8 + row % 8; }
  static __device__ __forceinline__ int group_in_tile(int group) { return 2 * group + cluster_rank(); }
  /// The same, when the other CTA's rows have come, too; and sends it this one's, a lane a group of a slice.
  template <TileHalf kHalf>
  static __device__ __forceinline__ void finish(const ForwardStorage<P>& smem, unsigned tile, unsigned full) {
    constexpr int kSlices = slices(P::kHeadDim),
                  kBytes = slices_of_half<P>(kHalf, P::kHeadDim) * kGroups * kGroupBytes;
    const int thread = static_cast<int>(threadIdx.x) % kConverterThreads, other = 1 - cluster_rank();
    publish_to_async_proxy();
    if (thread == 0)
      barrier_expect(full, kBytes);
    else
      barrier_arrive(full);
    named_barrier_sync(smem.decoders(), kConverterThreads);
    if (thread >= 32) return;
#pragma unroll 1
    for (int i = thread; i < kSlices * kGroups; i += 32) {
      const int slice = i / kGroups;
      if (!is_in_half<P>(kHalf, slice)) continue;
      const unsigned from = tile + (slice * P::kBc + group_in_tile(i % kGroups) * 8) * kRowBytes;
      copy_remote(in_cta(from, other), from, kGroupBytes, in_cta(full, other));
    }
  }
  /// Waits until both CTAs have read all tiles, of which there were `n`: no arrival may come when this CTA
  /// has exited.
  static __device__ __forceinline__ void end(const ForwardStorage<P>& smem, int n) {
    for (int last = n; last < n + P::kStages; ++last) {
      KRing<P>::acquire(smem, last);
      VRing<P>::acquire(smem, last);
    }
  }
};
template <class P>
using LatentShare = Conditional<P::kCtaPair, RowsOfPair<P>, AllRows<P>>;

}  // namespace flashjit::sm90
