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

 private:
  struct Sum {
    float* at = nullptr;
    float value = 0.0f;
  };
  Sum sums_[kCount > 0 ? kCount : 1];
};

}  // namespace flashjit::auxiliary
