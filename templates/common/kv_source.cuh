// Where key n is in memory: one key after the other, in the slot of a cache, or in pages that a table names.
#pragma once

#include "flashjit/common/page_table.cuh"
#include "flashjit/common/visible.cuh"

namespace flashjit {

/// A debug mode: prints an entry that names no page.
template <class P>
__device__ __noinline__ void check_page(const Params& p, int b, int column, int page) {
  if (page >= 0 && page < p.page_table.count) return;
  printf("flashjit: page_table[%d, %d] is %d, but K and V have %d pages; the last is read\n", b, column, page,
         p.page_table.count);
}

/// What the table says of a key of a sequence: the page that has it. A slot is one page with all keys.
template <class P>
__device__ __forceinline__ int table_entry(const Params& p, int b, int kv) {
  if (P::kPageRows == 0 && p.page_table.pages == nullptr) return b;
  const int column = P::kPageRows > 0 ? kv / P::kPageRows : 0;
  const int page = entry_of(p.page_table, b, column);
  if constexpr (P::kCheckIndices) check_page<P>(p, b, column, page);
  return page;
}
/// The host cannot check a table: a number that no page has becomes the last page's.
__device__ __forceinline__ int existing_page(const Params& p, int page) {
  return static_cast<unsigned>(page) < static_cast<unsigned>(p.page_table.count) ? page
                                                                                 : p.page_table.count - 1;
}
/// The page that has a key of a sequence: its batch index in K and V.
template <class P>
__device__ __forceinline__ int page_of_key(const Params& p, int b, int kv) {
  return existing_page(p, table_entry<P>(p, b, kv));
}

/// Where a key is: its row of all pages' rows, or of its sequence's. `entry` is the table's.
template <class P>
__device__ __forceinline__ int slot_of_entry(const Params& p, int entry, int kv) {
  return P::kPageRows > 0 ? existing_page(p, entry) * P::kPageRows + kv % P::kPageRows : kv;
}
template <class P>
__device__ __forceinline__ int slot_of_key(const Params& p, int b, int kv) {
  return slot_of_entry<P>(p, P::kPageRows > 0 ? table_entry<P>(p, b, kv) : 0, kv);
}

// Rows of keys, in K, V or scales, from the address of a sequence's first, or with pages of page 0's;
// KeyRows<P> names one of these types. `of_page`, `of_key`: strides. A slot is found by slot_of_key(). By
// reference, as values change the order of code (../sm80/NOTES.md#functions-of-sm80).

/// One after the other.
template <class P>
struct KeysInOrder {
  template <class Element>
  static __device__ __forceinline__ Element* row(Element* const& first, const Params&, const int&,
                                                 const int& kv, const long long&, const long long& of_key) {
    return first + kv * of_key;
  }
  template <class Element>
  static __device__ __forceinline__ Element* row_in_slot(Element* const& first, int slot, const long long&,
                                                         const long long& of_key) {
    return first + slot * of_key;
  }
};
/// In pages that a table names.
template <class P>
struct KeysInPages {
  template <class Element>
  static __device__ __forceinline__ Element* row(Element* const& first, const Params& p, const int& b,
                                                 const int& kv, const long long& of_page,
                                                 const long long& of_key) {
    return first + page_of_key<P>(p, b, kv) * of_page + kv % P::kPageRows * of_key;
  }
  template <class Element>
  static __device__ __forceinline__ Element* row_in_slot(Element* const& first, int slot,
                                                         const long long& of_page, const long long& of_key) {
    return first + slot / P::kPageRows * of_page + slot % P::kPageRows * of_key;
  }
};
template <class P>
using KeyRows = Conditional<(P::kPageRows > 0), KeysInPages<P>, KeysInOrder<P>>;

/// Whether a mask, such as a window, may leave pages behind. An engine frees these, so that the table may
/// name any page for them: they are not read.
template <class P>
constexpr bool kLeavesPages = P::kPageRows > 0 && P::kMaskBoundsFirstKey;
/// The first key that any query of a range attends to.
template <class P>
__device__ __forceinline__ int first_key_of(const Params& p, const typename P::Head& head, Range q) {
  if constexpr (kLeavesPages<P>) return P::kv_bounds(p, head, q).begin;
  return 0;
}

/// What a reader of K or V keeps of that.
template <bool kLeavesPages>
class FirstKey {
 public:
  __device__ explicit FirstKey(int) {}
  /// Whether key `kv` may be read, if it exists.
  __device__ __forceinline__ bool reads(int) const { return true; }
};
template <>
class FirstKey<true> {
 public:
  __device__ explicit FirstKey(int first) : first_(first) {}
  __device__ __forceinline__ bool reads(int kv) const { return kv >= first_; }

 private:
  int first_;
};

/// Whether K and V are codes with scales.
template <class P>
constexpr bool kScaledKv = sizeof(typename P::KvElement) == 1;

/// Whether they are elements that codes became, whose scales of heads are left to the results:
/// auxiliary/decode_cache.cuh.
template <class P>
constexpr bool kScaledElements = requires {
  typename P::ScaledElements;
};

template <class P, bool kCodes = P::kQCodes>
struct QElementOf {
  using Type = typename P::Element;
};
template <class P>
struct QElementOf<P, true> {
  using Type = typename P::KvElement;
};
template <class P>
using QElement = typename QElementOf<P>::Type;

/// What all codes of a KV head's queries are multiplied with; 1 where Q has none.
template <class P>
__device__ __forceinline__ float q_scale(const Params& p, int b, int h_kv) {
  if constexpr (P::kQCodes) return p.q_scale.data[b * p.q_scale.stride_b + h_kv * p.q_scale.stride_h];
  return 1.0f;
}

/// What K or V is read as, where its values do not matter.
template <class P, bool kCodes = kScaledKv<P>>
struct KvBits {
  using Type = unsigned short;
};
template <class P>
struct KvBits<P, true> {
  using Type = unsigned char;
};

/// The keys of one head of one sequence, in K or in V.
template <class P, class Element = typename KvBits<P>::Type>
class KvSource : public FirstKey<kLeavesPages<P>> {
 public:
  /// `first_key`: the first that is read.
  __device__ KvSource(const Params& p, const TensorParam& tensor, const Sequence<P>& sequence, int h_kv,
                      int first_key = 0)
      : FirstKey<kLeavesPages<P>>(first_key),
        p_(p),
        tensor_(tensor),
        b_(sequence.b),
        first_(sequence.template kv_pointer<Element>(tensor, h_kv, 0)) {
    if constexpr (P::kCache && P::kPageRows == 0) first_ += page_of_key<P>(p, b_, 0) * tensor.stride_b;
  }

  /// Key `kv`, which must exist where there are pages.
  __device__ __forceinline__ Element* row(int kv) const {
    return KeyRows<P>::row(first_, p_, b_, kv, tensor_.stride_b, tensor_.stride_s);
  }
  /// The page of a key that exists, and its row there.
  __device__ __forceinline__ int page_of(int kv) const { return page_of_key<P>(p_, b_, kv); }
  __device__ __forceinline__ Element* row_in_page(int page, int kv) const {
    return first_ + page * tensor_.stride_b + kv % max(P::kPageRows, 1) * tensor_.stride_s;
  }
  /// By slot_of_key().
  __device__ __forceinline__ Element* row_in_slot(int slot) const {
    return KeyRows<P>::row_in_slot(first_, slot, tensor_.stride_b, tensor_.stride_s);
  }
  /// From one key of a tile to the next, in elements, where there are no pages.
  __device__ __forceinline__ long long stride() const { return tensor_.stride_s; }
  /// An address that may be read.
  __device__ __forceinline__ Element* some_row() const { return first_; }

 private:
  const Params& p_;
  const TensorParam& tensor_;
  int b_;
  Element* first_;  // of key 0; with pages, of the first key of page 0
};

/// What the codes of these keys are multiplied with.
template <class P, bool kOfKeys = P::kKeyScales,
          bool kExist = kScaledKv<P> || kDecodesKv<P> || kScaledElements<P>>
class KvScales : public FirstKey<kLeavesPages<P>> {
 public:
  __device__ KvScales(const Params& p, const ScaleParam& scales, const Sequence<P>& sequence, int h_kv,
                      int first_key = 0)
      : FirstKey<kLeavesPages<P>>(first_key),
        p_(p),
        scales_(scales),
        b_(sequence.b),
        first_row_(sequence.kv_row(0)),
        first_(scales.data + sequence.b * scales.stride_b + h_kv * scales.stride_h) {
    if constexpr (kOfKeys && P::kCache && P::kPageRows == 0)
      first_ += page_of_key<P>(p, b_, 0) * scales.stride_page;
  }

  /// The scale that all keys share.
  __device__ __forceinline__ float of_head() const {
    static_assert(!kOfKeys, "keys have their own");
    return *first_;
  }
  /// Where the scale of key `kv` is. With pages the key must exist.
  __device__ __forceinline__ const float* of_key(int kv) const {
    if constexpr (!kOfKeys) return first_;
    return KeyRows<P>::row(first_, p_, b_, P::kPageRows > 0 ? kv : first_row_ + kv, scales_.stride_page,
                           scales_.stride_s);
  }
  /// An address that may be read.
  __device__ __forceinline__ const float* some() const { return first_; }

 private:
  const Params& p_;
  const ScaleParam& scales_;
  int b_, first_row_;
  const float* first_;
};
/// A kernel whose K and V are no codes has no scales in its Params.
template <class P, bool kOfKeys>
class KvScales<P, kOfKeys, false> {
 public:
  __device__ KvScales(const Params&, const ScaleParam&, const Sequence<P>&, int, int = 0) {}
};

}  // namespace flashjit
