// Gradients of captured tensors that are sums of dS, from dS in shared memory: [slice of 64
// queries][key][64], swizzled as tiles of Q and K are. dS of a masked pair is zero. DsGrads<P> says which
// gradients a kernel has.
#pragma once

#include "flashjit/common/capture_grads.cuh"
#include "flashjit/sm90/backward_rings.cuh"

namespace flashjit::sm90 {

/// Adds a tile of dS to the gradient of a dense bias: kCount keys from `key` on, of kQueries queries. The
/// tile begins at the pair (q, kv). By a warp.
template <class Element, int kKeys, int kCount, int kQueries>
__device__ __forceinline__ void add_bias_tile_grads(const BiasTileGrad& to, bool in_fours, unsigned ds, int q,
                                                    int kv, int key) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  // Sixteen keys and sixteen queries at a time, transposed: a lane has four neighbouring keys of query lane /
  // 4, and of the query eight on. So the rows of the first matrix are keys 0, 1, 4, 5, 8 and so on, and the
  // rows of the second are the other keys.
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

/// Calls add(difference, sum) with the sum of dS over the tile's pairs with key - query = difference, for 32
/// neighbouring differences at a time, one a lane. `zeros` are sixteen bytes of zeros. By two warps; `half`
/// tells them apart. A warp's instructions come one after the other, so there must be few.
template <class Element, int kKeys, int kQueries, class Add>
__device__ __forceinline__ void sum_diagonals(unsigned ds, unsigned zeros, int half, Add&& add) {
  constexpr int kKeyBlocks = kKeys / 8, kQueryBlocks = kQueries / 8, kOwn = (kKeyBlocks + kQueryBlocks) / 2;
  static_assert(kOwn % 4 == 0);
  const int lane = static_cast<int>(threadIdx.x) % 32, row = lane / 4, column = lane % 4 * 2;
  const unsigned identity = pack<Element>(row == column ? 1.0f : 0.0f, row == column + 1 ? 1.0f : 0.0f);
  // A block has eight keys and eight queries. A lane gives the address of a row of one of four blocks on a
  // diagonal.
  const auto row_of_block = [&](int query, int diagonal) {
    const int own = query + lane / 8;
    const bool exists = static_cast<unsigned>(own + diagonal) < kKeyBlocks;
    return exists ? ds + chunk_offset<kKeys>(own * 8 + lane % 8, own) + diagonal * 8 * kRowBytes : zeros;
  };
  // Sums a diagonal's blocks: each product multiplies four of them by two identity matrices. The lane gets,
  // of two columns, the elements that lie as many rows below `row` as the column's number; the first row
  // follows the last.
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
    // Four lanes exchange, so that each has the whole of one of the four sums.
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

// What a tile of dS adds to, each by the two warps that add dQ; `half` tells them apart. The tile begins at
// the pair (q, kv).

/// Captures whose elements depend on key - query alone.
template <class P>
struct DifferenceGrads {
  static __device__ __forceinline__ void add(const Params& p, const BackwardSmem<P>& smem,
                                             const typename P::Head& head, unsigned i, int q, int kv,
                                             int half) {
    sum_diagonals<typename P::Element, BackwardPolicy<P>::kKeys, P::kBr>(
        smem.ds(i), smem.zeros(), half, [&](int difference, float sum) {
          P::add_capture_grads(p, head, sum, 0.0f, position(0), position(kv - q + difference),
                               [&](auto which, float* at, float value) {
                                 if constexpr (which.kPattern == AccumulationPattern::by_difference)
                                   add_by_runs(at, which.kOfScore ? sum : value);
                               });
        });
  }
};
/// A dense bias, in which every pair has an element.
template <class P>
struct BiasGrads {
  static __device__ __forceinline__ void add(const Params& p, const BackwardSmem<P>& smem,
                                             const typename P::Head& head, unsigned i, int q, int kv,
                                             int half) {
    const BiasTileGrad to = P::bias_tile_grad(p, head);
    constexpr int kTileKeys = BackwardPolicy<P>::kKeys, kKeys = kTileKeys / 2;
    add_bias_tile_grads<typename P::Element, kTileKeys, kKeys, P::kBr>(to, to.in_fours(p.seqlen_kv),
                                                                       smem.ds(i), q, kv, half * kKeys);
  }
};

/// The consumers' dS passes to the warps that add dQ, which make all `Grads` of it while dQ is on its way.
template <class P, class... Grads>
struct GradsOfDs {
  using Smem = BackwardSmem<P>;
  static constexpr bool kWholeWarps = true;

  // The consumers' side.

  /// Waits until dS of Q tile i may be written.
  static __device__ __forceinline__ void acquire(const Smem& smem, unsigned i) {
    DsRing<P>::acquire(smem, i);
  }
  /// There is no Q tile i.
  static __device__ __forceinline__ void end(const Smem& smem, unsigned i) {
    DsRing<P>::commit_thread(smem, i);
  }

  // The side of the warps that add dQ.

  /// Adds what dS of Q tile i gives, by two warps, each a half.
  static __device__ __forceinline__ void add(const Params& p, const Smem& smem, unsigned i, int half) {
    DsRing<P>::wait_full(smem, i);
    __syncwarp();  // one lane was adding dQ
    const QTileInfo& now = smem.q_tile(i);
    if (now.head < 0) return;
    const KvTileInfo<P>& kv_tile = smem.kv_tile_of(i);
    const auto head = kv_tile.sequence.head(p, now.head);
    const int q = now.tile * P::kBr, kv = kv_tile.kv_begin;
    (Grads::add(p, smem, head, i, q, kv, half), ...);
    DsRing<P>::release_thread(smem, i);
  }
};
/// None is made of dS: the consumers' own order says when dS may be written.
template <class P>
struct GradsOfDs<P> {
  using Smem = BackwardSmem<P>;
  static constexpr bool kWholeWarps = false;

  static __device__ __forceinline__ void acquire(const Smem&, unsigned) {}
  static __device__ __forceinline__ void end(const Smem&, unsigned) {}
  static __device__ __forceinline__ void add(const Params&, const Smem&, unsigned, int) {}
};
template <class P, bool kBias = BackwardPolicy<P>::kAddsBiasGrad>
using DsGrads = Conditional<
    (P::kDifferenceGrads > 0),
    Conditional<kBias, GradsOfDs<P, DifferenceGrads<P>, BiasGrads<P>>, GradsOfDs<P, DifferenceGrads<P>>>,
    Conditional<kBias, GradsOfDs<P, BiasGrads<P>>, GradsOfDs<P>>>;

}  // namespace flashjit::sm90
