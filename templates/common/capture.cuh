// Captured tensors: reads that never leave the tensor, and additions to their gradients. Conversions to float
// are in element.cuh, found by argument-dependent lookup.
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

/// As programs see an element: floats as float, ints as int or long long, booleans as bool.
__device__ __forceinline__ float as_read(float x) { return x; }
__device__ __forceinline__ int as_read(int x) { return x; }
__device__ __forceinline__ bool as_read(bool x) { return x; }
__device__ __forceinline__ long long as_read(long long x) { return x; }
template <class Half>
__device__ __forceinline__ float as_read(Half x) {
  return to_float(x);
}

__device__ __forceinline__ int clamped_index(int index, int size) { return max(min(index, size - 1), 0); }

/// The position at which an index was computed; -1: any.
struct ReadPosition {
  int b, h, q, kv;
};

/// A debug mode: prints each index that is clamped. `exists`: whether the pair that reads exists.
template <class... Indices>
__device__ __noinline__ void check_indices(bool exists, ReadPosition at, const char* name,
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

/// A bias tile's source: the last two dimensions of a captured tensor of 16-bit elements. The pair (q, kv)
/// has the element at row q + q_shift and column kv + kv_shift, clamped.
struct BiasTile {
  const unsigned short* first;
  long long stride_q, stride_kv;
  int size_q, size_kv, q_shift, kv_shift;
  int leading[2];  ///< the other indices, the last first; 0 where there is none, or the stride is

  /// Whether every pair of so many queries and keys has an element of its own.
  __device__ __forceinline__ bool holds(int queries, int keys) const {
    const auto within = [](int shift, int count, int size) { return shift >= 0 && shift <= size - count; };
    return within(q_shift, queries, size_q) && within(kv_shift, keys, size_kv);
  }
  /// The elements of a query, and the index of a key's among them.
  __device__ __forceinline__ const unsigned short* row(int q) const {
    return first + clamped_index(wrap_add(q, q_shift), size_q) * stride_q;
  }
  __device__ __forceinline__ long long column(int kv) const {
    return clamped_index(wrap_add(kv, kv_shift), size_kv) * stride_kv;
  }
};

/// tensor[indices..., :, :].
template <class... Indices>
__device__ __forceinline__ BiasTile bias_tile_of(const CaptureParam& tensor, int q_shift, int kv_shift,
                                                 Indices... indices) {
  constexpr int kLeading = sizeof...(Indices);
  const int index[] = {indices..., 0};
  BiasTile bias = {static_cast<const unsigned short*>(tensor.data) + offset_of(tensor, indices...),
                   tensor.stride[kLeading],
                   tensor.stride[kLeading + 1],
                   tensor.size[kLeading],
                   tensor.size[kLeading + 1],
                   q_shift,
                   kv_shift,
                   {0, 0}};
#pragma unroll
  for (int i = 0; i < kLeading; ++i)
    if (tensor.stride[i] != 0) bias.leading[kLeading - 1 - i] = clamped_index(index[i], tensor.size[i]);
  return bias;
}

/// A captured tensor of 16-bit elements as a tile of O reads it: the element of query q and a column of O
/// reads row q + q_shift at the same column.
struct OutModTile {
  const unsigned short* first;
  long long stride_q, stride_column;
  int size_q, columns, q_shift;

  /// Whether each element of so many queries has one of its own, and rows begin where 16 bytes may be read.
  __device__ __forceinline__ bool holds(int queries, int head_dim_v) const {
    return stride_column == 1 && columns >= head_dim_v && q_shift >= 0 && q_shift <= size_q - queries &&
           (reinterpret_cast<unsigned long long>(first) % 16 | stride_q % 8) == 0;
  }
  __device__ __forceinline__ const unsigned short* row(int q) const {
    return first + clamped_index(wrap_add(q, q_shift), size_q) * stride_q;
  }
  __device__ __forceinline__ long long column(int at) const {
    return clamped_index(at, columns) * stride_column;
  }
};

/// tensor[indices..., :]; index kQ is 0 and stands for q.
template <int kQ, class... Indices>
__device__ __forceinline__ OutModTile out_mod_tile_of(const CaptureParam& tensor, int q_shift,
                                                      Indices... indices) {
  constexpr int kColumn = sizeof...(Indices);
  return {static_cast<const unsigned short*>(tensor.data) + offset_of(tensor, indices...),
          tensor.stride[kQ],
          tensor.stride[kColumn],
          tensor.size[kQ],
          tensor.size[kColumn],
          q_shift};
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

/// Like OutModTile, for its gradient, to which each element of O adds its own.
struct OutModTileGrad {
  float* first;
  long long stride_q;
  bool own;  ///< no index of b and h is clamped
  int q_shift;

  __device__ __forceinline__ float* row(int q) const { return first + (q + q_shift) * stride_q; }
};
/// The gradient of tensor[indices..., :], a tensor of four dimensions, b and h among them.
template <int kQ>
__device__ __forceinline__ OutModTileGrad out_mod_tile_grad_of(const CaptureParam& tensor, int q_shift, int i,
                                                               int j, int k) {
  long long stride_q = 1;
#pragma unroll
  for (int n = kQ + 1; n < 4; ++n) stride_q *= tensor.size[n];
  const int index[] = {i, j, k};
  bool own = true;
#pragma unroll
  for (int n = 0; n < 3; ++n) own = own && index[n] < tensor.size[n];
  return {capture_grad(tensor, i, j, k, 0), stride_q, own, q_shift};
}

/// Like BiasTile, for the gradients of the pairs' elements.
struct BiasTileGrad {
  float* first;
  int size_q, size_kv, q_shift, kv_shift;

  /// Whether the gradients of any four keys from a multiple of four on are 16 aligned bytes.
  __device__ __forceinline__ bool in_fours(int keys) const {
    return (reinterpret_cast<unsigned long long>(first) % 16 | (size_kv | kv_shift) % 4) == 0 &&
           kv_shift >= 0 && kv_shift <= size_kv - keys;
  }
  __device__ __forceinline__ float* of_pair(int q, int kv) const {
    return first + static_cast<long long>(clamped_index(wrap_add(q, q_shift), size_q)) * size_kv +
           clamped_index(wrap_add(kv, kv_shift), size_kv);
  }
};

/// The gradients of tensor[indices..., :, :].
template <class... Indices>
__device__ __forceinline__ BiasTileGrad bias_tile_grad_of(const CaptureParam& tensor, int q_shift,
                                                          int kv_shift, Indices... indices) {
  constexpr int kLeading = sizeof...(Indices);
  return {capture_grad(tensor, indices..., 0, 0), tensor.size[kLeading], tensor.size[kLeading + 1], q_shift,
          kv_shift};
}

}  // namespace flashjit
