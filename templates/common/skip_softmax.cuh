// Skip-softmax (BLASST): rows that are computed together leave out a KV tile whose scores are so far below
// each row's maximum that none of its keys would weigh as much as a threshold. What a family adds is who
// decides: a warp, or a warpgroup.
#pragma once

#include "flashjit/common/params.cuh"
#include "flashjit/common/ptx.cuh"

namespace flashjit {

/// Over the four lanes that share a row: a tile with a NaN is never skipped.
__device__ __forceinline__ float max_or_nan_of_quad(float x) {
  x = max_or_nan(x, __shfl_xor_sync(kWholeWarp, x, 1));
  return max_or_nan(x, __shfl_xor_sync(kWholeWarp, x, 2));
}

/// Whether a row wants a tile whose largest score is `tile_max`: exp2(scale (tile_max - max)) is not below
/// the threshold. A row without a maximum so far wants every tile, and a threshold of 0 skips none.
__device__ __forceinline__ bool wants_tile(const Params& p, float tile_max, float max, float scale) {
  return !((tile_max - max) * scale < p.skip_softmax_log2);
}

/// By one thread of those that decided.
__device__ __forceinline__ void add_skip_counts(const Params& p, int tiles, int skipped) {
  if (p.skip_softmax_counts == nullptr) return;
  atomicAdd(p.skip_softmax_counts, static_cast<unsigned long long>(tiles));
  atomicAdd(p.skip_softmax_counts + 1, static_cast<unsigned long long>(skipped));
}

/// How many tiles a warp that decides alone has skipped.
template <bool kSkipSoftmax>
struct SkippedTiles {
  __device__ __forceinline__ void count(const Params&, int) const {}
};
template <>
struct SkippedTiles<true> {
  int skipped = 0;

  __device__ __forceinline__ void count(const Params& p, int tiles) const {
    if (threadIdx.x % 32 == 0) add_skip_counts(p, tiles, skipped);
  }
};

}  // namespace flashjit
