// Parts of the keys: where Q tiles are too few for the device, blocks share the KV tiles of one, and the
// join_parts entry makes one row of O of what each of them has (Flash-Decoding).
#pragma once

#include "flashjit/common/params.cuh"
#include "flashjit/common/types.cuh"

namespace flashjit {

/// How many there are of each Q tile's keys.
template <class P>
__device__ __forceinline__ int key_parts(const Params& p) {
  return P::kSplitsKeys ? p.key_parts : 1;
}
/// The first row of a part, of which there are as many as of LSE: [batch, heads_q, seqlen_q].
__device__ __forceinline__ long long first_of_part(const Params& p, int part) {
  return static_cast<long long>(part) * p.batch * p.heads_q * p.seqlen_q;
}
/// Where a forward kernel writes the LSE of rows; null: nowhere.
template <class P>
__device__ __forceinline__ float* lse_of(const Params& p, int part) {
  return P::kSplitsKeys ? p.lse_parts + first_of_part(p, part) : p.lse;
}
template <class P>
__device__ __forceinline__ float* o_of_part(const Params& p, int part) {
  return p.o_parts + first_of_part(p, part) * P::kHeadDimV;
}
/// Stores what a thread has of one of its two rows of O, of each eight columns the `half`-th two.
template <class P>
__device__ __forceinline__ void store_part(const Params& p, int part, long long row, int half,
                                           const float* o) {
  float* to = o_of_part<P>(p, part) + row * P::kHeadDimV + threadIdx.x % 4 * 2;
#pragma unroll
  for (int chunk = 0; chunk < P::kHeadDimV / 8; ++chunk)
    *reinterpret_cast<float2*>(to + chunk * 8) = float2{o[chunk * 4 + half * 2], o[chunk * 4 + half * 2 + 1]};
}

}  // namespace flashjit
