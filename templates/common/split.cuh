// Parts of what a tile meets: where tiles are too few for the device, blocks share the KV tiles of a Q tile
// (Flash-Decoding), or in the backward pass the Q tiles of a KV tile; another entry joins what each has.
#pragma once

#include "flashjit/common/params.cuh"
#include "flashjit/common/types.cuh"

namespace flashjit {

/// How many there are of each tile.
template <class P>
__device__ __forceinline__ int num_splits(const Params& p) {
  return P::kSplit ? p.num_splits : 1;
}
/// Of the `count` tiles that one meets the first of a part, or behind the last of the part before.
template <class P>
__device__ __forceinline__ int split_begin(const Params& p, int part, int count) {
  return static_cast<int>(static_cast<long long>(count) * part / num_splits<P>(p));
}
/// The first row of a part of the keys, of which there are as many as of LSE: [batch, heads_q, seqlen_q].
__device__ __forceinline__ long long first_row_of_split(const Params& p, int part) {
  return static_cast<long long>(part) * p.batch * p.heads_q * p.seqlen_q;
}
/// Where a forward kernel writes the LSE of rows; null: nowhere.
template <class P>
__device__ __forceinline__ float* lse_of(const Params& p, int part) {
  return P::kSplit ? p.lse_splits + first_row_of_split(p, part) : p.lse;
}
template <class P>
__device__ __forceinline__ float* o_of_split(const Params& p, int part) {
  return p.o_splits + first_row_of_split(p, part) * P::kHeadDimV;
}
/// Which row of dK and dV a key has in a part of the queries: of [parts, batch, heads_kv, seqlen_kv].
__device__ __forceinline__ long long kv_row_of_split(const Params& p, int part, int b, int h_kv, int kv) {
  return ((static_cast<long long>(part) * p.batch + b) * p.heads_kv + h_kv) * p.seqlen_kv + kv;
}
/// Stores what a thread has of one of its two rows of an accumulator, of each of the first `chunks` of eight
/// columns the `half`-th two.
template <int kChunks>
__device__ __forceinline__ void store_row(float* row, int half, const float* c, int chunks = kChunks) {
  float* to = row + threadIdx.x % 4 * 2;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk)
    if (chunk < chunks)
      *reinterpret_cast<float2*>(to + chunk * 8) =
          float2{c[chunk * 4 + half * 2], c[chunk * 4 + half * 2 + 1]};
}
/// The same of O.
template <class P>
__device__ __forceinline__ void store_split(const Params& p, int part, long long row, int half,
                                            const float* o) {
  store_row<P::kHeadDimV / 8>(o_of_split<P>(p, part) + row * P::kHeadDimV, half, o);
}

}  // namespace flashjit
