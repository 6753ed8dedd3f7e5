// After a backward pass whose CTAs shared the Q tiles of each KV tile: adds up the dK and dV of the splits of
// the queries.
#pragma once

#include "flashjit/common/out_element.cuh"
#include "flashjit/common/tile_walk.cuh"

namespace flashjit::auxiliary {

/// Bit i: split i of the queries visits the KV tile, so its dK and dV were written.
template <class P>
__device__ __forceinline__ unsigned splits_with_queries(const Params& p, const Sequence<P>& sequence,
                                                        int h_kv, int kv_tile) {
  const int split = threadIdx.x % 32;
  const KvWorkTile<P> work(sequence.b, h_kv, kv_tile, split);
  const bool visits =
      split < p.num_splits && p.seqlen_q > 0 && QWalk<P>(p, sequence, work).next(p, sequence).head >= 0;
  return __ballot_sync(kWholeWarp, visits);
}

/// Adds up rows of one of the two gradients, four columns a thread.
template <class P, int kColumns>
__device__ __forceinline__ void combine_rows(const Params& p, const Sequence<P>& sequence, int h_kv,
                                             Range rows, unsigned splits, const float* from,
                                             const TensorParam& to) {
  constexpr int kChunks = kColumns / 4;
  for (int i = threadIdx.x; i < (rows.end - rows.begin) * kChunks; i += blockDim.x) {
    const int row = rows.begin + i / kChunks, column = i % kChunks * 4;
    float4 sum{};
    for (int split = 0; split < p.num_splits; ++split) {
      if ((splits >> split & 1u) == 0) continue;
      const long long at = kv_row_of_split(p, split, sequence.b, h_kv, row) * kColumns + column;
      const float4 x = *reinterpret_cast<const float4*>(from + at);
      sum = {sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};
    }
    GradElement<P>* at = sequence.template kv_pointer<GradElement<P>>(to, h_kv, row) + column;
    if constexpr (P::kAddGrads) {
      const float4 before = *reinterpret_cast<const float4*>(at);
      sum = {sum.x + before.x, sum.y + before.y, sum.z + before.z, sum.w + before.w};
    }
    store_columns(at, sum);
  }
}

/// One CTA of 128 threads for kCombinedRows keys of a head of K and V; grid: batch * heads_kv * seqlen_kv /
/// kCombinedRows, rounded up for each head.
template <class P>
__device__ void combine_dkdv(const Params& p) {
  static_assert(P::kBc % kCombinedRows == 0, "the rows are of one KV tile");
  wait_for_prior_grid<P>();
  const int pieces = (p.seqlen_kv + kCombinedRows - 1) / kCombinedRows;
  const int piece = static_cast<int>(blockIdx.x % pieces), head = static_cast<int>(blockIdx.x / pieces);
  const int h_kv = head % p.heads_kv;
  const Sequence<P> sequence(p, head / p.heads_kv);
  const Range rows = tile_range(piece, kCombinedRows, sequence.seqlen_kv(p));
  const unsigned splits = splits_with_queries<P>(p, sequence, h_kv, rows.begin / P::kBc);
  combine_rows<P, P::kHeadDim>(p, sequence, h_kv, rows, splits, p.dk_splits, p.dk);
  combine_rows<P, P::kHeadDimV>(p, sequence, h_kv, rows, splits, p.dv_splits, p.dv);
}

}  // namespace flashjit::auxiliary
