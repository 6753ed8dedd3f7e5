// Matrix products of tiles in shared memory and fragments in registers, by mma.sync.
#pragma once

#include "flashjit/sm80/tile.cuh"

namespace flashjit::sm80 {

/// C += A B^T over kDim / 16 steps. `load_a(a, mt, k)` gives A's fragments; the rows of B, in shared memory,
/// are the columns of C.
template <class Element, int kDim, int kUnroll, int kMt, int kNt, class LoadA>
__device__ __forceinline__ void multiply_transposed(float (&c)[kMt][kNt][4], unsigned b_tile,
                                                    const LoadA& load_a) {
  constexpr int kPitch = pitch(kDim);
#pragma unroll kUnroll
  for (int k = 0; k < round_up(kDim, 16) / 16; ++k) {
    unsigned a[kMt][4];
#pragma unroll
    for (int mt = 0; mt < kMt; ++mt) load_a(a[mt], mt, k);
#pragma unroll
    for (int nt = 0; nt < kNt; nt += 2) {
      unsigned b[4];
      load_matrix_x4(b, b_tile + (nt * 8 * kPitch + k * 16) * 2);
#pragma unroll
      for (int mt = 0; mt < kMt; ++mt) {
        mma_16x8x16<Element>(c[mt][nt], a[mt], b[0], b[1]);
        mma_16x8x16<Element>(c[mt][nt + 1], a[mt], b[2], b[3]);
      }
    }
  }
}

/// C += A B for 16 rows of B, which are the summed dimension; A in registers. The warp owns n16 units of C
/// from `first_unit` on, at most those that the array holds; kTotal exist, and the last owner's share may
/// exceed them.
template <class Element, int kTotal, bool kGuard, int kMt, int kNt>
__device__ __forceinline__ void multiply_step(float (&c)[kMt][kNt][4], const unsigned (&a)[kMt][4],
                                              unsigned b_tile, int first_unit) {
#pragma unroll
  for (int unit = 0; unit < kNt / 2; ++unit) {
    if (kGuard && first_unit + unit >= kTotal) break;
    unsigned b[4];
    load_matrix_x4_transposed(b, b_tile + (first_unit + unit) * 32);
#pragma unroll
    for (int mt = 0; mt < kMt; ++mt) {
      mma_16x8x16<Element>(c[mt][2 * unit], a[mt], b[0], b[1]);
      mma_16x8x16<Element>(c[mt][2 * unit + 1], a[mt], b[2], b[3]);
    }
  }
}

/// Packs an accumulator's columns [16k, 16k + 16) as the left operand of the next product.
template <class Element, int kNt>
__device__ __forceinline__ void as_left_operand(unsigned (&a)[4], const float (&c)[kNt][4], int k) {
  a[0] = pack<Element>(c[2 * k][0], c[2 * k][1]);
  a[1] = pack<Element>(c[2 * k][2], c[2 * k][3]);
  a[2] = pack<Element>(c[2 * k + 1][0], c[2 * k + 1][1]);
  a[3] = pack<Element>(c[2 * k + 1][2], c[2 * k + 1][3]);
}

}  // namespace flashjit::sm80
