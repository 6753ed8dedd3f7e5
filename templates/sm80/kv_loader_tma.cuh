// Tiles of K and V by TMA: one box for a tile, with the padding of its rows, which lies outside of the tensor
// and so becomes zeros. Tiles have one stage.
#pragma once

#include "flashjit/async/mbarrier.cuh"
#include "flashjit/async/tma.cuh"
#include "flashjit/async/warp_roles.cuh"
#include "flashjit/sm80/forward_policy.cuh"
#include "flashjit/sm80/kv_loader.cuh"
#include "flashjit/sm80/tile.cuh"
#include "flashjit/tma/kv_tile.cuh"

namespace flashjit::sm80 {

/// The keys of one head of one sequence as TMA finds them.
template <class P>
struct TmaKvSource {
  const TensorMap& map;
  tma::DenseKvTile<P> first;  ///< coordinates of key 0
};

template <class P>
struct TmaKvSources {
  using Source = TmaKvSource<P>;

  static __device__ __forceinline__ Source k(const Params& p, const Sequence<P>& sequence, int h_kv,
                                             int first_key, const TensorMaps& maps) {
    return {maps.k, first(p, sequence, h_kv, first_key)};
  }
  static __device__ __forceinline__ Source v(const Params& p, const Sequence<P>& sequence, int h_kv,
                                             int first_key, const TensorMaps& maps) {
    return {maps.v, first(p, sequence, h_kv, first_key)};
  }

 private:
  static __device__ __forceinline__ tma::DenseKvTile<P> first(const Params& p, const Sequence<P>& sequence,
                                                              int h_kv, int first_key) {
    return {p, sequence, tma::DenseKvTile<P>::page_of_tile(p, sequence, 0, first_key), h_kv, 0, first_key};
  }
};

/// As the loaders of kv_loader.cuh. put() waits for the tile.
template <class P>
struct TmaKvLoader {
  static_assert(P::kStages == 1, "the planner refuses more");

  /// What a thread knows of K's and V's copies.
  struct Held {
    unsigned phases = 3;  ///< bit 0 of K, bit 1 of V: of the last copy; 1 before the first
    int k_valid = P::kBc, v_valid = P::kBc;

    /// Makes the barriers.
    __device__ __forceinline__ Held() {
      extern __shared__ __align__(128) char shared[];
      const unsigned q = shared_address(shared) + ForwardPolicy<P>::kLayout.q();
      if (threadIdx.x == 0) {
        barrier_init(barrier(q, true), 1);
        barrier_init(barrier(q, false), 1);
        barrier_init_fence();
      }
      __syncthreads();
    }
  };

  template <int kColumns, class Smem, class List>
  static __device__ __forceinline__ void load(Smem& smem, unsigned tile, const TmaKvSource<P>& from,
                                              const List&, const Params&, int, int first, int valid) {
    const bool is_k = tile == smem.k_stages;
    smem.phases ^= is_k ? 1 : 2;
    (is_k ? smem.k_valid : smem.v_valid) = valid;
    if (warp_index() != 0 || !elected()) return;
    const unsigned full = barrier(smem.q, is_k);
    const auto& at = from.first;
    barrier_expect(full, tile_bytes(P::kBc, kColumns));
    if (P::kArch >= 120)
      load_box_to_cta(tile, from.map, full, 0, at.row + first, at.head, at.batch);
    else
      load_box(tile, from.map, full, 0, at.row + first, at.head, at.batch);
  }

  template <int kColumns, class Smem>
  static __device__ __forceinline__ void put(Smem& smem, unsigned tile) {
    const bool is_k = tile == smem.k_stages;
    barrier_wait<P>(barrier(smem.q, is_k), static_cast<int>(is_k ? smem.phases & 1 : smem.phases >> 1));
    const int valid = max(is_k ? smem.k_valid : smem.v_valid, 0);
    if (kOutOfRangeKeys<P> && valid < P::kBc) clear_rows<kColumns>(tile, valid);
  }

 private:
  /// Both are in the padding of Q's first row, which O overwrites when the last tile has been read.
  static __device__ __forceinline__ unsigned barrier(unsigned q, bool of_k) {
    return q + round_up(P::kHeadDim, 16) * 2 + (of_k ? 0 : 8);
  }

  /// Rows from `valid` on, which are another sequence's, or behind the keys in use.
  template <int kColumns>
  static __device__ __forceinline__ void clear_rows(unsigned tile, int valid) {
    constexpr int kChunks = round_up(kColumns, 16) / 8;
    const int end = (P::kBc - valid) * kChunks;
#pragma unroll 1
    for (int index = static_cast<int>(threadIdx.x); index < end; index += P::kWarps * 32)
      store_shared_16(tile + ((valid + index / kChunks) * pitch(kColumns) + index % kChunks * 8) * 2,
                      uint4{0, 0, 0, 0});
    publish_to_async_proxy();
  }
};

}  // namespace flashjit::sm80
