// Sparse tokens with kJoinsLists: the keys of a tile's queries as one list, whose entries say which of these
// queries have the key. The join_lists entry makes it.
#pragma once

#include "flashjit/common/index_list.cuh"

namespace flashjit {

/// The list of a Q tile and a head of K and V among all.
__device__ __forceinline__ int joined_list_at(const Params& p, int b, int h_kv, int q_tile) {
  const int q_tiles = (p.seqlen_q + p.packed.queries - 1) / p.packed.queries;
  return (b * q_tiles + q_tile) * p.heads_kv + h_kv;
}

/// A list's stored length: twice the length, and one more if the queries' own lists are read in sequence. A
/// sign instead of that bit was lost. ../sm90/NOTES.md#joined-lists
__device__ __forceinline__ int stored_length(int length, bool joined) { return 2 * length + !joined; }
__device__ __forceinline__ int length_of_stored(int stored) { return stored >> 1; }

/// IndexList for several queries from `q` on. Without room to join their lists, these follow each other, and
/// each entry is one query's.
template <class P>
class JoinedList {
 public:
  struct Entry {
    int key;
    unsigned queries;  ///< that have it, a bit for each
  };
  int count;

  __device__ __forceinline__ JoinedList(const Params& p, const Sequence<P>& sequence, int h_kv, int q)
      : p_(p), sequence_(sequence), h_kv_(h_kv), q_(q) {
    at_ = joined_list_at(p, sequence.b, h_kv, q / p.packed.queries);
    const int stored = p.joined_lists.lengths[at_];
    joined_ = stored % 2 == 0;
    count = length_of_stored(stored);
  }

  /// The key of entry n, and its queries.
  __device__ __forceinline__ Entry entry(int n) const {
    if (n >= count) return none();
    if (!joined_) return entry_of_query(p_, sequence_, h_kv_, q_, n);
    const long long at = static_cast<long long>(at_) * p_.joined_lists.capacity + n;
    return {p_.joined_lists.keys[at], p_.joined_lists.queries[at]};
  }
  /// The key of an entry that has been read; -1: none. Joined lists have keys that attend alone.
  __device__ __forceinline__ int key_of(int n, const Entry& entry) const {
    return joined_ || entry.queries == 0 ? entry.key : key_of_query(p_, sequence_, h_kv_, q_, n, entry.key);
  }
  static __device__ __forceinline__ Entry none() { return {-1, 0}; }
  /// The length of the longest list of a Q tile, of all KV heads.
  static __device__ __forceinline__ int length(const Params& p, const Sequence<P>& sequence, int q_tile) {
    int longest = 0;
    for (int h_kv = 0; h_kv < p.heads_kv; ++h_kv)
      longest =
          max(longest, length_of_stored(p.joined_lists.lengths[joined_list_at(p, sequence.b, h_kv, q_tile)]));
    return longest;
  }

 private:
  /// The query, counted from the first, that has entry n of the lists one behind the other; n becomes its own
  /// list's.
  static __device__ __forceinline__ int place(const Params& p, const Sequence<P>& sequence, int q, int& n) {
    int query = 0;
    for (int length; n >= (length = length_of_list<P>(p, sequence, q + query)); ++query) n -= length;
    return query;
  }
  static __device__ __forceinline__ Entry entry_of_query(const Params& p, const Sequence<P>& sequence,
                                                         int h_kv, int q, int n) {
    const int query = place(p, sequence, q, n);
    return {IndexList<P>(p, sequence, h_kv, q + query).entry(n), 1u << query};
  }
  static __device__ __forceinline__ int key_of_query(const Params& p, const Sequence<P>& sequence, int h_kv,
                                                     int q, int n, int entry) {
    const int query = place(p, sequence, q, n);
    return IndexList<P>(p, sequence, h_kv, q + query).key_of(n, entry);
  }

  const Params& p_;
  const Sequence<P>& sequence_;
  int h_kv_, q_, at_;
  bool joined_;
};

/// The list that a tile's keys come from.
template <class P>
using KeyList = Conditional<P::kJoinsLists, JoinedList<P>, IndexList<P>>;

/// KV tiles of the list of a query, or of a Q tile's queries.
template <class P>
__device__ __forceinline__ int tiles_of_list(const Params& p, const Sequence<P>& sequence, int q) {
  return (KeyList<P>::length(p, sequence, q) + P::kBc - 1) / P::kBc;
}

}  // namespace flashjit
