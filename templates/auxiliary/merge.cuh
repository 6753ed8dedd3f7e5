// Partial states over disjoint keys: LSE = log(sum of exp(LSE_i)), O = sum of exp(LSE_i - LSE) O_i.
#pragma once

#include "flashjit/auxiliary/append_params.cuh"
#include "flashjit/common/chunk.cuh"
#include "flashjit/common/ptx.cuh"

namespace flashjit::auxiliary {

__device__ __forceinline__ float* lse_at(const RowsParam& lse, int b, int h, int s) {
  return lse.data + b * lse.stride_b + h * lse.stride_h + s * lse.stride_s;
}

template <class Element>
__device__ __forceinline__ void load_dims(const void* row, int chunk, float (&x)[kMergedDims]) {
  const uint4* from = static_cast<const uint4*>(row);
  if constexpr (sizeof(Element) == 4) {
    float low[4], high[4];
    unpack_chunk<float>(from[2 * chunk], low), unpack_chunk<float>(from[2 * chunk + 1], high);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = low[i], x[4 + i] = high[i];
  } else {
    unpack_chunk<Element>(from[chunk], x);
  }
}

template <class Element>
__device__ __forceinline__ void store_dims(void* row, int chunk, const float (&x)[kMergedDims]) {
  uint4* to = static_cast<uint4*>(row);
  if constexpr (sizeof(Element) == 4) {
    to[2 * chunk] = pack_chunk<float>({x[0], x[1], x[2], x[3]});
    to[2 * chunk + 1] = pack_chunk<float>({x[4], x[5], x[6], x[7]});
  } else {
    to[chunk] = pack_chunk<Element>(x);
  }
}

/// A thread for 8 dimensions of one row.
template <class P>
__device__ void merge(const MergeParams& p) {
  using Element = typename P::Element;
  constexpr int kChunks = P::kHeadDimV / kMergedDims;
  const long long at = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int row = static_cast<int>(at / kChunks), chunk = static_cast<int>(at % kChunks);
  if (at >= static_cast<long long>(p.batch) * p.heads * p.seqlen * kChunks) return;
  const int s = row % p.seqlen, h = row / p.seqlen % p.heads, b = row / p.seqlen / p.heads;

  float lse[kMaxPartialStates], highest = -infinity(), sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kMaxPartialStates; ++i) {
    lse[i] = i < p.count ? *lse_at(p.lse[i], b, h, s) : -infinity();
    highest = fmaxf(highest, lse[i]);
  }
  const float shift = highest == -infinity() ? 0.0f : highest;
#pragma unroll
  for (int i = 0; i < kMaxPartialStates; ++i) sum += expf(lse[i] - shift);
  const float all = sum == 0.0f ? 1.0f : sum;

  float o[kMergedDims] = {};
#pragma unroll
  for (int i = 0; i < kMaxPartialStates; ++i) {
    if (i >= p.count || lse[i] == -infinity()) continue;  // whose O may be anything
    const float weight = expf(lse[i] - shift) / all;
    float x[kMergedDims];
    if (p.fp32_parts)
      load_dims<float>(row_of<float>(p.o[i], b, h, s), chunk, x);
    else
      load_dims<Element>(row_of<Element>(p.o[i], b, h, s), chunk, x);
#pragma unroll
    for (int d = 0; d < kMergedDims; ++d) o[d] = fmaf(weight, x[d], o[d]);
  }
  if (p.fp32_out)
    store_dims<float>(row_of<float>(p.out, b, h, s), chunk, o);
  else
    store_dims<Element>(row_of<Element>(p.out, b, h, s), chunk, o);
  if (p.lse_out.data != nullptr && chunk == 0)
    *lse_at(p.lse_out, b, h, s) = sum == 0.0f ? -infinity() : shift + logf(sum);
}

}  // namespace flashjit::auxiliary
