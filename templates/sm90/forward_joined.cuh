// Joined lists of keys in the consumers: which entries of a KV tile are keys of each row's query.
#pragma once

#include "flashjit/sm90/forward_policy.cuh"

namespace flashjit::sm90 {

/// A bit for each entry of the KV tile, of a thread's two rows.
struct KeysOfRows {
  const unsigned* present[2] = {};
};

/// S = -infinity where a row's query has not the key.
template <class P>
struct MaskOfRows {
  template <class Work, int kCount>
  static __device__ __forceinline__ void apply(const Params&, const Work&, const KeysOfRows& rows, int,
                                               float (&s)[kCount]) {
    const int of_lane = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int n = 0; n < kCount; n += 16) {  // 32 keys
      const unsigned present[2] = {rows.present[0][n / 16] >> of_lane, rows.present[1][n / 16] >> of_lane};
#pragma unroll
      for (int e = 0; e < 16; ++e)
        if (!(present[e / 2 % 2] >> (e / 4 * 8 + e % 2) & 1u)) s[n + e] = -infinity();
    }
  }
};

/// Whether the queries of a warp's rows have all keys of tile n.
template <class P>
struct FullByKeysOfRows {
  template <class Storage, class Work, class Rows>
  static __device__ __forceinline__ void find(const Params&, const Storage& smem, const Work&, Rows& rows,
                                              const int& n, const int&, const int&, bool& full, const int&) {
    constexpr int kWords = P::kBc / 32;
    bool all = true;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = min(rows.packed_query[half] - rows.q.begin, kMostJoinedQueries - 1);
      rows.present[half] = smem.present_keys(n) + query * kWords;
#pragma unroll
      for (int word = 0; word < kWords; ++word) all = all && rows.present[half][word] == ~0u;
    }
    full = __all_sync(kWholeWarp, all) != 0;
  }
};

}  // namespace flashjit::sm90
