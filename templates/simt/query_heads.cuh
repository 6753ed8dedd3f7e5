// Family simt with lists of keys: the rows of a tile are heads of one query, its columns entries of the list
// that these share.
#pragma once

#include "flashjit/common/index_list.cuh"
#include "flashjit/simt/tile.cuh"

namespace flashjit::simt {

/// A tile of a list in shared memory: the entries' keys, and a row of zeros in the place of those that are
/// none.
template <class Problem>
struct ListTile {
  static constexpr int kWidest = max(chunks(Problem::kHeadDim), chunks(Problem::kHeadDimV)) * kChunk;
  alignas(16) typename Problem::KvElement zeros[kWidest];
  int keys[Problem::kBc];
};

/// K or V of a tile of a list.
template <class Problem>
struct EntryMatrix {
  using Element = typename Problem::KvElement;
  static constexpr bool kScaled = kScaledKv<Problem>;
  KvSource<Problem, Element> source;
  KvScales<Problem> scales;
  const int* keys;  ///< of the tile's entries; -1: none, which is a row of zeros
  Element* zeros;
  static constexpr int end = Problem::kBc;
  __device__ __forceinline__ bool has(int n) const { return n < end; }
  __device__ __forceinline__ Element* row(int n) const { return keys[n] >= 0 ? source.row(keys[n]) : zeros; }
  __device__ __forceinline__ float scale(int n) const {
    return keys[n] >= 0 ? *scales.of_key(keys[n]) : 0.0f;
  }
};

/// The same where rows are decoded.
template <class Source>
struct DecodedEntryMatrix {
  static constexpr bool kDecodes = true;
  Source source;
  const int* keys;
  __device__ __forceinline__ bool has(int n) const { return keys[n] >= 0; }
  __device__ __forceinline__ void decode16(int n, int column, float (&to)[16]) const {
    source.decode16(keys[n], column, to);
  }
};

/// K and V of the tile of a list.
template <class Problem, bool kDecodes = kDecodesKv<Problem>>
struct EntryMatrices {
  template <class Rows>
  static __device__ auto k(const Params& p, const Rows& rows, ListTile<Problem>& list) {
    return rows.keys_of(p, p.k, p.k_scale, list);
  }
  template <class Rows>
  static __device__ auto v(const Params& p, const Rows& rows, ListTile<Problem>& list) {
    return rows.keys_of(p, p.v, p.v_scale, list);
  }
};
template <class Problem>
struct EntryMatrices<Problem, true> {
  using Sources = KvSources<Problem>;
  template <class Rows>
  static __device__ auto k(const Params& p, const Rows& rows, ListTile<Problem>& list) {
    return DecodedEntryMatrix<typename Sources::K>{Sources::k(p, rows.sequence, rows.h_kv, 0), list.keys};
  }
  template <class Rows>
  static __device__ auto v(const Params& p, const Rows& rows, ListTile<Problem>& list) {
    return DecodedEntryMatrix<typename Sources::V>{Sources::v(p, rows.sequence, rows.h_kv, 0), list.keys};
  }
};

/// A CTA's rows: up to Br of the heads that share a head of K and V, of one query. CTAs: batch * seqlen_q *
/// heads_kv * sets of Br heads.
template <class Problem>
struct QueryHeads {
  int q, h_kv, h, count;  ///< the query, its KV head, the first head, and how many there are; 0: no query
  Sequence<Problem> sequence;

  __device__ explicit QueryHeads(const Params& p) {
    const int group = p.qhead_per_kvhead(), sets = tiles_of(group, Problem::kBr);
    const unsigned rest = blockIdx.x / sets;
    const int first = static_cast<int>(blockIdx.x % sets) * Problem::kBr;
    h_kv = static_cast<int>(rest % p.heads_kv);
    q = static_cast<int>(rest / p.heads_kv % p.seqlen_q);
    sequence = Sequence<Problem>(p, static_cast<int>(rest / p.heads_kv / p.seqlen_q));
    h = h_kv * group + first;
    count = q < sequence.seqlen_q(p) ? min(group - first, Problem::kBr) : 0;
  }
  template <class Element = typename Problem::Element>
  __device__ Matrix<Element> matrix(const TensorParam& tensor) const {
    return {sequence.template q_pointer<Element>(tensor, h, q), tensor.stride_h, count};
  }
  __device__ EntryMatrix<Problem> keys_of(const Params& p, const TensorParam& tensor,
                                          const ScaleParam& scales, ListTile<Problem>& list) const {
    return {{p, tensor, sequence, h_kv}, {p, scales, sequence, h_kv}, list.keys, list.zeros};
  }
  /// The list's entries from `first` on. By all threads.
  __device__ void read_list(const Params& p, int first, ListTile<Problem>& tile) const {
    const IndexList<Problem> list(p, sequence, h_kv, q);
    __syncthreads();
    for (int n = threadIdx.x; n < Problem::kBc; n += blockDim.x) tile.keys[n] = list.named_key(first + n);
    for (int i = threadIdx.x; i < ListTile<Problem>::kWidest; i += blockDim.x) tile.zeros[i] = {};
    __syncthreads();
  }
};

/// Whether a head's row attends to an entry's key.
template <class Problem>
__device__ __forceinline__ bool attends_to_entry(const Params& p, const QueryHeads<Problem>& rows,
                                                 const typename Problem::Head& head, int key) {
  if (key < 0) return false;
  if constexpr (Problem::kHasMask) return Problem::mask(p, head, position(rows.q), position(key));
  return true;
}

}  // namespace flashjit::simt
