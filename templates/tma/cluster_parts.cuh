// Split-KV within clusters (kClusterSplit): the CTAs of a cluster share the keys of one Q tile.
#pragma once

#include "flashjit/tma/stream_k.cuh"

namespace flashjit::tma {

/// The CTA's part of its cluster's Q tile.
template <class P>
__device__ __forceinline__ TileCoord coord_in_cluster(const Params& p) {
  const unsigned index = blockIdx.x / kJoiningCtas, q_tiles = q_tiles_per_head<P>(p);
  return {index / q_tiles, index % q_tiles, {0, row_warpgroups(P::kBr)}, cluster_rank(), {}};
}

/// Each CTA has one part.
template <class P>
struct ClusterScheduler {
  // The interface of TileScheduler.
  static __device__ ClusterScheduler first(const Params&, const SegmentStart&, int) { return {}; }
  __device__ bool next(const Params& p, unsigned taken, TileCoord& found) const {
    found = coord_in_cluster<P>(p);
    return taken == 0;
  }
  __device__ void finish_tile(const Params&, const SegmentStart&, const TileCoord&) const {}
};

}  // namespace flashjit::tma
