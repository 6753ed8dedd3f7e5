// Where a causal mask's diagonal cuts tiles. Host and device include this file: the unit tests check on the
// host the very arithmetic that kernels run. A pair attends when kv <= q + shift.
#pragma once

#if defined(__CUDACC__)
#define FLASHJIT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FLASHJIT_HOST_DEVICE inline
#endif

namespace flashjit {

FLASHJIT_HOST_DEVICE constexpr bool causal_attends(int q, int kv, int shift) { return kv <= q + shift; }

/// Whether no pair of a tile attends: its last query does not reach its first key.
FLASHJIT_HOST_DEVICE constexpr bool causal_tile_is_empty(int q_end, int kv_begin, int shift) {
  return !causal_attends(q_end - 1, kv_begin, shift);
}

/// Whether every pair of a tile attends: its first query reaches its last key.
FLASHJIT_HOST_DEVICE constexpr bool causal_tile_is_full(int q_begin, int kv_end, int shift) {
  return causal_attends(q_begin, kv_end - 1, shift);
}

/// First key that no query before q_end sees, in [0, seqlen_kv]. Queries past seqlen_q do not exist.
FLASHJIT_HOST_DEVICE constexpr int causal_kv_end(int q_end, int shift, int seqlen_q, int seqlen_kv) {
  const int end = (q_end < seqlen_q ? q_end : seqlen_q) + shift;
  return end < 0 ? 0 : end < seqlen_kv ? end : seqlen_kv;
}

/// First query that sees a key from kv_begin on, in [0, seqlen_q]. Keys past seqlen_kv do not exist.
FLASHJIT_HOST_DEVICE constexpr int causal_q_begin(int kv_begin, int shift, int seqlen_q, int seqlen_kv) {
  const int begin = (kv_begin < seqlen_kv ? kv_begin : seqlen_kv) - shift;
  return begin < 0 ? 0 : begin < seqlen_q ? begin : seqlen_q;
}

}  // namespace flashjit
