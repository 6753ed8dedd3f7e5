// Sparse tokens (kIndices): the keys that a query's list names, for all heads that share a head of K and V.
#pragma once

#include "flashjit/common/visible.cuh"

namespace flashjit {

/// How many entries of a query's list count.
template <class P>
__device__ __forceinline__ int length_of_list(const Params& p, const Sequence<P>& sequence, int q) {
  const IndicesParam& lists = p.indices;
  if (!lists.topk_length) return lists.count;
  const int length =
      lists.topk_length[sequence.batch() * lists.length_stride_b + sequence.q_row(q) * lists.length_stride_q];
  return clamped(length, 0, lists.count);
}

/// The list of a query, whose entries are in the place of keys in order: tiles of keys are tiles of entries.
template <class P>
class IndexList {
 public:
  using Entry = int;  ///< of the list, as it is read
  int count;

  __device__ __forceinline__ IndexList(const Params& p, const Sequence<P>& sequence, int h_kv, int q)
      : count(length_of_list<P>(p, sequence, q)),
        p_(p),
        sequence_(sequence),
        h_kv_(h_kv),
        q_(q),
        seqused_kv_(sequence.seqused_kv(p)),
        keys_(p.indices.keys + sequence.batch() * p.indices.stride_b +
              sequence.q_row(q) * p.indices.stride_q + h_kv * p.indices.stride_h) {}

  /// The key of entry n; -1: none, by the list or by the mask, which must be alike for all heads.
  __device__ __forceinline__ int key(int n) const { return key_of(n, entry(n)); }
  /// The same for an entry that has been read.
  __device__ __forceinline__ int key_of(int n, int entry) const {
    const int kv = existing_key(n, entry);
    if constexpr (P::kHasMask)
      if (kv >= 0 &&
          !P::mask(p_, sequence_.head(p_, h_kv_ * p_.qhead_per_kvhead()), position(q_), position(kv)))
        return -1;
    return kv;
  }
  /// The same by the list alone.
  __device__ __forceinline__ int named_key(int n) const { return existing_key(n, entry(n)); }
  /// What the list says, which may be no key.
  __device__ __forceinline__ int entry(int n) const { return n < count ? keys_[n] : -1; }
  static __device__ __forceinline__ Entry none() { return -1; }
  /// The length of the list of a query, of all KV heads.
  static __device__ __forceinline__ int length(const Params& p, const Sequence<P>& sequence, int q) {
    return length_of_list<P>(p, sequence, q);
  }

 private:
  __device__ __forceinline__ int existing_key(int n, int entry) const {
    if constexpr (P::kCheckIndices) check(n, entry);
    return static_cast<unsigned>(entry) < static_cast<unsigned>(seqused_kv_) ? entry : -1;
  }
  __device__ __noinline__ void check(int n, int kv) const {
    if (kv >= -1 && kv < seqused_kv_) return;
    printf("flashjit: entry %d of indices is %d at b %d, KV head %d, q %d, which has %d keys; it is none\n",
           n, kv, sequence_.b, h_kv_, q_, seqused_kv_);
  }

  const Params& p_;
  const Sequence<P>& sequence_;
  int h_kv_, q_, seqused_kv_;
  const int* keys_;
};

}  // namespace flashjit
