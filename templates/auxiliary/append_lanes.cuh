// New rows of K and V without rotation, norm or scales of keys, from registers to the cache, a lane eight
// columns. An entry of its own, as those take registers.
#pragma once

#include "flashjit/auxiliary/append.cuh"
#include "flashjit/auxiliary/encode_lanes.cuh"

namespace flashjit::auxiliary {

/// Of packed rows, by a warp.
__device__ __forceinline__ NewKey new_key_of_packed_row(const AppendParams& p, int row) {
  for (int first = 0; first < p.batch; first += 32) {
    const int b = first + static_cast<int>(threadIdx.x) % 32;
    const int end = b < p.batch ? p.cu_seqlens[b + 1] : 0;
    const bool has = row < end && p.cu_seqlens[b] <= row;
    const unsigned found = __ballot_sync(kWholeWarp, has);
    if (found == 0) continue;
    const int lane = __ffs(static_cast<int>(found)) - 1,
              key = has ? max(p.kv_lengths[b], 0) - (end - row) : 0;
    return {first + lane, __shfl_sync(kWholeWarp, key, lane)};
  }
  return {-1, -1};
}

/// As new_key(), by a warp.
template <class P>
__device__ __forceinline__ NewKey new_key_of_warp(const AppendParams& p, int row) {
  if (P::kVarlen) return new_key_of_packed_row(p, row);
  const int b = row / p.rows;
  return {b, max(p.kv_lengths[b], 0) - p.rows + row % p.rows};
}

/// A lane's columns of a new row of a head.
struct LanePart {
  int b, h, column;
  KeyPlace place;
  bool exists;
};

/// What a cache has: elements; codes with given scales; rows in a format.
template <class P, bool kCodes = kScaledKv<P>, bool kDecodes = kDecodesKv<P>>
struct LaneStore {
  template <bool kOfK>
  static __device__ __forceinline__ void store(const AppendParams& p, const LanePart& part,
                                               const uint4& own) {
    if (!part.exists) return;
    auto* row =
        row_of<typename P::Element>(kOfK ? p.k_cache : p.v_cache, part.place.page, part.h, part.place.row);
    *reinterpret_cast<uint4*>(row + part.column) = own;
  }
};
template <class P>
struct LaneStore<P, true, false> {
  template <bool kOfK>
  static __device__ __forceinline__ void store(const AppendParams& p, const LanePart& part,
                                               const uint4& own) {
    if (!part.exists) return;
    float x[kLaneColumns];
    unpack_chunk<typename P::Element>(own, x);
    auto* row =
        row_of<typename P::KvElement>(kOfK ? p.k_cache : p.v_cache, part.place.page, part.h, part.place.row);
    store_codes(row + part.column, x, *scale_at(kOfK ? p.k_scale : p.v_scale, part.b, part.place, part.h));
  }
};
template <class P, bool kCodes>
struct LaneStore<P, kCodes, true> {
  template <bool kOfK>
  static __device__ __forceinline__ void store(const AppendParams& p, const LanePart& part,
                                               const uint4& own) {
    using Format = Conditional<kOfK, typename P::KFormat, typename P::VFormat>;
    static_assert(kEncodesByLanes<Format> && !Format::kArgumentOfKeys);
    using Bytes = unsigned char*;
    float x[kLaneColumns];
    unpack_chunk<typename P::Element>(own, x);
    const KeyPlace& place = part.place;
    const int h = part.exists ? part.h : 0;
    auto* to = reinterpret_cast<Bytes>(
        row_of<typename Format::Stored>(kOfK ? p.k_cache : p.v_cache, place.page, h, place.row));
    Bytes scales = to;
    if (Format::kApart)
      scales = reinterpret_cast<Bytes>(row_of<typename Format::StoredScale>(
          kOfK ? p.k_block_scale : p.v_block_scale, place.page, h, place.row));
    const float argument =
        Format::kArgument ? *scale_at(kOfK ? p.k_scale : p.v_scale, part.b, place, h) : 1.0f;
    encode_lane<Format>(x, part.column, part.exists, argument, to, scales);
  }
};

/// A new row by each warp of 128 threads where there are fewer blocks than rows, else by a block. Its first
/// heads' rows are read before anything is known of their place. Rows are left out as append() does.
template <class P>
__device__ void append_lanes(const AppendParams& p) {
  using Element = typename P::Element;
  static_assert(sizeof(Element) == 2 && P::kHeadDim == P::kHeadDimV && !P::kSharedKv);
  constexpr int kLanes = P::kHeadDim / kLaneColumns, kAhead = 4;
  const int all = P::kVarlen ? p.rows : p.batch * p.rows, heads = 2 * p.heads_kv;
  const bool of_warp = static_cast<int>(gridDim.x) < all;
  const int block = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const int row = of_warp ? block * 4 + thread / 32 : block;
  if (row >= all) return;
  const int own_head = (of_warp ? thread % 32 : thread) / kLanes, at_once = (of_warp ? 32 : 128) / kLanes;
  const int column = thread % kLanes * kLaneColumns;
  const int b = P::kVarlen ? 0 : row / p.rows, s = P::kVarlen ? row : row % p.rows;
  const auto load = [&](int first) {
    const int head = min(first + own_head, heads - 1);
    const bool is_k = head < p.heads_kv;
    return *reinterpret_cast<const uint4*>(
        row_of<Element>(is_k ? p.k : p.v, b, is_k ? head : head - p.heads_kv, s) + column);
  };
  uint4 next[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) next[i] = i * at_once < heads ? load(i * at_once) : uint4{};
  const bool named = p.slots != nullptr;
  const NewKey at = named ? NewKey{0, 0} : new_key_of_warp<P>(p, row);
  const KeyPlace place = named ? place_of_slot(p, row) : place_of_key<P>(p, at);
  if (place.page < 0) return;
#pragma unroll 1
  for (int first = 0; first < heads; first += at_once) {
    const uint4 own = next[0];
#pragma unroll
    for (int i = 1; i < kAhead; ++i) next[i - 1] = next[i];
    if (first + kAhead * at_once < heads) next[kAhead - 1] = load(first + kAhead * at_once);
    const int head = first + own_head;
    const bool is_k = head < p.heads_kv, exists = head < heads;
    if (__any_sync(kWholeWarp, is_k))
      LaneStore<P>::template store<true>(p, {at.b, head, column, place, is_k}, own);
    if (__any_sync(kWholeWarp, exists && !is_k))
      LaneStore<P>::template store<false>(p, {at.b, head - p.heads_kv, column, place, exists && !is_k}, own);
  }
}

}  // namespace flashjit::auxiliary
