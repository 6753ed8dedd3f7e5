// Gradients of captures that are sums of dS, from its tiles in shared memory: [slice of 64 queries][key][64],
// swizzled as tiles of Q and K are. dS of what is not a pair is zero.
#pragma once

#include "flashjit/common/capture_grads.cuh"
#include "flashjit/sm90/backward_smem.cuh"

namespace flashjit::sm90 {

/// Adds a tile of dS to the gradients of a plane: kCount keys from `key` on, of kQueries queries. The tile
/// begins at the pair (q, kv). By a whole warp.
template <class Element, int kKeys, int kCount, int kQueries>
__device__ __forceinline__ void add_plane_grads(const BiasTileGrad& to, bool in_fours, unsigned ds, int q,
                                                int kv, int key) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  // Of sixteen keys and sixteen queries, transposed: a lane has four keys of query lane / 4, and of that
  // eight on. So the rows of the first matrix are keys 0, 1, 4, 5, 8 and so on, those of the second the
  // others.
  const int own_key = key + lane % 8 / 2 * 4 + lane / 8 % 2 * 2 + lane % 2;
#pragma unroll 1
  for (int n = 0; n < kCount; n += 16) {
#pragma unroll 2
    for (int query = 0; query < kQueries; query += 16) {
      unsigned words[4];
      load_matrix_x4_transposed(words, ds + chunk_offset<kKeys>(own_key + n, query / 8 + lane / 16));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const unsigned first = words[half * 2], last = words[half * 2 + 1];
        if (((first | last) & 0x7fff7fffu) == 0) continue;
        const int at_q = q + query + half * 8 + lane / 4, at_kv = kv + key + n + lane % 4 * 4;
        const float values[4] = {low_of<Element>(first), high_of<Element>(first), low_of<Element>(last),
                                 high_of<Element>(last)};
        if (in_fours) {
          add_four(to.of_pair(at_q, at_kv), values[0], values[1], values[2], values[3]);
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) add_to_memory(to.of_pair(at_q, at_kv + i), values[i]);
        }
      }
    }
  }
}

/// Calls add(difference, sum) with the sums of dS over the tile's pairs of one key - query: 32 neighbouring
/// ones at a time, of which a lane has one. At `zeros` there are sixteen bytes of them. By two whole warps,
/// of which `half` says which this is: each has one instruction after the other, so there must be few.
template <class Element, int kKeys, int kQueries, class Add>
__device__ __forceinline__ void sum_diagonals(unsigned ds, unsigned zeros, int half, Add&& add) {
  constexpr int kKeyBlocks = kKeys / 8, kQueryBlocks = kQueries / 8, kOwn = (kKeyBlocks + kQueryBlocks) / 2;
  static_assert(kOwn % 4 == 0);
  const int lane = static_cast<int>(threadIdx.x) % 32, row = lane / 4, column = lane % 4 * 2;
  const unsigned identity = pack<Element>(row == column ? 1.0f : 0.0f, row == column + 1 ? 1.0f : 0.0f);
  // Blocks are of eight keys and eight queries; this lane says where a row of one of four on a diagonal is.
  const auto row_of_block = [&](int query, int diagonal) {
    const int own = query + lane / 8;
    const bool exists = static_cast<unsigned>(own + diagonal) < kKeyBlocks;
    return exists ? ds + chunk_offset<kKeys>(own * 8 + lane % 8, own) + diagonal * 8 * kRowBytes : zeros;
  };
  // The sum of a diagonal's blocks, by products of two beside each other, and two below, with two identities.
  // The lane gets, of two columns, what is as many rows below `row` as the column says; behind the last row
  // comes the first.
  const auto sum_blocks = [&](int diagonal, float(&skewed)[2]) {
    float sum[4] = {};
#pragma unroll 2
    for (int query = 0; query < kQueryBlocks; query += 4) {
      unsigned blocks[4];
      load_matrix_x4(blocks, row_of_block(query, diagonal));
      mma_16x8x16<Element>(sum, blocks, identity, identity);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
      skewed[i] = __shfl_sync(kWholeWarp, sum[i] + sum[i + 2], (row + column + i) % 8 * 4 + lane % 4);
  };
  const int begin = half * kOwn - kQueryBlocks;
  float of_this[2], of_next[2];
  sum_blocks(begin, of_this);
#pragma unroll 1
  for (int diagonal = begin; diagonal < begin + kOwn; diagonal += 4) {
    float sums[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      sum_blocks(diagonal + n + 1, of_next);
      sums[n] = (row + column < 8 ? of_this[0] : of_next[0]) + (row + column < 7 ? of_this[1] : of_next[1]);
      of_this[0] = of_next[0], of_this[1] = of_next[1];
    }
    // Of four lanes each gets the whole sum of one of the four.
    const auto halved = [&](bool upper, float low, float high, int other) {
      return (upper ? high : low) + __shfl_xor_sync(kWholeWarp, upper ? low : high, other);
    };
    const bool upper = (lane & 2) != 0;
    const float even = halved(upper, sums[0], sums[2], 2), odd = halved(upper, sums[1], sums[3], 2);
    const float own = halved((lane & 1) != 0, even, odd, 1);
    const float in_order = __shfl_sync(kWholeWarp, own, lane % 8 * 4 + lane / 8);
    if (__any_sync(kWholeWarp, in_order != 0.0f)) add(diagonal * 8 + lane, in_order);
  }
}

/// Adds what dS of Q tile i gives to gradients of captures, by the two warps that add dQ, each a half. The
/// consumers wait for that before they overwrite dS.
template <class P>
__device__ __forceinline__ void add_ds_grads(const Params& p, const BackwardSmem<P>& smem, unsigned i,
                                             int half) {
  using Policy = BackwardPolicy<P>;
  using Element = typename P::Element;
  smem.wait_ds(i);
  __syncwarp();  // one lane was adding dQ
  const QTileInfo& now = smem.q_tile(i);
  if (now.head < 0) return;
  const KvTileInfo<P>& kv_tile = smem.kv_tile_of(i);
  const auto head = kv_tile.sequence.head(p, now.head);
  const int q = now.tile * P::kBr, kv = kv_tile.kv_begin;
  if constexpr (P::kDifferenceGrads > 0)
    sum_diagonals<Element, Policy::kKeys, P::kBr>(
        smem.ds(i), smem.zeros(), half, [&](int difference, float sum) {
          P::add_capture_grads(p, head, sum, 0.0f, position(0), position(kv - q + difference),
                               [&](auto which, float* at, float value) {
                                 if constexpr (which.kPlaces == Places::by_difference)
                                   add_by_runs(at, which.kOfScore ? sum : value);
                               });
        });
  if constexpr (Policy::kAddsBiasGrad) {
    const BiasTileGrad to = P::bias_tile_grad(p, head);
    constexpr int kKeys = Policy::kKeys / 2;
    add_plane_grads<Element, Policy::kKeys, kKeys, P::kBr>(to, to.in_fours(p.seqlen_kv), smem.ds(i), q, kv,
                                                           half * kKeys);
  }
  barrier_arrive(smem.ds_added(i));
}

}  // namespace flashjit::sm90
