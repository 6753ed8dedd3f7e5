// The epilogue of the backward pass: dK and dV to global memory.
#pragma once

#include "flashjit/common/out_element.cuh"
#include "flashjit/common/tile_walk.cuh"
#include "flashjit/sm80/backward_smem.cuh"
#include "flashjit/sm80/tile.cuh"

namespace flashjit::sm80 {

/// An m16 tile of dK or dV in fp32. `row`: the lane's first within the KV tile, whose rows `row_at` has;
/// `first`: the first n8 tile of the `columns` that the warp has.
template <bool kAdd, int kChunks, class RowAt>
__device__ __forceinline__ void store_fp32_gradient(const RowAt& row_at, int row, int valid,
                                                    float (&c)[kChunks][4], int columns, float scale,
                                                    int first) {
#pragma unroll
  for (int n = 0; n < kChunks * 4; ++n) c[n / 4][n % 4] *= scale;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at_row = row + half * 8;
    if (at_row < valid) store_row<kChunks, kAdd>(row_at(at_row) + first * 8, half, c[0], columns / 8 - first);
  }
}

/// An m16 tile of dK or dV goes to a tile in shared memory, from `row` and n8 tile `first` on, of kTotal.
template <class Element, int kPitch, int kTiles, int kTotal, int kNt>
__device__ __forceinline__ void gather_rows(char* tile, int row, int first, const float (&c)[kNt][4],
                                            float scale) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
    if (first + n < kTotal) store_fragment<Element, kPitch>(tile, row, (first + n) * 8, c[n], scale, scale);
}

/// dK, of the warps with `has_ds`, and dV, of those with `has_p`, of the work tile `number`.
template <class P, int kMt, int kDkNt, int kDvNt, class WarpRow>
__device__ __forceinline__ void store_gradients(const Params& p, const Sequence<P>& sequence, unsigned number,
                                                const BackwardSmem<P>& smem, float (&dk)[kMt][kDkNt][4],
                                                float (&dv)[kMt][kDvNt][4], bool has_ds, bool has_p,
                                                const WarpRow& warp_row, int lane) {
  using Element = typename P::Element;
  using Policy = BackwardPolicy<P>;
  const float v_scale = P::kDropout ? p.keep_scale : 1.0f;
  const int dk_first = column_part<P>() * 2 * Policy::kOwnDUnits,
            dv_first = column_part<P>() * 2 * Policy::kOwnDvUnits;
  // Computed again, so that the main loop need not keep it in registers.
  const auto work_again = [&] { return KvWorkTile<P>(p, opaque(number)); };
  if constexpr (P::kSplit || P::kFp32Grads) {
    constexpr bool kAdd = P::kAddGrads && !P::kSplit;  // else combine_dkdv adds
    const KvWorkTile<P> done = work_again();
    const int begin = done.kv_tile * P::kBc, valid = sequence.seqlen_kv(p) - begin;
    const auto rows_of = [&](float* splits, const TensorParam& tensor, int columns) {
      return [=, &p, &sequence, &tensor](int row) {
        if constexpr (P::kSplit)
          return splits + kv_row_of_split(p, done.split, sequence.b, done.h_kv, begin + row) * columns;
        else
          return sequence.template kv_pointer<float>(tensor, done.h_kv, begin + row);
      };
    };
#pragma unroll
    for (int mt = 0; mt < Policy::kMt; ++mt) {
      const int row = warp_row(mt) + lane / 4;
      if (has_ds)
        store_fp32_gradient<kAdd>(rows_of(p.dk_splits, p.dk, P::kHeadDim), row, valid, dk[mt], P::kHeadDim,
                                  p.softmax_scale, dk_first);
      if (has_p)
        store_fp32_gradient<kAdd>(rows_of(p.dv_splits, p.dv, P::kHeadDimV), row, valid, dv[mt], P::kHeadDimV,
                                  v_scale, dv_first);
    }
    return;
  }
  __syncthreads();  // K and V are free: dK and dV overwrite them

#pragma unroll
  for (int mt = 0; mt < Policy::kMt; ++mt) {
    if (has_ds)
      gather_rows<Element, Policy::kQPitch, 2 * Policy::kOwnDUnits, 2 * Policy::kDUnits>(
          smem.dk(), warp_row(mt), dk_first, dk[mt], p.softmax_scale);
    if (has_p)
      gather_rows<Element, Policy::kVPitch, 2 * Policy::kOwnDvUnits, 2 * Policy::kDvUnits>(
          smem.dv(), warp_row(mt), dv_first, dv[mt], v_scale);
  }
  __syncthreads();
  const KvWorkTile<P> done = work_again();
  const int begin = done.kv_tile * P::kBc, valid = sequence.seqlen_kv(p) - begin;
  store_tile<P::kBc, P::kHeadDim, Policy::kThreads>(sequence.kv_pointer(p.dk, done.h_kv, begin),
                                                    p.dk.stride_s, smem.dk(), valid, threadIdx.x);
  store_tile<P::kBc, P::kHeadDimV, Policy::kThreads>(sequence.kv_pointer(p.dv, done.h_kv, begin),
                                                     p.dv.stride_s, smem.dv(), valid, threadIdx.x);
}

}  // namespace flashjit::sm80
