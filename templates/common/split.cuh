// Split-KV: where tiles are too few for the device, CTAs share the KV tiles of a Q tile (Flash-Decoding), or
// in the backward pass the Q tiles of a KV tile (split-Q). The entries combine and combine_dkdv add up the
// results.
#pragma once

#include "flashjit/common/params.cuh"
#include "flashjit/common/types.cuh"

namespace flashjit {

/// The number of CTAs that share a tile's visits.
template <class P>
__device__ __forceinline__ int num_splits(const Params& p) {
  if (P::kClusterSplit) return kJoiningCtas;
  return P::kSplit ? p.num_splits : 1;
}
/// The start of a split among the `count` tiles that a tile visits; the split before ends there.
template <class P>
__device__ __forceinline__ int split_begin(const Params& p, int split, int count) {
  if constexpr (P::kInvariant) return min(split * tiles_of_split(P::kBc), count);
  return static_cast<int>(static_cast<long long>(count) * split / num_splits<P>(p));
}
/// How many splits may have keys of a sequence of `keys`: none of the others is written or read.
template <class P>
__device__ __forceinline__ int splits_with_keys(const Params& p, int keys) {
  if constexpr (P::kFixedParts) return min(p.num_splits, parts_of_keys(P::kBc, keys));
  constexpr int kKeys = tiles_of_split(P::kBc) * P::kBc;
  return P::kInvariant ? min(p.num_splits, (keys + kKeys - 1) / kKeys) : p.num_splits;
}
/// The first of a split's rows of O and LSE, which are [num_splits, batch, heads_q, seqlen_q].
__device__ __forceinline__ long long first_row_of_split(const Params& p, int split) {
  return static_cast<long long>(split) * p.batch * p.heads_q * p.seqlen_q;
}
/// Where a forward kernel writes the LSE of rows; null: nowhere.
template <class P>
__device__ __forceinline__ float* lse_of(const Params& p, int split) {
  return P::kSplit ? p.lse_splits + first_row_of_split(p, split) : p.lse.data;
}
/// The same for the rows' largest scores, with kRowMax; the splits' largest scores stand behind their LSE.
template <class P>
__device__ __forceinline__ float* row_max_of(const Params& p, int split) {
  return P::kSplit ? p.lse_splits + first_row_of_split(p, p.num_splits + split) : p.row_max;
}
template <class P>
__device__ __forceinline__ float* o_of_split(const Params& p, int split) {
  return p.o_splits + first_row_of_split(p, split) * P::kHeadDimV;
}
/// LSE of a row in a split whose scores all lie next to the least float, see exponent_factor(): the highest,
/// with the logarithm of the row's sum in the last 12 bits, as beside it LSE has no room for that.
__device__ __forceinline__ float near_min_lse(float highest, float sum) {
  const int log = min(static_cast<int>(log2f(sum) * 128.0f + 0.5f), 0xfff);
  return __int_as_float((__float_as_int(highest) & ~0xfff) | log);
}
/// The highest score. Its last 12 bits are the least float's, or zeros, as bf16's are.
__device__ __forceinline__ float far_highest(float lse) {
  const int bits = __float_as_int(lse) & ~0xfff;
  return __int_as_float(bits == static_cast<int>(0xff7ff000u) ? bits | 0xfff : bits);
}
/// The sum; 0 where the highest is not that of `highest`, another such LSE. NaN stays NaN.
__device__ __forceinline__ float far_sum(float lse, float highest) {
  if (lse != lse) return lse;
  const int bits = __float_as_int(lse);
  return (bits ^ __float_as_int(highest)) >> 12 != 0 ? 0.0f
                                                     : exp2f(static_cast<float>(bits & 0xfff) / 128.0f);
}
/// The row of dK and dV of a key in a split of the queries, among [num_splits, batch, heads_kv, seqlen_kv].
__device__ __forceinline__ long long kv_row_of_split(const Params& p, int split, int b, int h_kv, int kv) {
  return ((static_cast<long long>(split) * p.batch + b) * p.heads_kv + h_kv) * p.seqlen_kv + kv;
}
/// Stores a thread's values of one of its two rows of an accumulator: two columns of each of the first
/// `chunks` times eight.
template <int kChunks, bool kAdd = false>
__device__ __forceinline__ void store_row(float* row, int half, const float* c, int chunks = kChunks) {
  float* to = row + threadIdx.x % 4 * 2;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk)
    if (chunk < chunks) {
      float2* at = reinterpret_cast<float2*>(to + chunk * 8);
      const float2 x{c[chunk * 4 + half * 2], c[chunk * 4 + half * 2 + 1]};
      if constexpr (kAdd)
        *at = {at->x + x.x, at->y + x.y};
      else
        *at = x;
    }
}
/// The same for O.
template <class P>
__device__ __forceinline__ void store_split(const Params& p, int split, long long row, int half,
                                            const float* o) {
  store_row<P::kHeadDimV / 8>(o_of_split<P>(p, split) + row * P::kHeadDimV, half, o);
}

}  // namespace flashjit
