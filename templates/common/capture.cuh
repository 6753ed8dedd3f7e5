// Captured tensors: reads that never leave the tensor, and additions to their gradients. The conversions to
// float are those of element.cuh, found by the element's namespace.
#pragma once

#include "flashjit/common/int_math.cuh"
#include "flashjit/common/params.cuh"
#include "flashjit/common/types.cuh"

namespace flashjit {

__device__ __forceinline__ long long load_element(const long long* at) { return __ldg(at); }
__device__ __forceinline__ float load_element(const float* at) { return __ldg(at); }
__device__ __forceinline__ int load_element(const int* at) { return __ldg(at); }
__device__ __forceinline__ int load_element(const short* at) { return __ldg(at); }
__device__ __forceinline__ int load_element(const signed char* at) { return __ldg(at); }
__device__ __forceinline__ int load_element(const unsigned char* at) { return __ldg(at); }
__device__ __forceinline__ bool load_element(const bool* at) {
  return __ldg(reinterpret_cast<const unsigned char*>(at)) != 0;
}
template <class Half>
__device__ __forceinline__ Half load_element(const Half* at) {
  return {__ldg(reinterpret_cast<const unsigned short*>(at))};
}

/// As programs see an element: floats as float, ints as int (int64 saturates), booleans as bool.
__device__ __forceinline__ float as_read(float x) { return x; }
__device__ __forceinline__ int as_read(int x) { return x; }
__device__ __forceinline__ bool as_read(bool x) { return x; }
__device__ __forceinline__ int as_read(long long x) { return saturate_int(x); }
template <class Half>
__device__ __forceinline__ float as_read(Half x) {
  return to_float(x);
}

__device__ __forceinline__ int clamped_index(int index, int size) { return max(min(index, size - 1), 0); }

/// Where an index was computed; -1: at any.
struct ReadPlace {
  int b, h, q, kv;
};

/// A debug mode: tells of each index that is clamped, where `exists` says that the read is wanted.
template <class... Indices>
__device__ __noinline__ void check_indices(bool exists, ReadPlace at, const char* name,
                                           const CaptureParam& tensor, Indices... indices) {
  const int index[] = {indices...};
  for (int i = 0; exists && i < static_cast<int>(sizeof...(indices)); ++i) {
    if (index[i] >= 0 && index[i] < tensor.size[i]) continue;
    printf(
        "flashjit: index %d of dimension %d of the captured tensor '%s' is not in [0, %d) at b %d, h %d, q "
        "%d, "
        "kv %d; it is clamped\n",
        index[i], i, name, tensor.size[i], at.b, at.h, at.q, at.kv);
  }
}

/// tensor[indices...], with each index clamped into the tensor.
template <class Element, class... Indices>
__device__ __forceinline__ auto read_capture(const CaptureParam& tensor, Indices... indices) {
  const int index[] = {indices...};
  long long at = 0;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof...(indices)); ++i)
    at += clamped_index(index[i], tensor.size[i]) * tensor.stride[i];
  return as_read(load_element(static_cast<const Element*>(tensor.data) + at));
}

/// Where the gradient of tensor[indices...] is; the gradient is contiguous.
template <class... Indices>
__device__ __forceinline__ float* capture_grad(const CaptureParam& tensor, Indices... indices) {
  const int index[] = {indices...};
  long long at = 0;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof...(indices)); ++i)
    at = at * tensor.size[i] + clamped_index(index[i], tensor.size[i]);
  return tensor.grad + at;
}

/// Adds to the gradients of captures in any order.
struct AtomicAddition {
  __device__ __forceinline__ void operator()(float* at, float value) const { atomicAdd(at, value); }
};

}  // namespace flashjit
