// Before a forward pass over lists of keys: the lists of the queries of each Q tile become one, in the
// workspace, in the order of keys. common/joined_list.cuh reads them.
#pragma once

#include "flashjit/common/joined_list.cuh"

namespace flashjit::auxiliary {

constexpr int kJoiningThreads = 256;
/// Keys at a time, a byte of shared memory each, and of a thread.
constexpr int kKeysOfWindow = 16384, kKeysOfThread = 16;

/// Which queries have the keys of a window, a bit of a byte each.
struct KeyWindow {
  uint4 queries[kKeysOfWindow / kKeysOfThread];
  int of_warp[kJoiningThreads / 32];

  __device__ __forceinline__ unsigned* word(int key) {
    return reinterpret_cast<unsigned*>(queries) + key / 4;
  }
};

/// Bit 0 of each byte that is not 0.
__device__ __forceinline__ unsigned bytes_in_use(unsigned word) {
  word |= word >> 4;
  word |= word >> 2;
  return (word | word >> 1) & 0x01010101u;
}

/// How many keys of the threads before have a query; `all` becomes how many all have. By all threads.
__device__ __forceinline__ int keys_before(KeyWindow& window, int own, int& all) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  int end = own;
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const int other = __shfl_up_sync(kWholeWarp, end, lanes);
    if (lane >= lanes) end += other;
  }
  if (lane == 31) window.of_warp[warp] = end;
  __syncthreads();
  int before = end - own;
  all = 0;
#pragma unroll
  for (int other = 0; other < kJoiningThreads / 32; ++other) {
    if (other == warp) before += all;
    all += window.of_warp[other];
  }
  __syncthreads();
  return before;
}

/// Where the keys of a Q tile's list go.
struct JoinedKeys {
  int* keys;
  unsigned char* queries;
  int room, count = 0;

  /// Adds the keys of a window in order. By all threads.
  __device__ void add(KeyWindow& window, int first_key, int size) {
    for (int begin = 0; begin * kKeysOfThread < size; begin += kJoiningThreads) {
      const int own = begin + static_cast<int>(threadIdx.x);
      const uint4 words = own * kKeysOfThread < size ? window.queries[own] : uint4{0, 0, 0, 0};
      const unsigned of_keys[4] = {words.x, words.y, words.z, words.w};
      int used = 0, all;
#pragma unroll
      for (int i = 0; i < 4; ++i) used += __popc(bytes_in_use(of_keys[i]));
      int at = count + keys_before(window, used, all);
#pragma unroll
      for (int i = 0; i < kKeysOfThread; ++i) {
        const unsigned bits = of_keys[i / 4] >> (i % 4 * 8) & 0xffu;
        if (bits == 0) continue;
        if (at < room) keys[at] = first_key + own * kKeysOfThread + i, queries[at] = bits;
        ++at;
      }
      count += all;
    }
  }
};

/// Notes the keys of a query's list that are in a window. Returns whether it names one twice.
template <class P>
__device__ __forceinline__ bool note_keys(KeyWindow& window, const IndexList<P>& list, unsigned bit,
                                          int first_key) {
  bool again = false;
  for (int n = static_cast<int>(threadIdx.x); n < list.count; n += kJoiningThreads) {
    const int key = list.key(n) - first_key;
    if (key < 0 || key >= kKeysOfWindow) continue;
    const unsigned of_key = bit << (key % 4 * 8);
    if ((atomicOr(window.word(key), of_key) & of_key) != 0) again = true;
  }
  return again;
}

/// Grid: batch * Q tiles * heads_kv.
template <class P>
__device__ void join_lists(const Params& p) {
  __shared__ __align__(16) KeyWindow window;
  const int list = static_cast<int>(blockIdx.x), h_kv = list % p.heads_kv,
            q_tiles = (p.seqlen_q + p.packed.queries - 1) / p.packed.queries,
            first = list / p.heads_kv % q_tiles * p.packed.queries;
  const Sequence<P> sequence(p, list / p.heads_kv / q_tiles);
  const int keys = sequence.seqused_kv(p), end = min(first + p.packed.queries, p.seqlen_q);
  const long long at = static_cast<long long>(list) * p.joined_lists.capacity;
  JoinedKeys joined{p.joined_lists.keys + at, p.joined_lists.queries + at, p.joined_lists.capacity};
  bool again = false;
  for (int first_key = 0; first_key < keys; first_key += kKeysOfWindow) {
    const int size = min(kKeysOfWindow, keys - first_key);
    for (int i = static_cast<int>(threadIdx.x); i * kKeysOfThread < size; i += kJoiningThreads)
      window.queries[i] = {0, 0, 0, 0};
    __syncthreads();
    for (int q = first; q < end; ++q)
      again |= note_keys(window, IndexList<P>(p, sequence, h_kv, q), 1u << (q - first), first_key);
    __syncthreads();
    joined.add(window, first_key, size);
  }
  again = __syncthreads_count(again || joined.count > joined.room) != 0;
  if (threadIdx.x != 0) return;
  int entries = 0;
  for (int q = first; again && q < end; ++q) entries += length_of_list<P>(p, sequence, q);
  p.joined_lists.lengths[list] = again ? -entries : joined.count;
}

}  // namespace flashjit::auxiliary
