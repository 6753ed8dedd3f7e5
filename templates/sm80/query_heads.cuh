// The rows of a Q tile where it is a CTA's: queries of a head; or, where each query has a list of keys, heads
// of one query, which share the list.
#pragma once

#include "flashjit/common/index_list.cuh"
#include "flashjit/common/kv_source.cuh"
#include "flashjit/common/split.cuh"
#include "flashjit/common/tile_walk.cuh"
#include "flashjit/sm80/tile.cuh"

namespace flashjit::sm80 {

/// A CTA's work: a Q tile of a head, and one split of its keys; or a query, and the first of its heads.
struct ForwardWorkTile {
  int split, q_tile, h, b;
};
/// A head's last Q tile comes first: under a causal mask it has the most keys.
template <class P>
__device__ __forceinline__ ForwardWorkTile work_tile_of_cta(const Params& p) {
  if constexpr (P::kIndices) {
    const int group = p.qhead_per_kvhead(), sets = (group + P::kBr - 1) / P::kBr;
    const unsigned index = blockIdx.x / sets, h_kv = index % p.heads_kv;
    return {0, static_cast<int>(index / p.heads_kv % p.seqlen_q),
            static_cast<int>(h_kv * group + blockIdx.x % sets * P::kBr),
            static_cast<int>(index / p.heads_kv / p.seqlen_q)};
  }
  const int tile_count = q_tiles<P>(p), splits = num_splits<P>(p);
  const unsigned index = blockIdx.x / splits;
  return {static_cast<int>(blockIdx.x % splits), tile_count - 1 - static_cast<int>(index % tile_count),
          static_cast<int>(index / tile_count % p.heads_q), static_cast<int>(index / tile_count / p.heads_q)};
}

/// The end of the rows: of all of a head's queries, or of the tile's heads.
template <class P>
__device__ __forceinline__ int end_of_rows(const Params& p, const Sequence<P>& sequence, int q_tile, int h) {
  if constexpr (!P::kIndices) return sequence.seqlen_q(p);
  const int group = p.qhead_per_kvhead();
  return q_tile < sequence.seqlen_q(p) ? min(group - h % group, P::kBr) : 0;
}

}  // namespace flashjit::sm80
