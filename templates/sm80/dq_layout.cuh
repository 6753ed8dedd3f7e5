// The order of the fp32 dQ accumulator: within each group of 16 columns a tensor-core lane's four values of a
// row follow each other, so that one vector reduction adds them.
#pragma once

namespace flashjit::sm80 {

/// The column at index `at` of the accumulator's row.
__device__ __forceinline__ int dq_column(int at) {
  const int lane = at % 16 / 4, value = at % 4;
  return at / 16 * 16 + value / 2 * 8 + lane * 2 + value % 2;
}

}  // namespace flashjit::sm80
