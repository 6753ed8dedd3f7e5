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

/// Where tensor[indices...] begins, with each index clamped into the tensor.
template <class... Indices>
__device__ __forceinline__ long long offset_of(const CaptureParam& tensor, Indices... indices) {
  const int index[] = {indices..., 0};
  long long at = 0;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof...(indices)); ++i)
    at += clamped_index(index[i], tensor.size[i]) * tensor.stride[i];
  return at;
}

/// tensor[indices...].
template <class Element, class... Indices>
__device__ __forceinline__ auto read_capture(const CaptureParam& tensor, Indices... indices) {
  return as_read(load_element(static_cast<const Element*>(tensor.data) + offset_of(tensor, indices...)));
}

/// A row of a captured tensor of 16-bit elements: with key kv goes the element at kv + shift, clamped.
struct CaptureRow {
  const unsigned short* first;
  long long stride;
  int size, shift;
};

/// The row tensor[indices..., :].
template <class... Indices>
__device__ __forceinline__ CaptureRow row_of(const CaptureParam& tensor, int shift, Indices... indices) {
  constexpr int kLast = sizeof...(Indices);
  return {static_cast<const unsigned short*>(tensor.data) + offset_of(tensor, indices...),
          tensor.stride[kLast], tensor.size[kLast], shift};
}

/// Word i: the elements that go with keys kv + 8 i and kv + 8 i + 1, the first in the lower half. By whole
/// warps.
template <int kCount>
__device__ __forceinline__ void read_pairs(unsigned (&words)[kCount], const CaptureRow& row, int kv) {
  const int first = wrap_add(kv, row.shift);
  const unsigned short* at = row.first + first;
  const bool in_words = row.stride == 1 && first >= 0 && first <= row.size - (kCount * 8 - 6) &&
                        reinterpret_cast<unsigned long long>(at) % 4 == 0;
  if (__all_sync(0xffffffffu, in_words)) {
    // Volatile: they begin here, although the first use is behind a wait.
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(words[i]) : "l"(at + i * 8));
    return;
  }
  const auto element = [&](int i) -> unsigned {
    return __ldg(row.first + clamped_index(wrap_add(first, i), row.size) * row.stride);
  };
  // Some at a time, to be short.
  constexpr int kSome = 4;
#pragma unroll 1
  for (int some = 0; some < kCount; some += kSome) {
    unsigned found[kSome];
#pragma unroll
    for (int i = 0; i < kSome; ++i) found[i] = element((some + i) * 8) | element((some + i) * 8 + 1) << 16;
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (i / kSome * kSome == some) words[i] = found[i % kSome];
  }
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
