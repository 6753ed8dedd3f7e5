// What the elements of O, or of rows of Q or K, add to gradients of captured tensors.
#pragma once

#include "flashjit/common/capture_grads.cuh"
#include "flashjit/common/ptx.cuh"

namespace flashjit::auxiliary {

/// A lane's additions, `kCount` for each of its elements: successive ones to one element are summed first.
/// Where columns share the element, a warp's are.
template <int kCount>
class ElementGradSums {
 public:
  template <class Which>
  __device__ __forceinline__ void add(Which which, float* at, float value) {
    if (!which.kByColumn) {
#pragma unroll
      for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(kWholeWarp, value, lanes);
      if (threadIdx.x % 32 != 0) return;
    }
    Sum& sum = sums_[which.kIndex];
    if (sum.at != at) {
      add_to_memory(sum.at, sum.value);
      sum = {at, 0.0f};
    }
    sum.value += value;
  }
  __device__ __forceinline__ void end() {
#pragma unroll
    for (const Sum& sum : sums_) add_to_memory(sum.at, sum.value);
  }
  /// The same by whole CTAs of 128 threads, whose warps mostly add to the same elements.
  __device__ __forceinline__ void end_of_cta() {
    if (kCount == 0) return;
    __shared__ float* places[4][32];
    __shared__ float values[4][32];
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (Sum& sum : sums_) {
      __syncthreads();  // the last sum's are read
      places[warp][lane] = sum.at, values[warp][lane] = sum.value;
      __syncthreads();
      if (warp > 0) continue;
      for (int other = 1; other < 4; ++other) {
        if (places[other][lane] == sum.at)
          sum.value += values[other][lane];
        else
          add_to_memory(places[other][lane], values[other][lane]);
      }
      add_to_memory(sum.at, sum.value);
    }
  }

 private:
  struct Sum {
    float* at = nullptr;
    float value = 0.0f;
  };
  Sum sums_[kCount > 0 ? kCount : 1];
};

}  // namespace flashjit::auxiliary
