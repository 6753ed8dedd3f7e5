// dQ += dS K: the CTA's warps multiply, and add to the fp32 accumulator in global memory.
#pragma once

#include "flashjit/common/tile_walk.cuh"
#include "flashjit/common/wait.cuh"
#include "flashjit/sm80/backward_smem.cuh"
#include "flashjit/sm80/dq_layout.cuh"
#include "flashjit/sm80/products.cuh"

namespace flashjit::sm80 {

/// For the Q tile `of`, whose dS lies transposed, as [KV row][query], in a buffer.
template <class P>
__device__ __forceinline__ void add_dq(const Params& p, const Sequence<P>& sequence, const StagedTile& of,
                                       const BackwardSmem<P>& smem, int buffer, int warp, int lane) {
  using Element = typename P::Element;
  using Policy = BackwardPolicy<P>;
  constexpr int kDqMt = Policy::kDqMt, kDqUnits = Policy::kDqUnits, kDUnits = Policy::kDUnits;
  const int dq_row = warp / Policy::kDqColumnWarps * kDqMt * 16;
  const unsigned ds_offset = smem.ds(buffer) + matrix_offset<false>(Policy::kDsPitch) + dq_row * 2;
  const unsigned k_columns = smem.k() + matrix_offset<true>(Policy::kQPitch);
  int* semaphore = nullptr;
#pragma unroll 1
  for (int pass = 0; pass < Policy::kDqPasses; ++pass) {
    const int dq_unit = (pass * Policy::kDqColumnWarps + warp % Policy::kDqColumnWarps) * kDqUnits;
    float dq[kDqMt][2 * kDqUnits][4] = {};
#pragma unroll
    for (int k = 0; k < P::kBc / 16; ++k)
#pragma unroll
      for (int term = 0; term < Policy::kTerms; ++term) {
        unsigned a[kDqMt][4];
#pragma unroll
        for (int mt = 0; mt < kDqMt; ++mt)
          load_matrix_x4_transposed(
              a[mt], ds_offset + term * Policy::kDsTermBytes + (k * 16 * Policy::kDsPitch + mt * 16) * 2);
        multiply_step<typename P::Mma, Element, kDUnits, Policy::kGuardDq>(
            dq, a, k_columns + k * 16 * Policy::kQPitch * 2, dq_unit);
      }
    if (P::kDeterministic && pass == 0) {
      semaphore = dq_semaphore<P>(p, sequence.b, of.head, of.tile);
      if (threadIdx.x == 0) wait_semaphore<P, 64>(semaphore, of.dq_order);
      __syncthreads();
    }
    float* accumulator = p.dq_accum + (sequence.stats_row(p, of.head) + of.tile * P::kBr) * (kDUnits * 16);
#pragma unroll
    for (int mt = 0; mt < kDqMt; ++mt)
#pragma unroll
      for (int unit = 0; unit < kDqUnits; ++unit) {
        if (Policy::kGuardDq && dq_unit + unit >= kDUnits) break;
        // Unit by unit a lane's four values of a row follow each other: dq_layout.cuh.
        float* at = accumulator + (dq_row + mt * 16 + lane / 4) * (kDUnits * 16) + (dq_unit + unit) * 16 +
                    lane % 4 * 4;
        const float(&left)[4] = dq[mt][2 * unit];
        const float(&right)[4] = dq[mt][2 * unit + 1];
        add_four(at, left[0], left[1], right[0], right[1]);
        add_four(at + 8 * kDUnits * 16, left[2], left[3], right[2], right[3]);
      }
  }
  if constexpr (P::kDeterministic) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) atomicAdd(semaphore, 1);
  }
}

}  // namespace flashjit::sm80
