// Which pairs of a tile attend: the block map and the mask program together. Ragged ends and key padding are
// the caller's, who knows the tile's limits.
#pragma once

#include "flashjit/common/problem.cuh"

namespace flashjit {

/// The map's row of entries for one block row of batch b and head h.
template <class Problem>
__device__ __forceinline__ const unsigned char* block_map_row(const Params& p, int b, int h, int q) {
  const long long mb = p.map_batch == 1 ? 0 : b;
  const long long mh = p.map_heads == 1 ? 0 : h;
  return p.block_map + ((mb * p.map_heads + mh) * p.map_rows + q / Problem::kBlockQ) * p.map_columns;
}

/// Whether the pair attends by block map and mask program.
template <class Problem>
__device__ __forceinline__ bool pair_attends(const Params& p, int b, int h, int q, int kv) {
  if constexpr (Problem::kBlockMap) {
    if (!block_map_row<Problem>(p, b, h, q)[kv / Problem::kBlockKv]) return false;
  }
  if constexpr (Problem::kHasMask) return Problem::mask(p, b, h, q, kv);
  return true;
}

/// Number of keys of batch entry b that are no padding.
template <class Problem>
__device__ __forceinline__ int kv_length(const Params& p, int b) {
  if constexpr (Problem::kKvLengths) return min(max(p.kv_lengths[b], 0), p.seqlen_kv);
  return p.seqlen_kv;
}

/// Whether dropout keeps the pair with these random bits.
__device__ __forceinline__ bool keeps(const Params& p, unsigned word) {
  return word < p.keep_below || p.keep_below == 0xffffffffu;
}

}  // namespace flashjit
