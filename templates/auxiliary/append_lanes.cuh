// New rows of K and V without rotation, norm or scales of keys, from registers to the cache, a lane eight
// columns of four heads. An entry of its own, as rotation, norm and scales of keys take registers.
#pragma once

#include "flashjit/auxiliary/append.cuh"
#include "flashjit/auxiliary/encode_lanes.cuh"

namespace flashjit::auxiliary {

/// Finds a packed row's key. By a warp.
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

/// Heads that a warp has side by side; a lane has eight columns of one, and the same of three that follow.
template <class P>
constexpr int kLaneHeads = 32 / (P::kHeadDim / kLaneColumns);
/// A lane's columns, its first head, and how many of its four exist.
struct LanePart {
  int column, h, count;
};
/// Tensors of K or V.
struct LaneCache {
  const TensorParam& rows;
  const TensorParam& block_scales;
};

/// A cache without a format. A lane loads the scale of row lane % 4.
template <class P>
struct NoFormat {
  static constexpr bool kArgument = kScaledKv<P>;
  static constexpr int kBlock = 256;
};
template <class A, class B>
constexpr bool kSameFormat =
    A::kCode == B::kCode&& A::kZero == B::kZero&& A::kScaleType == B::kScaleType&& A::kHalves ==
    B::kHalves&& A::kApart == B::kApart&& A::kBlockScales == B::kBlockScales&& A::kArgument ==
    B::kArgument&& A::kBlock == B::kBlock&& A::kCodes == B::kCodes&& A::kBlockStep ==
    B::kBlockStep&& A::kScales == B::kScales&& A::kZeros == B::kZeros&& A::kScaleStep ==
    B::kScaleStep&& A::kZeroBits == B::kZeroBits&& A::kZeroStep == B::kZeroStep;
template <class P, bool kDecodes = kDecodesKv<P>>
struct LaneFormats {
  using K = NoFormat<P>;
  using V = K;
  static constexpr bool kSame = true;
};
template <class P>
struct LaneFormats<P, true> {
  using K = typename P::KFormat;
  using V = typename P::VFormat;
  static_assert(kEncodesByLanes<K> && kEncodesByLanes<V> && !K::kArgumentOfKeys);
  static constexpr bool kSame = kSameFormat<K, V>;
};

/// How a cache has rows: as elements; as codes with given scales; in a format. source(r) is where a lane's
/// columns of its row `r` come from; refill(r), in order, replaces `own[r]` by the next ones, and `scales`.
template <class P, class Format, bool kCodes = kScaledKv<P>, bool kDecodes = kDecodesKv<P>>
struct LaneStore {
  template <class Source, class Refill>
  static __device__ __forceinline__ void store(const LaneCache& cache, const LanePart& part, KeyPlace place,
                                               const float (&)[2], const uint4 (&own)[kLaneRows],
                                               const Source&, const Refill& refill) {
    auto* to = row_of<typename P::Element>(cache.rows, place.page, part.h, place.row) + part.column;
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r, to += cache.rows.stride_h * kLaneHeads<P>) {
      if (r < part.count) *reinterpret_cast<uint4*>(to) = own[r];
      refill(r);
    }
  }
};
template <class P, class Format>
struct LaneStore<P, Format, true, false> {
  using Code = typename P::KvElement;
  /// Multiplies by the reciprocal in two parts, as precise as a division. Where a number is not finite, or a
  /// quotient too large, some code is NaN: returns whether none is.
  static __device__ __forceinline__ bool codes_of(const float (&x)[kLaneColumns], float reciprocal,
                                                  float rest, unsigned (&words)[2]) {
    unsigned nan = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto of = [&](int n) { return fmaf(x[4 * i + n], reciprocal, x[4 * i + n] * rest); };
      words[i] = codes_of_four<Code>({of(0), of(1), of(2), of(3)});
      nan |= ((words[i] & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
    }
    return nan == 0;
  }
  template <class Source, class Refill>
  static __device__ __forceinline__ void store(const LaneCache& cache, const LanePart& part, KeyPlace place,
                                               const float (&scales)[2], const uint4 (&own)[kLaneRows],
                                               const Source& source, const Refill& refill) {
    constexpr bool kQuick = kLargestCode<Code> == kLargestCode<e4m3>;
    const int lane = lane_of_warp();
    const float scale = scales[0], reciprocal = 1.0f / scale,
                rest = fmaf(-scale, reciprocal, 1.0f) * reciprocal;
    const long long step = cache.rows.stride_h * kLaneHeads<P>;
    auto* to = row_of<Code>(cache.rows, place.page, part.h, place.row) + part.column;
    unsigned left = 0;  // rows with other numbers
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r, to += step) {
      const int from = lane - lane % 4 + r;
      float x[kLaneColumns];
      unpack_chunk<typename P::Element>(own[r], x);
      refill(r);
      unsigned words[2];
      if (!kQuick) {
        const float divisor = __shfl_sync(kWholeWarp, scale, from);
        if (r < part.count) store_codes(to, x, divisor);
      } else if (!codes_of(x, __shfl_sync(kWholeWarp, reciprocal, from), __shfl_sync(kWholeWarp, rest, from),
                           words)) {
        left |= 1u << r;
      } else if (r < part.count) {
        *reinterpret_cast<uint2*>(to) = uint2{words[0], words[1]};
      }
    }
    if (!kQuick || !__any_sync(kWholeWarp, left)) return;
    to = row_of<Code>(cache.rows, place.page, part.h, place.row) + part.column;
#pragma unroll 1
    for (int r = 0; r < kLaneRows; ++r) {
      const float divisor = __shfl_sync(kWholeWarp, scale, lane - lane % 4 + r);
      if (r >= part.count || (left >> r & 1u) == 0) continue;
#pragma unroll 1
      for (int i = 0; i < kLaneColumns; ++i)
        to[r * step + i] = from_float<Code>(to_float(source(r)[i]) / divisor);
    }
  }
};
/// Rows that lanes would store in more than two parts each are made in shared memory first, so that a row's
/// lanes can copy neighbouring words.
template <class Format>
constexpr bool kStagesRows =
    Format::kBlockScales && !Format::kApart && 2 * Format::kAlignment < (Format::kHalves ? 4 : Format::kBits);
template <class Unit, class Format, int kLanes>
__device__ __forceinline__ void copy_units(unsigned char* to, const unsigned char* from) {
  constexpr int kCount = Format::kBytes / static_cast<int>(sizeof(Unit));
  const int lane = lane_of_warp() % kLanes;
#pragma unroll
  for (int i = 0; i < kCount; i += kLanes)
    if (i + lane < kCount)
      reinterpret_cast<Unit*>(to)[i + lane] = reinterpret_cast<const Unit*>(from)[i + lane];
}
template <class Format, int kLanes>
__device__ __forceinline__ void copy_row(unsigned char* to, const unsigned char* from) {
  using Narrow = Conditional<Format::kAlignment == 1, unsigned char, unsigned short>;
  if (Format::kBytes % 4 == 0 && (reinterpret_cast<unsigned long long>(to) & 3u) == 0)
    copy_units<unsigned, Format, kLanes>(to, from);
  else
    copy_units<Narrow, Format, kLanes>(to, from);
}

template <class P, class Format, bool kCodes>
struct LaneStore<P, Format, kCodes, true> {
  static constexpr int kLanes = P::kHeadDim / kLaneColumns, kPitch = (Format::kBytes + 15) / 16 * 16 + 4;
  template <class Source, class Refill>
  static __device__ __forceinline__ void store(const LaneCache& cache, const LanePart& part, KeyPlace place,
                                               const float (&scales)[2], const uint4 (&own)[kLaneRows],
                                               const Source&, const Refill& refill) {
    using Bytes = unsigned char*;
    const auto first = [&] {
      return reinterpret_cast<Bytes>(
          row_of<typename Format::Stored>(cache.rows, place.page, part.h, place.row));
    };
    const long long step = cache.rows.stride_h * kLaneHeads<P>;
    if (kStagesRows<Format>) {
      __shared__ __align__(16) unsigned char staged[4][kLaneRows * kLaneHeads<P>][kPitch];
      const Bytes mine = staged[threadIdx.x / 32][lane_of_warp() / kLanes];
      constexpr int kStep = kLaneHeads<P> * kPitch;
      encode_rows<typename P::Element, Format>(own, part.column, scales,
                                               {mine, mine, kStep, kStep, part.count}, refill);
      __syncwarp();
      Bytes to = first();
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r, to += step)
        if (r < part.count) copy_row<Format, kLanes>(to, mine + r * kStep);
      __syncwarp();
      return;
    }
    const Bytes to = first();
    LaneRows rows{to, to, step, step, part.count};
    if (Format::kApart) {
      using Scale = typename Format::StoredScale;
      rows.scales = reinterpret_cast<Bytes>(row_of<Scale>(cache.block_scales, place.page, part.h, place.row));
      rows.scale_step = cache.block_scales.stride_h * (kLaneHeads<P> * static_cast<long long>(sizeof(Scale)));
    }
    encode_rows<typename P::Element, Format>(own, part.column, scales, rows, refill);
  }
};

/// A new row by each warp of 128 threads where there are fewer blocks than rows, else by a block. Its first
/// heads' rows and scales are read before anything is known of their place. Rows are left out as append()
/// does.
template <class P>
__device__ void append_lanes(const AppendParams& p) {
  using Element = typename P::Element;
  using K = typename LaneFormats<P>::K;
  using V = typename LaneFormats<P>::V;
  static_assert(sizeof(Element) == 2 && P::kHeadDim == P::kHeadDimV && !P::kSharedKv);
  constexpr int kLanes = P::kHeadDim / kLaneColumns, kHeads = kLaneHeads<P>, kStep = kLaneRows * kHeads;
  const int all = P::kVarlen ? p.rows : p.batch * p.rows;
  const bool of_warp = static_cast<int>(gridDim.x) < all;
  const int block = static_cast<int>(blockIdx.x), warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = lane_of_warp(), row = of_warp ? block * 4 + warp : block;
  if (row >= all) return;
  const int b = P::kVarlen ? 0 : row / p.rows, s = P::kVarlen ? row : row - b * p.rows;
  const bool named = p.slots != nullptr;
  const int steps = (p.heads_kv + kStep - 1) / kStep;  // of K, and of V
  const auto part_of = [&](int step) {
    const int h = (step < steps ? step : step - steps) * kStep + lane / kLanes;
    return LanePart{lane % kLanes * kLaneColumns, h, (p.heads_kv - h + kHeads - 1) / kHeads};
  };
  uint4 own[kLaneRows];
  const auto source_of = [&](int step, int r) {
    const LanePart part = part_of(step);
    return row_of<Element>(step < steps ? p.k : p.v, b, part.h + r * kHeads, s) + part.column;
  };
  const Element* from;  // what `load` reads next
  long long from_step;
  int from_count;
  const auto load_from = [&](int step, bool exists) {
    from = source_of(step, 0), from_step = (step < steps ? p.k : p.v).stride_h * kHeads;
    from_count = exists ? part_of(step).count : 0;
  };
  const auto load = [&](int r) {
    if (r < from_count) own[r] = *reinterpret_cast<const uint4*>(from);
    from += from_step;
  };
  float scales[2] = {1.0f, 1.0f};  // of the lane's own rows
  const auto load_scales = [&](int step, int sequence) {
    const bool is_k = step < steps;
    if (!(is_k ? K::kArgument : V::kArgument)) return;
    const int count = is_k ? kOwnScales<K> : kOwnScales<V>;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (const int row = count == 1 ? lane % 4 : lane % 2 + 2 * i; i < count)
        scales[i] = *scale_at(is_k ? p.k_scale : p.v_scale, sequence, {0, 0},
                              min(part_of(step).h + row * kHeads, p.heads_kv - 1));
  };
  int step = of_warp ? 0 : warp;
  const int stride = of_warp ? 1 : 4, end = 2 * steps;
  if (step >= end) return;
  load_from(step, true);
#pragma unroll
  for (int r = 0; r < kLaneRows; ++r) own[r] = uint4{}, load(r);
  if (!P::kVarlen) load_scales(step, named ? 0 : b);
  const NewKey at = named ? NewKey{0, 0} : new_key_of_warp<P>(p, row);
  const KeyPlace place = named ? place_of_slot(p, row) : place_of_key<P>(p, at);
  if (place.page < 0) return;
  if (P::kVarlen) load_scales(step, at.b);
#pragma unroll 1
  for (; step < end; step += stride) {
    const bool is_k = step < steps;
    const auto source = [&](int r) { return source_of(step, r); };
    const auto refill = [&](int r) {
      const bool more = step + stride < end;
      const int next = more ? step + stride : step;
      if (r == 0) load_from(next, more);
      load(r);
      if (r == 0 && more) load_scales(next, at.b);
    };
    const LaneCache cache{is_k ? p.k_cache : p.v_cache, is_k ? p.k_block_scale : p.v_block_scale};
    if (LaneFormats<P>::kSame || is_k)
      LaneStore<P, K>::store(cache, part_of(step), place, scales, own, source, refill);
    else
      LaneStore<P, V>::store(cache, part_of(step), place, scales, own, source, refill);
  }
}

}  // namespace flashjit::auxiliary
