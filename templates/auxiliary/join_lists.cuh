// Before a forward pass over lists of keys: the lists of the queries of each Q tile become one, in the
// workspace, in the order of keys. common/joined_list.cuh reads them.
#pragma once

#include "flashjit/common/joined_list.cuh"

namespace flashjit::auxiliary {

constexpr int kJoiningThreads = 256, kJoiningWarps = kJoiningThreads / 32;
/// Keys at a time; and entries of a list that a thread reads at once.
constexpr int kKeysOfWindow = 16384, kEntriesAtOnce = 4;

/// Which queries have the keys of a window, a bit for each.
struct KeyWindow {
  unsigned char queries[kKeysOfWindow];
  int of_warp[kJoiningWarps];

  /// By all threads.
  __device__ __forceinline__ void clear(int size) {
    auto* words = reinterpret_cast<uint4*>(queries);
    for (int i = static_cast<int>(threadIdx.x); i * 16 < size; i += kJoiningThreads) words[i] = {0, 0, 0, 0};
  }
  /// Notes that a query has a key. Returns whether it was noted before.
  __device__ __forceinline__ bool note(int key, unsigned query) {
    const unsigned bit = query << (key % 4 * 8);
    return (atomicOr(reinterpret_cast<unsigned*>(queries) + key / 4, bit) & bit) != 0;
  }
};

/// Notes the keys of a query's list that are in a window. Returns whether it names one twice.
template <class P>
__device__ __forceinline__ bool note_keys(KeyWindow& window, const IndexList<P>& list, unsigned query,
                                          int first_key) {
  bool again = false;
  for (int n = static_cast<int>(threadIdx.x); n < list.count; n += kEntriesAtOnce * kJoiningThreads) {
    int key[kEntriesAtOnce];
#pragma unroll
    for (int i = 0; i < kEntriesAtOnce; ++i) key[i] = list.key(n + i * kJoiningThreads) - first_key;
#pragma unroll
    for (int i = 0; i < kEntriesAtOnce; ++i)
      if (key[i] >= 0 && key[i] < kKeysOfWindow) again |= window.note(key[i], query);
  }
  return again;
}

/// Where the keys of a Q tile's list go.
struct JoinedKeys {
  int* keys;
  unsigned char* queries;
  int room, count = 0;

  /// Adds the keys of a window in order, each warp its share. By all threads.
  __device__ __forceinline__ void add(KeyWindow& window, int first_key, int size) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const int share = (size + kJoiningThreads - 1) / kJoiningThreads * 32, begin = warp * share,
              end = min(begin + share, size);
    const auto queries_of = [&](int key) { return key < end ? window.queries[key] : 0; };
    int own = 0;
    for (int key = begin; key < end; key += 32)
      own += __popc(__ballot_sync(kWholeWarp, queries_of(key + lane) != 0));
    if (lane == 0) window.of_warp[warp] = own;
    __syncthreads();
    int at = count;
#pragma unroll
    for (int other = 0; other < kJoiningWarps; ++other) {
      if (other < warp) at += window.of_warp[other];
      count += window.of_warp[other];
    }
    for (int key = begin; key < end; key += 32) {
      const int bits = queries_of(key + lane);
      const unsigned used = __ballot_sync(kWholeWarp, bits != 0);
      const int to = at + __popc(used & ((1u << lane) - 1));
      if (bits != 0 && to < room) keys[to] = first_key + key + lane, queries[to] = bits;
      at += __popc(used);
    }
    __syncthreads();
  }

  /// The lists of some queries one behind the other instead, each entry one query's, if there is room.
  /// Returns their stored_length(). By all threads.
  template <class P>
  __device__ int put_lists(const Params& p, const Sequence<P>& sequence, int h_kv, Range of) const {
    int entries = 0;
    for (int q = of.begin; q < of.end; ++q) entries += length_of_list<P>(p, sequence, q);
    if (entries > room) return stored_length(entries, false);
    int begin = 0;
    for (int q = of.begin; q < of.end; ++q) {
      const IndexList<P> list(p, sequence, h_kv, q);
      for (int n = static_cast<int>(threadIdx.x); n < list.count; n += kJoiningThreads)
        keys[begin + n] = list.key(n), queries[begin + n] = 1u << (q - of.begin);
      begin += list.count;
    }
    return stored_length(entries, true);
  }
};

/// Grid: batch * Q tiles * heads_kv.
template <class P>
__device__ void join_lists(const Params& p) {
  __shared__ __align__(16) KeyWindow window;
  const int list = static_cast<int>(blockIdx.x), h_kv = list % p.heads_kv,
            q_tiles = (p.seqlen_q + p.packed.queries - 1) / p.packed.queries,
            first = list / p.heads_kv % q_tiles * p.packed.queries;
  const Sequence<P> sequence(p, list / p.heads_kv / q_tiles);
  const int keys = sequence.seqused_kv(p), end = min(first + p.packed.queries, sequence.seqlen_q(p));
  if (P::kVarlen && first >= end) return;  // there are places for the longest sequence's tiles in each
  const long long at = static_cast<long long>(list) * p.joined_lists.capacity;
  JoinedKeys joined{p.joined_lists.keys + at, p.joined_lists.queries + at, p.joined_lists.capacity};
  bool again = false;
  for (int first_key = 0; first_key < keys; first_key += kKeysOfWindow) {
    const int size = min(kKeysOfWindow, keys - first_key);
    window.clear(size);
    __syncthreads();
    for (int q = first; q < end; ++q)
      again |= note_keys(window, IndexList<P>(p, sequence, h_kv, q), 1u << (q - first), first_key);
    __syncthreads();
    joined.add(window, first_key, size);
  }
  int length = stored_length(joined.count, true);
  if (__syncthreads_count(again || joined.count > joined.room) > 0)
    length = joined.put_lists<P>(p, sequence, h_kv, {first, end});
  if (threadIdx.x == 0) p.joined_lists.lengths[list] = length;
}

}  // namespace flashjit::auxiliary
