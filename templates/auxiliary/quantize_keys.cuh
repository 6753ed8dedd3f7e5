// Rows of K in a format whose keys share scales (KIVI's K), a group of keys at a time.
#pragma once

#include "flashjit/auxiliary/quantize.cuh"

namespace flashjit::auxiliary {

/// What a thread finds of its columns, key by key.
template <class Format>
struct KeyExtremes {
  static constexpr int kThreads = kQuantizedRows * 32;
  static constexpr int kOwn = (Format::kColumns + kThreads - 1) / kThreads;
  BlockExtremes found[kOwn];

  static __device__ __forceinline__ int column(int own) {
    return own * kThreads + static_cast<int>(threadIdx.x);
  }
  __device__ __forceinline__ void begin() {
#pragma unroll
    for (BlockExtremes& of : found)
      of = {0.0f, 0, __uint_as_float(0x7f800000u), __uint_as_float(0xff800000u), true};
  }
  __device__ __forceinline__ void add(const float* row) {
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      if (column(own) >= Format::kColumns) continue;
      const float x = row[column(own)];
      BlockExtremes& of = found[own];
      if (fabsf(x) > fabsf(of.extreme)) of.extreme = x;
      of.low = fminf(of.low, x), of.high = fmaxf(of.high, x);
      of.finite = of.finite && fabsf(x) <= 3.402823466e38f;
    }
  }
};

/// One CTA of 128 threads for a group of keys of a head; grid: batch * heads * groups. The rows are read
/// twice: for the scales of their columns, and for their codes.
template <class P>
__device__ void quantize_keys(const QuantizeParams& p) {
  using Format = typename P::KFormat;
  using Extremes = KeyExtremes<Format>;
  __shared__ float rows[kQuantizedRows][P::kHeadDim];
  __shared__ KvQuantizer quantizers[Format::kColumns];
  const int groups = p.rows / Format::kKeys, group = static_cast<int>(blockIdx.x) % groups;
  const int head = static_cast<int>(blockIdx.x) / groups, b = head / p.heads, h = head % p.heads;
  if (b >= p.batch) return;
  const int warp = threadIdx.x / 32, first = group * Format::kKeys;
  const auto load_rows = [&](int n) {
    __syncthreads();
    load_row<P>(p, {b, h, first + n + warp, true}, rows[warp]);
    __syncthreads();
  };
  Extremes extremes;
  extremes.begin();
#pragma unroll 1
  for (int n = 0; n < Format::kKeys; n += kQuantizedRows) {
    load_rows(n);
#pragma unroll 1
    for (int i = 0; i < kQuantizedRows; ++i) extremes.add(rows[i]);
  }
  auto* scales =
      reinterpret_cast<unsigned char*>(row_of<typename Format::StoredScale>(p.block_scale, b, h, group));
#pragma unroll
  for (int own = 0; own < Extremes::kOwn; ++own) {
    const int column = Extremes::column(own);
    if (column < Format::kColumns)
      quantizers[column] = quantizer_for<Format>(extremes.found[own], 1.0f, true,
                                                 scales + Format::kScales + column * Format::kScaleStep,
                                                 scales + Format::kZeros + column * Format::kScaleStep);
  }
  if (Format::kZeroBits > 0) {
    __syncthreads();
    store_zeros<Format>(quantizers, Format::kColumns, static_cast<int>(threadIdx.x), Extremes::kThreads,
                        scales);
  }
#pragma unroll 1
  for (int n = 0; n < Format::kKeys; n += kQuantizedRows) {
    load_rows(n);
    auto* to = row_of<unsigned char>(p.codes, b, h, first + n + warp);
    for (int byte = threadIdx.x % 32; byte < Format::kColumns * Format::kBits / 8; byte += 32)
      to[byte] = static_cast<unsigned char>(byte_of_codes<Format>(
          byte, [&](int column) { return code_by<Format>(quantizers[column], rows[warp][column]); }));
    store_tail<Format>(rows[warp], to);
  }
}

}  // namespace flashjit::auxiliary
