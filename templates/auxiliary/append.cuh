// New rows of K and V on their way into a cache, and of Q: rotated by their positions (RoPE). A cache of
// codes gets K and V divided by their scales, which are given, or each key's own and written, too.
#pragma once

#include "flashjit/auxiliary/append_params.cuh"
#include "flashjit/auxiliary/norm.cuh"
#include "flashjit/auxiliary/rope.cuh"
#include "flashjit/common/chunk.cuh"
#include "flashjit/common/kv_source.cuh"

namespace flashjit::auxiliary {

/// Which key of which sequence a new row is; without a sequence b is negative.
struct NewKey {
  int b, key;
};

template <class P>
__device__ __forceinline__ NewKey new_key(const AppendParams& p, int row) {
  if constexpr (!P::kVarlen) {
    const int b = row / p.rows;
    return {b, max(p.kv_lengths[b], 0) - p.rows + row % p.rows};
  } else {
    __shared__ int2 found;
    if (threadIdx.x == 0) found = int2{-1, -1};
    __syncthreads();
    for (int b = threadIdx.x; b < p.batch; b += blockDim.x) {
      const int begin = p.cu_seqlens[b], end = p.cu_seqlens[b + 1], length = p.kv_lengths[b];
      if (begin <= row && row < end) found = int2{b, max(length, 0) - (end - row)};
    }
    __syncthreads();
    return {found.x, found.y};
  }
}

/// The page that has a key's row, and which of its rows; without a place for it the page is negative.
struct KeyPlace {
  int page, row;
};

template <class P>
__device__ __forceinline__ KeyPlace place_of_key(const AppendParams& p, NewKey at) {
  if (at.b < 0 || at.key < 0 || at.key >= p.seqlen_kv) return {-1, 0};
  constexpr bool kPaged = P::kPageRows > 0;
  int page = at.b;
  if (kPaged || p.page_table.pages != nullptr)
    page = entry_of(p.page_table, at.b, kPaged ? at.key / P::kPageRows : 0);
  const bool exists = static_cast<unsigned>(page) < static_cast<unsigned>(p.page_table.count);
  return {exists ? page : -1, kPaged ? at.key % P::kPageRows : at.key};
}

/// The place that the caller names for a new row.
__device__ __forceinline__ KeyPlace place_of_slot(const AppendParams& p, int row) {
  const long long slot =
      p.wide_slots ? static_cast<const long long*>(p.slots)[row] : static_cast<const int*>(p.slots)[row];
  const long long page = slot / p.slot_rows;
  return {slot >= 0 && page < p.slot_pages ? static_cast<int>(page) : -1,
          static_cast<int>(slot % p.slot_rows)};
}

/// Two chunks of a row that a thread moves, negative where there is none: of rotated dimensions one of each
/// half, so that it has both elements of its pairs, however these lie; of others likewise.
struct ChunkPair {
  int first, second;
};

__device__ __forceinline__ ChunkPair chunk_pair(int i, int chunks, int rotated) {
  if (i < rotated) return {i, i + rotated};
  const int begin = 2 * rotated, rest = chunks - begin, half = (rest + 1) / 2, other = i - rotated;
  return {other < half ? begin + other : -1, other + half < rest ? begin + other + half : -1};
}

/// Rotates the pairs of two chunks, chunk `mine` of each half of the rotated dimensions: of neighbours in
/// each, or of one element of each.
template <bool kInterleaved, int kCount>
__device__ __forceinline__ void rotate(float (&first)[kCount], float (&second)[kCount], const float2* angles,
                                       int mine, int rotated) {
  const auto rotate_pair = [](float& x, float& y, float2 angle) {
    const float before = x;
    x = x * angle.x - y * angle.y;
    y = before * angle.y + y * angle.x;
  };
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (!kInterleaved)
      rotate_pair(first[i], second[i], angles[mine * kCount + i]);
    else if (i < kCount / 2)
      rotate_pair(first[2 * i], first[2 * i + 1], angles[mine * kCount / 2 + i]);
    else
      rotate_pair(second[2 * i - kCount], second[2 * i - kCount + 1],
                  angles[(mine + rotated - 1) * kCount / 2 + i]);
  }
}

/// Where the scale of a key is.
__device__ __forceinline__ float* scale_at(const ScaleParam& scales, int b, KeyPlace place, int h) {
  return scales.data + b * scales.stride_b + place.page * scales.stride_page + h * scales.stride_h +
         place.row * scales.stride_s;
}

/// The largest magnitude of each head's row at a time, by all threads of the CTA; NaN where there is one.
template <int kHeadsAtOnce, int kCount>
__device__ __forceinline__ float largest_of_row(int slot, const float (&first)[kCount],
                                                const float (&second)[kCount]) {
  __shared__ int largest[kHeadsAtOnce];
  __syncthreads();
  if (threadIdx.x < kHeadsAtOnce) largest[threadIdx.x] = 0;
  __syncthreads();
  int own = 0;  // bits of floats that are not negative grow as these do
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    own = max(own, max(__float_as_int(fabsf(first[i])), __float_as_int(fabsf(second[i]))));
  if (slot < kHeadsAtOnce) atomicMax(&largest[slot], own);
  __syncthreads();
  return slot < kHeadsAtOnce ? __int_as_float(largest[slot]) : 0.0f;
}

/// Quotients by one divisor of no extreme size, each the nearest float, where a code is not too small for it:
/// the product with its reciprocal, corrected by what that leaves.
struct Quotients {
  float divisor, reciprocal;

  __device__ __forceinline__ explicit Quotients(float by) : divisor(by), reciprocal(1.0f / by) {}
  __device__ __forceinline__ bool are_plain() const {
    return fabsf(divisor) > 0x1p-60f && fabsf(divisor) < 0x1p60f;
  }
  __device__ __forceinline__ float of(float x) const {
    const float near = x * reciprocal, exact = fmaf(fmaf(-near, divisor, x), reciprocal, near);
    return fabsf(near) < 0x1p20f ? exact : near;
  }
};

/// Codes of four values.
template <class Code>
__device__ __forceinline__ unsigned codes_of_four(const float (&x)[4]) {
#if __CUDA_ARCH__ >= 890
  if (kLargestCode<Code> == kLargestCode<e4m3>) return pack_e4m3(x[0], x[1], x[2], x[3]);
#endif
  unsigned word = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) word |= static_cast<unsigned>(from_float<Code>(x[i]).bits) << (i * 8);
  return word;
}
template <class Code, int kCount, class Divided>
__device__ __forceinline__ void store_quotients(Code* to, const float (&x)[kCount], const Divided& divided) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4)
    reinterpret_cast<unsigned*>(to)[i / 4] =
        codes_of_four<Code>({divided(x[i]), divided(x[i + 1]), divided(x[i + 2]), divided(x[i + 3])});
}
template <class Code, int kCount>
__device__ __forceinline__ void store_codes(Code* to, const float (&x)[kCount], float scale) {
  if (const Quotients by(scale); by.are_plain())
    store_quotients(to, x, [&](float value) { return by.of(value); });
  else
    store_quotients(to, x, [&](float value) { return value / scale; });
}

/// What a key's row is divided by: the call's scale, or with scales of keys its own, which `writes` writes.
template <class P, class Code>
__device__ __forceinline__ float divisor_of_key(float* scale, float largest, bool writes) {
  const float divisor = !P::kKeyScales ? *scale : largest == 0.0f ? 1.0f : largest / kLargestCode<Code>;
  if (P::kKeyScales && writes) *scale = divisor;
  return divisor;
}

/// What a thread has of a row of a head, of Q, or of new K or V.
struct HeadPart {
  bool exists, is_k, is_v;
  int h;
  ChunkPair chunks;
  bool has_first, has_second;
};

/// Divides K or V by its scale, which with scales of keys comes from the row's largest element, and stores
/// the codes. `first`: whether this thread is the row's first.
template <class P, int kElements>
__device__ __forceinline__ void store_part_as_codes(const AppendParams& p, const HeadPart& part, int b,
                                                    KeyPlace place, bool first, float largest,
                                                    const float (&x)[kElements],
                                                    const float (&y)[kElements]) {
  using Stored = typename P::KvElement;
  float* scale = scale_at(part.is_k ? p.k_scale : p.v_scale, b, place, part.h);
  const float divisor = divisor_of_key<P, Stored>(scale, largest, first);
  Stored* to = row_of<Stored>(part.is_k ? p.k_cache : p.v_cache, place.page, part.h, place.row);
  if (part.has_first) store_codes(to + part.chunks.first * kElements, x, divisor);
  if (part.has_second) store_codes(to + part.chunks.second * kElements, y, divisor);
}

/// One CTA of 128 threads for all heads of one new row; grid: batch * rows, packed: rows. A row without a
/// sequence or slot, a place in the cache or an angle in the tables is left out. The first heads' rows are
/// read before anything is known of their place.
template <class P>
__device__ void append(const AppendParams& p) {
  using Element = typename P::Element;
  constexpr int kThreads = 128, kElements = kChunk<Element>;
  constexpr int kChunks = P::kHeadDim / kElements, kChunksV = P::kHeadDimV / kElements;
  constexpr int kPairs = (max(kChunks, kChunksV) + 1) / 2, kHeadsAtOnce = kThreads / kPairs;
  const RopeParam& rope = p.rope;
  const int row = static_cast<int>(blockIdx.x);
  const int b = P::kVarlen ? 0 : row / p.rows, s = P::kVarlen ? row : row % p.rows;
  const int mine = threadIdx.x % kPairs, rotated = rope.pairs / kElements;
  // A thread beyond the last head waits with the others, where these wait.
  const int slot = threadIdx.x / kPairs, heads = 2 * p.heads_kv + p.heads_q;
  const auto part_of = [&](int begin) {
    HeadPart part;
    const int head = begin + slot;
    part.exists = slot < kHeadsAtOnce && head < heads;
    part.is_k = head < p.heads_kv, part.is_v = !part.is_k && head < 2 * p.heads_kv;
    part.h = part.is_k ? head : part.is_v ? head - p.heads_kv : head - 2 * p.heads_kv;
    part.chunks = part.is_v ? chunk_pair(mine, kChunksV, 0) : chunk_pair(mine, kChunks, rotated);
    part.has_first = part.exists && part.chunks.first >= 0;
    part.has_second = part.exists && part.chunks.second >= 0;
    return part;
  };
  uint4 first = {}, second = {};
  const auto load = [&](int begin) {
    const HeadPart part = part_of(begin);
    const TensorParam& of = part.is_k ? p.k : part.is_v ? p.v : p.q;
    const uint4* from = reinterpret_cast<const uint4*>(row_of<Element>(of, b, part.h, s));
    first = part.has_first ? from[part.chunks.first] : uint4{};
    second = part.has_second ? from[part.chunks.second] : uint4{};
  };
  load(0);

  const bool named = p.slots != nullptr;
  const NewKey at = named ? NewKey{0, 0} : new_key<P>(p, row);
  const KeyPlace place = named ? place_of_slot(p, row) : place_of_key<P>(p, at);
  __shared__ float2 angles[P::kHeadDim / 2];
  if (rope.pairs > 0) {
    const RowPositions positions(rope, row, at.key);
    if (!positions.have_angles(rope)) return;
    for (int pair = threadIdx.x; pair < rope.pairs; pair += kThreads)
      angles[pair] = rotation<Element>(rope, positions.of_pair(rope, pair), pair);
    __syncthreads();
  }
  if (place.page < 0) return;
  const bool norms = p.k_norm.weight != nullptr || p.q_norm.weight != nullptr;

  for (int begin = 0; begin < heads; begin += kHeadsAtOnce) {
    const HeadPart part = part_of(begin);
    if (begin > 0) load(begin);
    if (!(kScaledKv<P> && P::kKeyScales) && !norms && !part.exists) continue;
    const bool rotates = !part.is_v && mine < rotated;
    float x[kElements], y[kElements];
    if (kScaledKv<P> || rotates || norms) {
      unpack_chunk<Element>(first, x), unpack_chunk<Element>(second, y);
      if (norms) {
        const NormParam& norm = part.is_k ? p.k_norm : p.q_norm;
        const float factor = part_of_row_norm<kPairs, kThreads>(norm, P::kHeadDim, x, y);
        if (!part.is_v && part.has_first) normalize<Element>(norm, factor, part.chunks.first * kElements, x);
        if (!part.is_v && part.has_second)
          normalize<Element>(norm, factor, part.chunks.second * kElements, y);
      }
      if (rotates && rope.interleaved)
        rotate<true>(x, y, angles, mine, rotated);
      else if (rotates)
        rotate<false>(x, y, angles, mine, rotated);
      first = pack_chunk<Element>(x), second = pack_chunk<Element>(y);
    }
    if constexpr (kScaledKv<P>) {
      float largest = 0.0f;
      if constexpr (P::kKeyScales) largest = largest_of_row<kHeadsAtOnce>(slot, x, y);
      if (part.exists && (part.is_k || part.is_v))
        store_part_as_codes<P>(p, part, at.b, place, mine == 0, largest, x, y);
      if (!part.exists || part.is_k || part.is_v) continue;
    }
    Element* to = part.is_k   ? row_of<Element>(p.k_cache, place.page, part.h, place.row)
                  : part.is_v ? row_of<Element>(p.v_cache, place.page, part.h, place.row)
                              : row_of<Element>(p.q_out, b, part.h, s);
    if (part.has_first) reinterpret_cast<uint4*>(to)[part.chunks.first] = first;
    if (part.has_second) reinterpret_cast<uint4*>(to)[part.chunks.second] = second;
  }
}

}  // namespace flashjit::auxiliary
