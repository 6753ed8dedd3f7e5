// O and the gradients in global memory: elements of Q's type, or fp32 where that is asked for.
#pragma once

#include "flashjit/common/element.cuh"
#include "flashjit/common/ptx.cuh"

namespace flashjit {

template <class P>
using OutElement = Conditional<P::kFp32Out, float, typename P::Element>;
/// The element of dQ, dK and dV.
template <class P>
using GradElement = Conditional<P::kFp32Grads, float, typename P::Element>;

/// Stores two columns of a row.
__device__ __forceinline__ void store_pair(float* to, float x, float y) {
  *reinterpret_cast<float2*>(to) = float2{x, y};
}
template <class Element>
__device__ __forceinline__ void store_pair(Element* to, float x, float y) {
  *reinterpret_cast<unsigned*>(to) = pack<Element>(x, y);
}

/// Elements of O in 16 bytes.
template <class P>
constexpr int kOutVector = 16 / static_cast<int>(sizeof(OutElement<P>));

__device__ __forceinline__ float4 add_columns(const float4& a, const float4& b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}
/// Stores four columns of a row, of elements, or fp32.
template <class Element>
__device__ __forceinline__ void store_columns(Element* to, float4 x) {
  if constexpr (sizeof(Element) == 4)
    store_global(
        to, uint4{__float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(x.z), __float_as_uint(x.w)});
  else
    store_global(to, uint2{pack<Element>(x.x, x.y), pack<Element>(x.z, x.w)});
}

}  // namespace flashjit
