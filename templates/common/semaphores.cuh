// Params::semaphores: the tile counters from which CTAs take work, and the semaphores by which they wait for
// each other. Work is taken by CTAs that run, so every wait ends.
#pragma once

#include "flashjit/common/tile_lists.cuh"

namespace flashjit {

/// Forward, where tiles are listed: the next Q tile.
__device__ __forceinline__ int* q_tile_counter(const Params& p) { return p.semaphores; }

// Backward: the next KV tile; the next rows of dQ's accumulator to clear; the next KV tile to check for rows;
// the next rows of dQ to convert.
__device__ __forceinline__ int* kv_tile_counter(const Params& p) { return p.semaphores; }
__device__ __forceinline__ int* clear_counter(const Params& p) { return p.semaphores + 1; }
__device__ __forceinline__ int* empty_tile_counter(const Params& p) { return p.semaphores + 2; }
__device__ __forceinline__ int* convert_counter(const Params& p) { return p.semaphores + 3; }

/// How many pieces of dQ's accumulator are clear, for a head of K and V.
__device__ __forceinline__ int* cleared_semaphore(const Params& p, int b, int h_kv) {
  return p.semaphores + kTileCounters + b * p.heads_kv + h_kv;
}
/// The same, plus how many parts of its KV tiles have finished adding to dQ.
__device__ __forceinline__ int* done_semaphore(const Params& p, int b, int h_kv) {
  return cleared_semaphore(p, p.batch, 0) + b * p.heads_kv + h_kv;
}
/// Rows of a piece of the accumulator.
constexpr int kClearRows = 128;
__device__ __forceinline__ int pieces_to_clear(const Params& p) {
  return p.qhead_per_kvhead() * (p.seqlen_q_padded / kClearRows);
}

/// Ordered additions: how many KV tiles have added to a Q tile's dQ, or to one of its parts.
template <class P>
__device__ __forceinline__ int* dq_semaphore(const Params& p, int b, int h, int q_tile, int part = 0) {
  return done_semaphore(p, p.batch, 0) +
         ((static_cast<long long>(b) * p.heads_q + h) * q_tiles<P>(p) + q_tile) * kDqSemaphores + part;
}

/// With kClaimsTiles, where additions are not ordered: how many of the first KV tiles are claimed, then for
/// each whether it is.
template <class P>
__device__ __forceinline__ int* tile_claims(const Params& p) {
  return done_semaphore(p, p.batch, 0);
}

}  // namespace flashjit
