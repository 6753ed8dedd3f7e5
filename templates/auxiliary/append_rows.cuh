// New rows of K and V on their way into a cache whose rows are encoded, and of Q: as append(), by a warp for
// each head's row.
#pragma once

#include "flashjit/auxiliary/append.cuh"
#include "flashjit/auxiliary/encode_row.cuh"

namespace flashjit::auxiliary {

/// A new row of up to kDim columns in a warp's registers, on its way to shared memory.
template <class Element, int kDim>
struct NewRow {
  static constexpr int kElements = kChunk<Element>, kOwn = (kDim / kElements + 31) / 32;
  uint4 own[kOwn];
  int dim;

  __device__ __forceinline__ void load(const Element* from, int columns, int lane) {
    dim = columns;
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
      if (const int chunk = i * 32 + lane; chunk * kElements < dim)
        own[i] = reinterpret_cast<const uint4*>(from)[chunk];
  }
  __device__ __forceinline__ void put(float* row, int lane) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int first = (i * 32 + lane) * kElements;
      if (first >= dim) break;
      float x[kElements];
      unpack_chunk<Element>(own[i], x);
#pragma unroll
      for (int j = 0; j < kElements; j += 4)
        *reinterpret_cast<float4*>(row + first + j) = float4{x[j], x[j + 1], x[j + 2], x[j + 3]};
    }
    __syncwarp();
  }
};

/// Encodes a row of K or V into the cache. With scales of keys the call's scale is written, too.
template <class P, class Format>
__device__ __forceinline__ void store_encoded(RowEncoder<Format>& encoder, const float* row,
                                              const TensorParam& cache, const TensorParam& block_scales,
                                              const ScaleParam& scales, int b, KeyPlace place, int h) {
  float argument = 1.0f;
  if (Format::kArgument) {
    float* scale = scale_at(scales, b, place, h);
    if (Format::kArgumentOfKeys) {
      const BlockExtremes found = extremes_of_block<32>(row, Format::kDim);
      const float largest = found.finite ? fabsf(found.extreme) : __uint_as_float(0x7fffffffu);
      argument = largest == 0.0f ? 1.0f : largest / Format::kLargestWithArgument;
      if (threadIdx.x % 32 == 0) *scale = argument;
    } else {
      argument = *scale;
    }
  }
  using Bytes = unsigned char*;
  auto* to = reinterpret_cast<Bytes>(row_of<typename Format::Stored>(cache, place.page, h, place.row));
  Bytes scale_row = to;
  if (Format::kApart)
    scale_row =
        reinterpret_cast<Bytes>(row_of<typename Format::StoredScale>(block_scales, place.page, h, place.row));
  encoder.encode(row, argument, to, scale_row);
}

/// What encodes a row of K and of V.
template <class P, bool kDecodes = kDecodesKv<P>>
struct Encoders {
  using K = RowEncoder<typename P::KFormat>;
  using V = RowEncoder<typename P::VFormat>;
};

/// Leaves rows of K and Q as norm and rotation make them.
struct RowsAsTheyAre {
  template <int kDim>
  static __device__ __forceinline__ void change(float*, int) {}
};

/// One CTA of 128 threads for all heads of one new row; grid: batch * rows, packed: rows. Rows are left out
/// as append() does.
template <class P, class LastStage = RowsAsTheyAre>
__device__ void append_rows(const AppendParams& p) {
  using Element = typename P::Element;
  constexpr int kWarps = 4;
  __shared__ __align__(16) float rows[kWarps][max(P::kHeadDim, P::kHeadDimV)];
  __shared__ typename Encoders<P>::K k_encoders[kWarps];
  __shared__ typename Encoders<P>::V v_encoders[kWarps];
  const RopeParam& rope = p.rope;
  const int new_row = static_cast<int>(blockIdx.x);
  const int b = P::kVarlen ? 0 : new_row / p.rows, s = P::kVarlen ? new_row : new_row % p.rows;
  const bool named = p.slots != nullptr;
  const NewKey at = named ? NewKey{0, 0} : new_key<P>(p, new_row);
  const KeyPlace place = named ? place_of_slot(p, new_row) : place_of_key<P>(p, at);
  const RowPositions positions(rope, new_row, at.key);
  if ((rope.pairs > 0 && !positions.have_angles(rope)) || place.page < 0) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, heads = 2 * p.heads_kv + p.heads_q;
  float* row = rows[warp];
  NewRow<Element, max(P::kHeadDim, P::kHeadDimV)> next;
  const auto load = [&](int head) {
    const bool is_k = head < p.heads_kv, is_v = !is_k && head < 2 * p.heads_kv;
    const int h = is_k ? head : is_v ? head - p.heads_kv : head - 2 * p.heads_kv;
    if (head >= heads || (is_v && P::kSharedKv)) return;  // V is in the rows of K
    next.load(row_of<Element>(is_k   ? p.k
                              : is_v ? p.v
                                     : p.q,
                              b, h, s),
              is_v ? P::kHeadDimV : P::kHeadDim, lane);
  };
  load(warp);
  for (int head = warp; head < heads; head += kWarps) {
    const bool is_k = head < p.heads_kv, is_v = !is_k && head < 2 * p.heads_kv;
    const int h = is_k ? head : is_v ? head - p.heads_kv : head - 2 * p.heads_kv;
    if (!(is_v && P::kSharedKv)) next.put(row, lane);
    load(head + kWarps);
    if (is_v && P::kSharedKv) continue;
    if (is_v) {
      store_encoded<P>(v_encoders[warp], row, p.v_cache, p.v_block_scale, p.v_scale, at.b, place, h);
      continue;
    }
    normalize_row<Element, P::kHeadDim>(is_k ? p.k_norm : p.q_norm, row, lane);
    if (rope.pairs > 0) rotate_row<Element>(rope, positions, row, lane);
    LastStage::template change<P::kHeadDim>(row, lane);
    if (is_k) {
      store_encoded<P>(k_encoders[warp], row, p.k_cache, p.k_block_scale, p.k_scale, at.b, place, h);
      continue;
    }
    Element* to = row_of<Element>(p.q_out, b, h, s);
    for (int i = lane; i < P::kHeadDim; i += 32) to[i] = from_float<Element>(row[i]);
    __syncwarp();
  }
}

}  // namespace flashjit::auxiliary
