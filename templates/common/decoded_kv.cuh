// K and V whose rows are decoded: where the rows of keys and of their scales are, and what kernels read of
// them.
#pragma once

#include "flashjit/common/kv_channel_scales.cuh"
#include "flashjit/common/kv_format.cuh"
#include "flashjit/common/kv_source.cuh"

namespace flashjit {

/// The row that has a key's scales: its own.
template <class P, class Format, bool kApart = Format::kApart>
struct KvScaleRows {
  __device__ KvScaleRows(const Params&, const TensorParam&, const Sequence<P>&, int) {}
  __device__ __forceinline__ const unsigned char* of_key(int, const unsigned char* row) const { return row; }
};
/// Or one of a tensor of their own, with a row for each key, or for the keys that share scales.
template <class P, class Format>
class KvScaleRows<P, Format, true> {
 public:
  __device__ KvScaleRows(const Params& p, const TensorParam& scales, const Sequence<P>& sequence, int h_kv)
      : source_(p, scales, sequence, h_kv) {}
  __device__ __forceinline__ const unsigned char* of_key(int kv, const unsigned char*) const {
    constexpr int kPageRows = max(P::kPageRows, 1), kKeys = max(Format::kKeys, 1);
    // The first rows of a page are its groups'.
    const int row = P::kPageRows > 0 ? kv - kv % kPageRows + kv % kPageRows / kKeys : kv / kKeys;
    return reinterpret_cast<const unsigned char*>(source_.row(row));
  }

 private:
  KvSource<P, typename Format::StoredScale> source_;
};

/// The keys of one head of one sequence, in K or in V.
template <class P, class Format>
class DecodedKvSource : public KvSource<P, typename Format::Stored> {
 public:
  /// Pieces of 16 columns that are decoded together, as registers allow.
  static constexpr int kPiecesAtOnce = Format::kApart || Format::kBits == 2 ? 1 : 2;
  __device__ DecodedKvSource(const Params& p, const TensorParam& tensor, const TensorParam& block_scales,
                             const ScaleParam& scales, const Sequence<P>& sequence, int h_kv,
                             int first_key = 0)
      : KvSource<P, typename Format::Stored>(p, tensor, sequence, h_kv, first_key),
        scale_rows_(p, block_scales, sequence, h_kv),
        scales_(p, scales, sequence, h_kv, first_key) {}

  /// Columns [column, column + 16) of key `kv`, which exists.
  __device__ __forceinline__ void decode16(int kv, int column, float (&to)[16]) const {
    const unsigned char* row = bytes_of(kv);
    flashjit::decode16<Format>(row, scale_rows_.of_key(kv, row), column, argument_of(kv), to);
  }
  /// The same as elements.
  template <class Element>
  __device__ __forceinline__ void decode16(int kv, int column, uint4 (&to)[2]) const {
    const unsigned char* row = bytes_of(kv);
    flashjit::decode16<Element, Format>(row, scale_rows_.of_key(kv, row), column, argument_of(kv), to);
  }

 private:
  __device__ __forceinline__ const unsigned char* bytes_of(int kv) const {
    return reinterpret_cast<const unsigned char*>(this->row(kv));
  }
  __device__ __forceinline__ float argument_of(int kv) const {
    return Format::kArgument ? *scales_.of_key(kv) : 1.0f;
  }

  KvScaleRows<P, Format> scale_rows_;
  KvScales<P, Format::kArgumentOfKeys, true> scales_;
};

/// The sources of K and V, each decoded by its format.
template <class P, class KFormat, class VFormat>
struct DecodedKvSources {
  using K = DecodedKvSource<P, KFormat>;
  using V = DecodedKvSource<P, VFormat>;
  static __device__ __forceinline__ K k(const Params& p, const Sequence<P>& sequence, int h_kv,
                                        int first_key) {
    return {p, p.k, p.k_block_scale, p.k_scale, sequence, h_kv, first_key};
  }
  static __device__ __forceinline__ V v(const Params& p, const Sequence<P>& sequence, int h_kv,
                                        int first_key) {
    return {p, p.v, p.v_block_scale, p.v_scale, sequence, h_kv, first_key};
  }
};

/// The sources of K and V: elements,
template <class P, bool kDecodes = kDecodesKv<P>>
struct KvSources {
  static __device__ __forceinline__ KvSource<P> k(const Params& p, const Sequence<P>& sequence, int h_kv,
                                                  int first_key) {
    return {p, p.k, sequence, h_kv, first_key};
  }
  static __device__ __forceinline__ KvSource<P> v(const Params& p, const Sequence<P>& sequence, int h_kv,
                                                  int first_key) {
    return {p, p.v, sequence, h_kv, first_key};
  }
};
/// or rows that are decoded by the formats of the call.
template <class P>
struct KvSources<P, true> : DecodedKvSources<P, typename P::KFormat, typename P::VFormat> {};

}  // namespace flashjit
