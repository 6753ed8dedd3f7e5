// Which tiles a tile meets: the KV tiles of a Q tile in the forward pass, the Q tiles of a KV tile in the
// backward pass.
#pragma once

#include "flashjit/common/visible.cuh"

namespace flashjit {

/// The KV tiles that one Q tile visits, in order: a contiguous range, or the list of a block map.
template <class P>
struct KvTiles {
  const int* list = nullptr;
  int first = 0, count = 0;

  __device__ KvTiles() {}
  __device__ KvTiles(const Params& p, int b, int h, int q_tile, Range q, int kv_limit) {
    if constexpr (P::kBlockMap) {
      const int rows = (p.seqlen_q + P::kBr - 1) / P::kBr, columns = (p.seqlen_kv + P::kBc - 1) / P::kBc;
      const long long mb = p.map_batch == 1 ? 0 : b, mh = p.map_heads == 1 ? 0 : h;
      const long long row = (mb * p.map_heads + mh) * rows + q_tile;
      list = p.lists.entries + row * columns;
      count = p.lists.count[row];
      // Tiles of padding alone stand at the end of the ascending list.
      if constexpr (P::kKvLengths)
        while (count > 0 && (list[count - 1] >> 1) * P::kBc >= kv_limit) --count;
    } else {
      const Range bounds = P::kv_bounds(p, b, h, q);
      const int end = min(bounds.end, kv_limit);
      first = bounds.begin / P::kBc;
      count = end > bounds.begin ? (end + P::kBc - 1) / P::kBc - first : 0;
    }
  }
  __device__ int tile(int i) const {
    if constexpr (P::kBlockMap) return list[i] >> 1;
    return first + i;
  }
  /// Whether block map and mask let every pair of the tile attend.
  __device__ bool full(const Params& p, int b, int h, Range q, int i) const {
    if constexpr (P::kBlockMap) return list[i] & 1;
    if constexpr (!P::kHasMask) return true;
    const int kv = tile(i) * P::kBc;
    return P::classify_tile(p, b, h, q, {kv, kv + P::kBc}) == TileClass::full;
  }
};

/// What the loader says of the Q tile in a stage, for the warps that compute on it.
struct StagedTile {
  int head;  ///< query head; -1: there are no more tiles
  int tile;
  int full;  ///< block map and mask program let every pair attend
  int turn;  ///< how many KV tiles add to this Q tile's dQ first, when additions are ordered
};
static_assert(sizeof(StagedTile) == 16, "the families' layouts count on it");

/// With ordered additions the last KV tile comes first: under a causal mask it has the fewest Q tiles, and
/// then nobody waits. The lists of a block map rank their tiles the other way round.
template <class P>
constexpr bool kLastFirst = P::kDeterministic && !P::kBlockMap;

/// The Q tiles of one query head that a KV tile meets, ascending: a contiguous range, or the list of a block
/// map.
template <class P>
struct QTiles {
  int first = 0, count = 0;
  const int* list = nullptr;
  const int* rank = nullptr;

  __device__ QTiles(const Params& p, int b, int h, int kv_tile, Range kv) {
    if constexpr (P::kBlockMap) {
      const int rows = (p.seqlen_kv + P::kBc - 1) / P::kBc, columns = (p.seqlen_q + P::kBr - 1) / P::kBr;
      const long long mb = p.map_batch == 1 ? 0 : b, mh = p.map_heads == 1 ? 0 : h;
      const long long row = (mb * p.map_heads + mh) * rows + kv_tile;
      list = p.lists.entries + row * columns;
      if constexpr (P::kDeterministic) rank = p.lists.rank + row * columns;
      count = p.lists.count[row];
    } else {
      const Range bounds = P::q_bounds(p, b, h, kv);
      first = bounds.begin / P::kBr;
      count = bounds.end > bounds.begin ? (bounds.end + P::kBr - 1) / P::kBr - first : 0;
    }
  }
  /// The tile at a place, as the compute loop wants to know it.
  __device__ StagedTile at(const Params& p, int b, int h, int index, int kv_tile, Range kv) const {
    const int tile = P::kBlockMap ? list[index] >> 1 : first + index;
    const Range q{tile * P::kBr, min(tile * P::kBr + P::kBr, p.seqlen_q)};
    StagedTile staged{h, tile, 1, 0};
    if constexpr (P::kBlockMap) {
      staged.full = list[index] & 1;
    } else if constexpr (P::kHasMask) {
      staged.full = P::classify_tile(p, b, h, q, kv) == TileClass::full;
    }
    if constexpr (P::kBlockMap && P::kDeterministic) staged.turn = rank[index];
    if constexpr (kLastFirst<P>) {
      const int end = min(P::kv_bounds(p, b, h, q).end, kv_length<P>(p, b));
      staged.turn = (end - 1) / P::kBc - kv_tile;
    }
    return staged;
  }
};

/// The number of this block's work. With ordered additions work is numbered as it starts: whoever waits for
/// its turn waits for a block that already runs. Uses the first word of shared memory.
template <class P>
__device__ __forceinline__ unsigned next_work(const Params& p, char* shared) {
  if constexpr (!P::kDeterministic) return blockIdx.x;
  // Without queries nobody waits, and nobody has cleared the counter.
  int* next = reinterpret_cast<int*>(shared);
  if (threadIdx.x == 0) *next = p.seqlen_q > 0 ? atomicAdd(p.tickets, 1) : static_cast<int>(blockIdx.x);
  __syncthreads();
  const unsigned work = static_cast<unsigned>(*next);
  __syncthreads();
  return work;
}

}  // namespace flashjit
