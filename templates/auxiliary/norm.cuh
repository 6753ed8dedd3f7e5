// RMS norm of a head's row, in fp32.
#pragma once

#include "flashjit/auxiliary/append_params.cuh"
#include "flashjit/common/element.cuh"
#include "flashjit/common/ptx.cuh"

namespace flashjit::auxiliary {

template <class Element>
__device__ __forceinline__ float norm_weight(const NormParam& norm, int column) {
  return norm.fp32 ? static_cast<const float*>(norm.weight)[column]
                   : to_float(static_cast<const Element*>(norm.weight)[column]);
}

/// One over the root of a row's mean square. Each of kThreadsOfRow threads has two parts of the row. By all
/// kThreads of the CTA.
template <int kThreadsOfRow, int kThreads, int kCount>
__device__ __forceinline__ float part_of_row_norm(const NormParam& norm, int dim, const float (&x)[kCount],
                                                  const float (&y)[kCount]) {
  __shared__ float squares[kThreads];
  float own = 0.0f;
#pragma unroll
  for (int i = 0; i < kCount; ++i) own += x[i] * x[i] + y[i] * y[i];
  __syncthreads();
  squares[threadIdx.x] = own;
  __syncthreads();
  const int first = static_cast<int>(threadIdx.x) / kThreadsOfRow * kThreadsOfRow;
  float sum = 0.0f;
  for (int i = 0; i < kThreadsOfRow; ++i) sum += first + i < kThreads ? squares[first + i] : 0.0f;
  return 1.0f / sqrtf(sum / static_cast<float>(dim) + norm.eps);
}

/// Multiplies columns of a row by the factor and their weights.
template <class Element, int kCount>
__device__ __forceinline__ void normalize(const NormParam& norm, float factor, int column,
                                          float (&x)[kCount]) {
  if (norm.weight == nullptr) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] *= factor * norm_weight<Element>(norm, column + i);
}

/// The norm of a row in shared memory, by a warp.
template <class Element, int kDim>
__device__ __forceinline__ void normalize_row(const NormParam& norm, float* row, int lane) {
  if (norm.weight == nullptr) return;
  float sum = 0.0f;
  for (int i = lane; i < kDim; i += 32) sum += row[i] * row[i];
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(kWholeWarp, sum, lanes);
  const float factor = 1.0f / sqrtf(sum / static_cast<float>(kDim) + norm.eps);
  for (int i = lane; i < kDim; i += 32) row[i] *= factor * norm_weight<Element>(norm, i);
  __syncwarp();
}

}  // namespace flashjit::auxiliary
