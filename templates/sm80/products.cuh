// Matrix products of tiles in shared memory and fragments in registers, by mma.sync: `Mma` is the
// family's (instructions.cuh).
#pragma once

#include "flashjit/sm80/tile.cuh"

namespace flashjit::sm80 {

/// C += A B^T over kDim / 16 steps. `load_a(a, mt, k)` gives A's fragments; the rows of B, in shared memory,
/// are the columns of C.
template <class Mma, class Element, int kDim, int kUnroll, int kMt, int kNt, class LoadA>
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
      if constexpr (kNt == 1) {
        load_matrix_x2(b[0], b[1], b_tile + k * 16 * 2);
#pragma unroll
        for (int mt = 0; mt < kMt; ++mt) Mma::template multiply<Element>(c[mt][0], a[mt], b[0], b[1]);
        continue;
      }
      load_matrix_x4(b, b_tile + (nt * 8 * kPitch + k * 16) * 2);
#pragma unroll
      for (int mt = 0; mt < kMt; ++mt) {
        Mma::template multiply<Element>(c[mt][nt], a[mt], b[0], b[1]);
        Mma::template multiply<Element>(c[mt][nt + 1], a[mt], b[2], b[3]);
      }
    }
  }
}

/// C += A B for 16 rows of B, which are the summed dimension; A in registers. The warp owns n16 units of C
/// from `first_unit` on, at most those that the array holds; kTotal exist, and the last owner's share may
/// exceed them.
template <class Mma, class Element, int kTotal, bool kGuard, int kMt, int kNt>
__device__ __forceinline__ void multiply_step(float (&c)[kMt][kNt][4], const unsigned (&a)[kMt][4],
                                              unsigned b_tile, int first_unit) {
#pragma unroll
  for (int unit = 0; unit < kNt / 2; ++unit) {
    if (kGuard && first_unit + unit >= kTotal) break;
    unsigned b[4];
    load_matrix_x4_transposed(b, b_tile + (first_unit + unit) * 32);
#pragma unroll
    for (int mt = 0; mt < kMt; ++mt) {
      Mma::template multiply<Element>(c[mt][2 * unit], a[mt], b[0], b[1]);
      Mma::template multiply<Element>(c[mt][2 * unit + 1], a[mt], b[2], b[3]);
    }
  }
}

/// multiply_transposed() with codes in B. Four codes of a row that lie together are a lane's share of 16
/// columns, and A's columns are in that order: see load_paired_tile().
template <class Mma, class Element, class Code, int kDim, int kUnroll, int kMt, int kNt, class LoadA>
__device__ __forceinline__ void multiply_transposed_codes(float (&c)[kMt][kNt][4], unsigned b_tile,
                                                          const LoadA& load_a) {
  constexpr int kPitch = pitch(kDim / 2), kSteps = kDim / 16;
#pragma unroll(kUnroll + 1) / 2
  for (int k = 0; k < kSteps; k += 2) {
    unsigned a[2][kMt][4];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int mt = 0; mt < kMt; ++mt)
        if (k + half < kSteps) load_a(a[half][mt], mt, k + half);
#pragma unroll
    for (int nt = 0; nt < kNt; nt += 2) {
      unsigned b[4];  // of rows 0 to 7 two steps, of rows 8 to 15
      load_matrix_x4(b, b_tile + (nt * 8 * kPitch + k * 8) * 2);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int half = i % 2;
        if (k + half >= kSteps) continue;
        const unsigned b0 = pair_of_codes<Element, Code>(b[i]), b1 = pair_of_codes<Element, Code>(b[i] >> 16);
#pragma unroll
        for (int mt = 0; mt < kMt; ++mt)
          Mma::template multiply<Element>(c[mt][nt + i / 2], a[half][mt], b0, b1);
      }
    }
  }
}

/// multiply_step() with codes in B, for all of C. Of 16 columns the even ones are one n8 tile's and the
/// odd ones the next one's: see in_order(). `pair_of(codes, i)` makes elements of two codes of a
/// column, in rows 2c and 2c + 1 of the first (i = 0) or second eight.
template <class Mma, class Element, int kMt, int kNt, class PairOf>
__device__ __forceinline__ void multiply_step_codes(float (&c)[kMt][kNt][4], const unsigned (&a)[kMt][4],
                                                    unsigned b_tile, const PairOf& pair_of) {
#pragma unroll
  for (int nt = 0; nt < kNt; nt += 4) {
    unsigned b[4];  // of 16 columns both eights of rows, of the next 16
    load_matrix_x4_transposed(b, b_tile + nt * 8);
#pragma unroll
    for (int odd = 0; odd < 4; ++odd) {
      if (nt + odd >= kNt) continue;
      unsigned pairs[2];
#pragma unroll
      for (int i = 0; i < 2; ++i)
        pairs[i] = pair_of(select_bytes(b[odd / 2 * 2 + i], 0u, odd % 2 == 0 ? 0x20u : 0x31u), i);
#pragma unroll
      for (int mt = 0; mt < kMt; ++mt)
        Mma::template multiply<Element>(c[mt][nt + odd], a[mt], pairs[0], pairs[1]);
    }
  }
}

/// C = rescale C + A B of codes, where A are e4m3 in registers, of 32 rows of B each. B's columns are in the
/// order of multiply_step_codes(), and of 32 rows two eights come in turns of two, as an accumulator
/// has them. Tensor cores sum up the rows of one tile alone: some of them keep fewer bits than fp32. `zero`
/// is 0, which the compiler does not know: in an address it makes products wait for sums before, or ptxas
/// starts them all at once and spills.
template <class Code, int kSteps, int kMt, int kNt>
__device__ __forceinline__ void multiply_codes(float (&c)[kMt][kNt][4], const float (&rescale)[kMt][2],
                                               const unsigned (&a)[kSteps][kMt][4], unsigned b_tile,
                                               int b_pitch, unsigned zero) {
#pragma unroll
  for (int nt = 0; nt < kNt; nt += 2) {
    float sums[kMt][2][4] = {};
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      unsigned b[4];  // of 16 columns all eights of rows
      if (k == 0 && nt >= 4) b_tile |= __float_as_uint(c[0][nt - 4][0]) & zero;
      load_matrix_x4_transposed(b, b_tile + (k * 32 * b_pitch + nt * 4) * 2);
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const unsigned bytes = odd == 0 ? 0x6420u : 0x7531u;
        const unsigned b0 = select_bytes(b[0], b[1], bytes), b1 = select_bytes(b[2], b[3], bytes);
#pragma unroll
        for (int mt = 0; mt < kMt; ++mt) mma_16x8x32<e4m3, Code>(sums[mt][odd], a[k][mt], b0, b1);
      }
    }
#pragma unroll
    for (int mt = 0; mt < kMt; ++mt)
#pragma unroll
      for (int odd = 0; odd < 2; ++odd)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          c[mt][nt + odd][e] = fmaf(c[mt][nt + odd][e], rescale[mt][e / 2], sums[mt][odd][e]);
  }
}

/// Brings the columns of multiply_step_codes() into the order of an accumulator. A lane has four that lie
/// together, two of each row.
template <int kMt, int kNt>
__device__ __forceinline__ void in_order(float (&c)[kMt][kNt][4]) {
  const int lane = threadIdx.x % 32, quad = lane / 4 * 4;
  const bool second = lane % 2 != 0;
#pragma unroll
  for (int mt = 0; mt < kMt; ++mt)
#pragma unroll
    for (int nt = 0; nt < kNt; nt += 2)
#pragma unroll
      for (int row = 0; row < 4; row += 2) {
        const float all[4] = {c[mt][nt][row], c[mt][nt + 1][row], c[mt][nt][row + 1], c[mt][nt + 1][row + 1]};
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int from = quad + tile * 2 + lane % 4 / 2;
            const float first = __shfl_sync(kWholeWarp, all[e], from);
            const float other = __shfl_sync(kWholeWarp, all[2 + e], from);
            c[mt][nt + tile][row + e] = second ? other : first;
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
