// A tensor as codes of 8 bits times scales, such that the largest element of what shares a scale becomes the
// largest code: three entries, one after the other. Q and K may be rotated before: by their positions (RoPE),
// and by an orthogonal matrix, which leaves Q K^T alone and spreads outliers over the dimensions.
#pragma once

#include "flashjit/auxiliary/append_params.cuh"
#include "flashjit/auxiliary/encode_row.cuh"
#include "flashjit/auxiliary/hadamard.cuh"
#include "flashjit/auxiliary/rope.cuh"
#include "flashjit/common/chunk.cuh"
#include "flashjit/common/ptx.cuh"

namespace flashjit::auxiliary {

/// A row of the tensor, by a warp.
struct QuantizedRow {
  int b, h, s;
  bool exists;
};
__device__ __forceinline__ QuantizedRow row_of_warp(const QuantizeParams& p) {
  const long long row = static_cast<long long>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  const long long head = row / p.rows;
  return {static_cast<int>(head / p.heads), static_cast<int>(head % p.heads), static_cast<int>(row % p.rows),
          head < static_cast<long long>(p.batch) * p.heads};
}

__device__ __forceinline__ float* scale_of_row(const QuantizeParams& p, const QuantizedRow& at) {
  return p.scale.data + at.b * p.scale.stride_b + at.h / p.heads_of_scale * p.scale.stride_h +
         at.s * p.scale.stride_s;
}

/// Turns the pairs of a row by its position's angles, if it has any.
template <class P>
__device__ __forceinline__ void rotate_by_position(const QuantizeParams& p, const QuantizedRow& at,
                                                   float* row, int lane) {
  const RopeParam& rope = p.rope;
  const RowPositions positions(rope, at.b * p.rows + at.s, at.s);
  if (positions.have_angles(rope)) rotate_row<typename P::Element>(rope, positions, row, lane);
}

/// Fills a warp's row with the elements to quantize.
template <class P>
__device__ __forceinline__ void load_row(const QuantizeParams& p, const QuantizedRow& at, float* row) {
  using Element = typename P::Element;
  constexpr int kElements = kChunk<Element>;
  const int lane = threadIdx.x % 32;
  const auto* from = reinterpret_cast<const uint4*>(row_of<Element>(p.x, at.b, at.h, at.s));
  for (int chunk = lane; chunk < P::kHeadDim / kElements; chunk += 32) {
    float x[kElements];
    unpack_chunk<Element>(from[chunk], x);
#pragma unroll
    for (int i = 0; i < kElements; ++i) row[chunk * kElements + i] = x[i];
  }
  __syncwarp();
  if (p.rope.pairs > 0) rotate_by_position<P>(p, at, row, lane);
  if (p.hadamard) rotate_by_hadamard<P::kHeadDim>(row, lane);
}

/// The largest magnitude that a scale of 1 allows.
template <class P, bool kDecodes = kDecodesKv<P>>
struct LargestElement {
  static constexpr float kValue = kLargestCode<typename P::KvElement>;
};
template <class P>
struct LargestElement<P, true> {
  static constexpr float kValue = P::KFormat::kLargestWithArgument;
};

/// What a warp's row asks of its scale; NaN where it has one, as bits of floats that are not negative grow as
/// these do.
template <class P>
__device__ __forceinline__ float scale_for(const float* row) {
  int largest = 0;
  for (int i = threadIdx.x % 32; i < P::kHeadDim; i += 32)
    largest = max(largest, __float_as_int(fabsf(row[i])));
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2)
    largest = max(largest, __shfl_xor_sync(kWholeWarp, largest, lanes));
  return __int_as_float(largest) / LargestElement<P>::kValue;
}

constexpr int kQuantizedRows = 4;  // of a CTA of 128 threads

/// Clears the scales that rows share. Where there is no row they are 1.
template <class P>
__device__ void clear_scales(const QuantizeParams& p) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (p.scale_of_row || i >= p.scales_b * p.scales_h) return;
  const bool any = p.batch > 0 && p.heads > 0 && p.rows > 0;
  p.scale.data[i / p.scales_h * p.scale.stride_b + i % p.scales_h * p.scale.stride_h] = any ? 0.0f : 1.0f;
}

/// Raises them to what each row asks for.
template <class P>
__device__ void find_scales(const QuantizeParams& p) {
  __shared__ float rows[kQuantizedRows][P::kHeadDim];
  const QuantizedRow at = row_of_warp(p);
  if (p.scale_of_row || !at.exists) return;
  float* row = rows[threadIdx.x / 32];
  load_row<P>(p, at, row);
  const float scale = scale_for<P>(row);
  if (threadIdx.x % 32 == 0) atomicMax(reinterpret_cast<int*>(scale_of_row(p, at)), __float_as_int(scale));
}

/// Divides each row by its scale. Where that is 0 all that share it are zeros; it becomes 1.
template <class P>
__device__ void quantize(const QuantizeParams& p) {
  using Code = typename P::KvElement;
  __shared__ float rows[kQuantizedRows][P::kHeadDim];
  const QuantizedRow at = row_of_warp(p);
  if (!at.exists) return;
  const int lane = threadIdx.x % 32;
  float *row = rows[threadIdx.x / 32], *scale = scale_of_row(p, at);
  load_row<P>(p, at, row);
  const float found = p.scale_of_row ? scale_for<P>(row) : *scale, divisor = found == 0.0f ? 1.0f : found;
  __syncwarp();
  if (lane == 0 && (p.scale_of_row || found == 0.0f)) *scale = divisor;
  auto* to = reinterpret_cast<unsigned*>(row_of<Code>(p.codes, at.b, at.h, at.s));
  for (int four = lane; four < P::kHeadDim / 4; four += 32) {
    unsigned word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      word |= static_cast<unsigned>(from_float<Code>(row[four * 4 + i] / divisor).bits) << (i * 8);
    to[four] = word;
  }
}

/// The same of a format whose rows are encoded. Their scale is read, or each row's own.
template <class P>
__device__ void quantize_rows(const QuantizeParams& p) {
  using Format = typename P::KFormat;
  __shared__ float rows[kQuantizedRows][P::kHeadDim];
  __shared__ RowEncoder<Format> encoders[kQuantizedRows];
  const QuantizedRow at = row_of_warp(p);
  if (!at.exists) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  load_row<P>(p, at, rows[warp]);
  float argument = 1.0f;
  if (Format::kArgument) {
    float* scale = scale_of_row(p, at);
    const float found = p.scale_of_row ? scale_for<P>(rows[warp]) : *scale;
    argument = found == 0.0f ? 1.0f : found;
    __syncwarp();
    if (lane == 0 && (p.scale_of_row || found == 0.0f)) *scale = argument;
  }
  auto* to = row_of<unsigned char>(p.codes, at.b, at.h, at.s);
  unsigned char* scales = to;
  if (Format::kApart)
    scales = reinterpret_cast<unsigned char*>(
        row_of<typename Format::StoredScale>(p.block_scale, at.b, at.h, at.s));
  encoders[warp].encode(rows[warp], argument, to, scales);
}

}  // namespace flashjit::auxiliary
