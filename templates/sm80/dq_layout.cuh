// The order of the fp32 dQ accumulator: within each group of 16 columns a tensor-core lane's four values of a
// row stand together, so that one vector reduction adds them.
#pragma once

namespace flashjit::sm80 {

/// The column that stands at place `at` of the accumulator's row.
__device__ __forceinline__ int dq_column(int at) {
  const int lane = at % 16 / 4, value = at % 4;
  return at / 16 * 16 + value / 2 * 8 + lane * 2 + value % 2;
}

/// Adds four neighbouring floats of the dQ accumulator.
__device__ __forceinline__ void add_to_dq(float* at, float x0, float x1, float x2, float x3) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(x0), "f"(x1),
               "f"(x2), "f"(x3)
               : "memory");
#else
  atomicAdd(at, x0);
  atomicAdd(at + 1, x1);
  atomicAdd(at + 2, x2);
  atomicAdd(at + 3, x3);
#endif
}

}  // namespace flashjit::sm80
