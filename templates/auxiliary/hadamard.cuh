// A row times blocks of a Hadamard matrix, which is orthogonal: scores of Q and K stay, outliers spread.
#pragma once

namespace flashjit::auxiliary {

/// Multiplies a row by blocks of a Hadamard matrix, of the largest power of two that divides it.
template <int kDim>
__device__ __forceinline__ void rotate_by_hadamard(float* row, int lane) {
  constexpr int kBlock = kDim & -kDim;
#pragma unroll
  for (int step = 1; step < kBlock; step *= 2) {
    for (int pair = lane; pair < kDim / 2; pair += 32) {
      const int first = pair / step * 2 * step + pair % step;
      const float x = row[first], y = row[first + step];
      row[first] = x + y, row[first + step] = x - y;
    }
    __syncwarp();
  }
  for (int i = lane; i < kDim; i += 32) row[i] /= sqrtf(static_cast<float>(kBlock));
  __syncwarp();
}

}  // namespace flashjit::auxiliary
