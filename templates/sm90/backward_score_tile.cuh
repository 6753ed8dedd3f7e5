// A consumer thread's pairs of a Q tile and the KV tile in the backward pass: where they are, what is read of
// their queries, the bias tile, and their mask.
#pragma once

#include "flashjit/common/tile_mask.cuh"
#include "flashjit/sm90/backward_products.cuh"
#include "flashjit/sm90/backward_weights.cuh"
#include "flashjit/tma/bias_tile.cuh"

namespace flashjit::sm90 {

/// A consumer thread's pairs of Q tile i and the KV tile, in the order of its values of S^T: four at a time,
/// the first two are of neighbouring queries and one key, the others of the same queries and the key eight
/// on. Where CTAs split columns, these are half of the pairs whose partial S it has.
template <class P>
struct ScoreTile {
  using Policy = BackwardPolicy<P>;
  static constexpr int kCount = Policy::kPairQueries / 2;  ///< values of a thread

  unsigned i;
  int wg, lane;
  int warp_row;                     ///< the warp's first key among the CTA's
  int row;                          ///< the thread's
  int h;                            ///< the Q tile's head
  int q_begin;                      ///< the warpgroup's first query
  Position q, kv;                   ///< of the thread's first pair
  int between;                      ///< queries between two Q tiles of a stage
  const char *lse, *d, *row_terms;  ///< of the thread's first query

  __device__ __forceinline__ ScoreTile(const BackwardSmem<P>& smem, unsigned i, int wg)
      : i(i), wg(wg), lane(threadIdx.x % 32) {
    const int warp = threadIdx.x / 32 % 4;
    const int first_query = Policy::first_pair_query(wg), stage = i % P::kStages;
    warp_row = Policy::first_row(wg) + warp * 16;
    const QTileInfo& now = smem.q_tile(i);
    h = now.head, q_begin = now.tile * P::kBr + first_query;
    // Opaque, so that the other queries' are offsets in the instructions.
    const int first = opaque((stage * Policy::kStageRows + first_query + lane % 4 * 2) * 4);
    lse = smem.lse_at(first), d = smem.d_at(first), row_terms = smem.row_terms_at(first);
    q = position(q_begin + lane % 4 * 2);
    between = kOwnTiles<P> ? (now.dq_order - now.tile - 1) * P::kBr : 0;
    row = warp_row + lane / 4;
    kv = position(smem.kv_begin(i) + row);
  }
  __device__ Position at_q(int n) const {
    return q + (n / 4 * 8 + n % 2 + (kOwnTiles<P> && n >= kCount / 2 ? between : 0));
  }
  __device__ Position at_kv(int n) const { return kv + n / 2 % 2 * 8; }
  /// LSE, D or the row term of two queries.
  static __device__ float2 of_queries(const char* row, int n) {
    return *reinterpret_cast<const float2*>(row + n * 8);
  }
};

/// The address of this lane's row of the first four matrices of the bias tile. Where TMA does not load the
/// tile, a warp loads the elements that it needs.
template <class P>
__device__ __forceinline__ unsigned prepare_bias_tile(const Params& p, const TensorMaps& maps,
                                                      const BackwardSmem<P>& smem,
                                                      const typename P::Head& head,
                                                      const ScoreTile<P>& tile) {
  using Policy = BackwardPolicy<P>;
  const BiasTile bias = P::bias_tile(p, head);
  const int stage = tile.i % Policy::kDoutStages;
  const int first_query = Policy::first_query(tile.wg), first_chunk = tile.warp_row / 8;
  if (!tma_loads_bias_tile(p, maps, bias)) {
    const BiasTileRows<P::kBr, Policy::kWgQueries, 16, 4> rows{smem.pointer(smem.bias_tile(stage)),
                                                               bias,
                                                               smem.q_tile(tile.i).tile * P::kBr,
                                                               smem.kv_begin(tile.i),
                                                               first_query,
                                                               first_chunk * 8};
    rows.start();
    rows.finish();
  }
  return smem.bias_tile(stage) + chunk_offset<P::kBr>(first_query + tile.lane / 16 * 8 + tile.lane % 8,
                                                      first_chunk + tile.lane / 8 % 2);
}

/// Bit n says whether the block map lets the n-th eight queries attend to the warp's sixteen keys, which lie
/// in one block: block sizes are multiples of 16.
template <class P>
__device__ __forceinline__ unsigned find_map_bits(const Params& p, const BackwardSmem<P>& smem,
                                                  const Sequence<P>& sequence, const ScoreTile<P>& tile) {
  const unsigned char* column =
      block_map_row<P>(p, sequence.b, tile.h, 0) +
      min(smem.kv_begin(tile.i) + tile.row - tile.lane / 4, smem.seqused_kv(p, tile.i) - 1) / P::kBlockKv;
  const int q = min(tile.q_begin + tile.lane % (ScoreTile<P>::kCount / 4) * 8, sequence.seqlen_q(p) - 1);
  return __ballot_sync(kWholeWarp, column[static_cast<long long>(q / P::kBlockQ) * p.map_columns] != 0);
}

/// Makes S -infinity where one of four pairs does not attend, by block map, length or mask program; and dP 0,
/// where P does not say so. `any`: what the program says of all pairs where it is the same for all of them.
template <class P>
__device__ __forceinline__ void apply_mask(const Params& p, const BackwardSmem<P>& smem,
                                           const typename P::Head& head, const ScoreTile<P>& tile, int n,
                                           const TileMask<P, BackwardPolicy<P>::kPairQueries>& mask,
                                           unsigned map_bits, bool any, typename BackwardFragments<P>::S& s,
                                           [[maybe_unused]] typename BackwardFragments<P>::S& dp) {
  const bool block = !kTestsMap<P> || (map_bits >> (n / 4) & 1u) != 0;
  const auto columns = mask.columns(n * 2);
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const Position q = tile.at_q(n + e), kv = tile.at_kv(n + e);
    const auto masked = [&](float x) {
      return mask_score<P>(x, block, kv.at < smem.seqused_kv(p, tile.i),
                           kTestsMask<P> ? mask.attends(p, head, e / 2, columns, e % 2, q, kv) : any);
    };
    s[n + e] = masked(s[n + e]);
    if (PairWeights<P>::kMasksDp) dp[n + e] = masked(dp[n + e]);
  }
}

}  // namespace flashjit::sm90
