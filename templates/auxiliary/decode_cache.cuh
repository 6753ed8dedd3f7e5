// Before a forward pass whose many Q tiles would each decode their keys again, or copy them from small pages:
// K and V become elements in the workspace, or codes that are multiplied as they are, once. Problem has them
// there, in slots where the call has a cache; StoredProblem as the call has them.
#pragma once

#include "flashjit/auxiliary/decode_cache_params.cuh"
#include "flashjit/common/decoded_kv.cuh"
#include "flashjit/common/tile_lists.cuh"

namespace flashjit::auxiliary {

constexpr int kDecodingThreads = 128;

/// The first key that a query attends to, of the heads that share `h_kv`. An engine may have freed the pages
/// of earlier keys.
template <class P>
__device__ __forceinline__ int first_attended_key(const Params& p, const Sequence<P>& sequence, int h_kv) {
  if (!P::kMaskBoundsFirstKey) return 0;
  const int group = p.qhead_per_kvhead(), heads = P::kMaskUsesHead ? group : 1;
  const Range queries{0, sequence.seqlen_q(p)};
  int first = p.seqlen_kv;
  for (int i = 0; i < heads; ++i) {
    const auto head = sequence.head(p, h_kv * group + i);
    first = min(first, P::kv_bounds(p, head, queries).begin);
  }
  return first;
}

/// Rows [keys.begin, keys.end) of one head, by all threads; zeros before `first`.
template <class P, int kColumns, class Source>
__device__ __forceinline__ void decode_keys(const Source& from, Range keys, int first, const TensorParam& to,
                                            int b, int h_kv) {
  using Stored = typename KvBits<P>::Type;  // elements, or codes
  constexpr int kPieces = kColumns / 16, kAtOnce = Source::kPiecesAtOnce;
  static_assert(kColumns % 16 == 0, "head dimensions of quantized rows are multiples of 16");
  Stored* rows = static_cast<Stored*>(to.data) + b * to.stride_b + h_kv * to.stride_h;
#pragma unroll kAtOnce
  for (int begin = 0; begin < kDecodedKeys * kPieces; begin += kDecodingThreads) {
    const int index = begin + static_cast<int>(threadIdx.x), key = keys.begin + index / kPieces,
              column = index % kPieces * 16;
    if (key >= keys.end) break;
    uint4 elements[2] = {};
    if (key >= first) from.template decode16<typename P::Element>(key, column, elements);
    auto* at = reinterpret_cast<uint4*>(rows + key * to.stride_s + column);
    at[0] = elements[0];
    if (sizeof(Stored) == 2) at[1] = elements[1];
  }
}

/// The format of elements. It leaves out the scales of heads where results are multiplied with them.
template <class P, class Format>
using ElementFormat = Conditional<kScaledElements<P>, OfHead<Format>, Format>;

/// What the entry reads; StoredRows<P> names one of these types: rows that are decoded,
template <class P, bool kDecodes = kDecodesKv<P>>
struct StoredRows
    : DecodedKvSources<P, ElementFormat<P, typename P::KFormat>, ElementFormat<P, typename P::VFormat>> {
  static constexpr int kKColumns = P::KFormat::kDim, kVColumns = P::VFormat::kDim;
};
/// or elements or codes, as they are.
template <class P>
struct ElementSource : KvSource<P> {
  static constexpr int kPiecesAtOnce = 2;
  using KvSource<P>::KvSource;
  template <class Element>
  __device__ __forceinline__ void decode16(int kv, int column, uint4 (&to)[2]) const {
    const auto* from = reinterpret_cast<const uint4*>(this->row(kv) + column);
    to[0] = from[0];
    if (!kScaledKv<P>) to[1] = from[1];
  }
};
template <class P>
struct StoredRows<P, false> {
  static constexpr int kKColumns = P::kHeadDim, kVColumns = P::kHeadDimV;
  static __device__ __forceinline__ ElementSource<P> k(const Params& p, const Sequence<P>& sequence, int h_kv,
                                                       int first_key) {
    return {p, p.k, sequence, h_kv, first_key};
  }
  static __device__ __forceinline__ ElementSource<P> v(const Params& p, const Sequence<P>& sequence, int h_kv,
                                                       int first_key) {
    return {p, p.v, sequence, h_kv, first_key};
  }
};

/// Grid: batch * tiles of kDecodedKeys keys * heads_kv. Keys that a sequence does not have are not read, and
/// their place may hold anything. In a tile that a window begins in, keys before the window become zeros: the
/// workspace may hold NaN there, and zero times NaN is NaN.
template <class P>
__device__ void decode_cache(const DecodeCacheParams& params) {
  const Params& p = params.call;
  const int block = static_cast<int>(blockIdx.x), h_kv = block % p.heads_kv,
            tiles = (p.seqlen_kv + kDecodedKeys - 1) / kDecodedKeys, tile = block / p.heads_kv % tiles;
  const Sequence<P> sequence(p, block / p.heads_kv / tiles);
  const int length = sequence.seqused_kv(p), begin = tile * kDecodedKeys;
  if (begin >= length || sequence.seqlen_q(p) == 0) return;
  const int first = first_attended_key<P>(p, sequence, h_kv);
  // Lists may name a tile by looser bounds.
  const int first_written = kLists<P> ? 0 : max(first - P::kBc, 0);
  const Range keys{max(begin, first_written), min(begin + kDecodedKeys, length)};
  if (keys.begin >= keys.end) return;
  using Rows = StoredRows<P>;
  const auto k = Rows::k(p, sequence, h_kv, first);
  decode_keys<P, Rows::kKColumns>(k, keys, first, params.k, sequence.b, h_kv);
  if (P::kSharedKv) return;
  const auto v = Rows::v(p, sequence, h_kv, first);
  decode_keys<P, Rows::kVColumns>(v, keys, first, params.v, sequence.b, h_kv);
}

}  // namespace flashjit::auxiliary
