// Rows of tensors, 16 bytes at a time, as floats.
#pragma once

#include "flashjit/common/element.cuh"

namespace flashjit {

/// A row of a tensor.
template <class Element>
__device__ __forceinline__ Element* row_of(const TensorParam& tensor, int b, int h, int s) {
  return static_cast<Element*>(tensor.data) + b * tensor.stride_b + h * tensor.stride_h + s * tensor.stride_s;
}

/// Elements in 16 bytes.
template <class Element>
constexpr int kChunk = 16 / static_cast<int>(sizeof(Element));

template <class Element>
__device__ __forceinline__ void unpack_chunk(uint4 words, float (&x)[kChunk<Element>]) {
  const unsigned all[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(Element) == 4)
      x[i] = __uint_as_float(all[i]);
    else
      x[2 * i] = low_of<Element>(all[i]), x[2 * i + 1] = high_of<Element>(all[i]);
  }
}

template <class Element>
__device__ __forceinline__ uint4 pack_chunk(const float (&x)[kChunk<Element>]) {
  unsigned all[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(Element) == 4)
      all[i] = __float_as_uint(x[i]);
    else
      all[i] = pack<Element>(x[2 * i], x[2 * i + 1]);
  }
  return {all[0], all[1], all[2], all[3]};
}

}  // namespace flashjit
