// Forward pass, warps that share rows (d_split), where one warp's registers do not hold its rows of O: each
// computes S for some of a KV tile's keys and O for some of V's columns. By way of shared memory they agree
// on the rows' maxima, and hand each other P.
#pragma once

#include "flashjit/common/dropout.cuh"
#include "flashjit/sm80/forward_lse.cuh"
#include "flashjit/sm80/forward_skip_softmax.cuh"
#include "flashjit/sm80/forward_smem.cuh"
#include "flashjit/sm80/forward_softmax.cuh"

namespace flashjit::sm80 {

/// The named barrier of this warp's rows.
template <class P>
__device__ __forceinline__ void sync_rows() {
  named_barrier_sync(1 + row_warp<P>(warp_index()), P::kDSplit * 32);
}

/// `combine`s a value of each row with the values of the warps that have the other keys. Two exchanges need a
/// sync_rows() between them.
template <class P, class WarpRow, class Combine>
__device__ __forceinline__ void exchange_rows(RowValues<P>& values, const ForwardSmem<P>& smem,
                                              const WarpRow& warp_row, const Combine& combine) {
  using Policy = ForwardPolicy<P>;
  const int part = column_part<P>();
  const auto at_row = [&](int mt, int half) { return warp_row(mt) + lane_index() / 4 + half * 8; };
  if (part < Policy::kParts && threadIdx.x % 4 == 0) {
#pragma unroll
    for (int mt = 0; mt < Policy::kMt; ++mt)
#pragma unroll
      for (int half = 0; half < 2; ++half) smem.row_values(part)[at_row(mt, half)] = values[mt][half];
  }
  sync_rows<P>();
#pragma unroll
  for (int mt = 0; mt < Policy::kMt; ++mt)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      values[mt][half] = smem.row_values(0)[at_row(mt, half)];
#pragma unroll
      for (int other = 1; other < Policy::kParts; ++other)
        values[mt][half] = combine(values[mt][half], smem.row_values(other)[at_row(mt, half)]);
    }
}

/// m of a lane's rows over all keys of a KV tile, and of those before.
template <class P, class WarpRow>
__device__ __forceinline__ void share_max(RowValues<P>& shared, const RowValues<P>& before,
                                          const ForwardScores<P>& s, const ForwardSmem<P>& smem,
                                          const WarpRow& warp_row) {
#pragma unroll
  for (int mt = 0; mt < ForwardPolicy<P>::kMt; ++mt)
#pragma unroll
    for (int half = 0; half < 2; ++half) shared[mt][half] = max_of_row<P>(s, before[mt][half], mt, half);
  exchange_rows<P>(shared, smem, warp_row, [](float a, float b) { return fmaxf(a, b); });
}
/// How a step finds the rows' maxima and what follows from them; see update_max(). RowMax<P> names a type.
template <class P>
struct OwnRowMax {
  template <class WarpRow>
  static __device__ __forceinline__ bool update(RowValues<P>& row_max, RowValues<P>& row_sum,
                                                RowValues<P>& shift, RowValues<P>& rescale, float scale_log2,
                                                const ForwardScores<P>& s, const ForwardSmem<P>&,
                                                const WarpRow&) {
    return update_max<P>(row_max, row_sum, shift, rescale, scale_log2,
                         [&](float before, int mt, int half) { return max_of_row<P>(s, before, mt, half); });
  }
};
template <class P>
struct SharedRowMax {
  template <class WarpRow>
  static __device__ __forceinline__ bool update(RowValues<P>& row_max, RowValues<P>& row_sum,
                                                RowValues<P>& shift, RowValues<P>& rescale, float scale_log2,
                                                const ForwardScores<P>& s, const ForwardSmem<P>& smem,
                                                const WarpRow& warp_row) {
    RowValues<P> shared;
    share_max<P>(shared, row_max, s, smem, warp_row);
    return update_max<P>(row_max, row_sum, shift, rescale, scale_log2,
                         [&](float, int mt, int half) { return shared[mt][half]; });
  }
};
template <class P>
using RowMax = Conditional<ForwardPolicy<P>::kSharesRows, SharedRowMax<P>,
                           Conditional<P::kSkipSoftmax, MaxOfTile<P>, OwnRowMax<P>>>;

/// The rows' sums from the sums of all keys' lanes.
template <class P, class WarpRow>
__device__ __forceinline__ void share_sum(RowValues<P>& sum, const ForwardSmem<P>& smem,
                                          const WarpRow& warp_row) {
#pragma unroll
  for (int mt = 0; mt < ForwardPolicy<P>::kMt; ++mt)
#pragma unroll
    for (int half = 0; half < 2; ++half) sum[mt][half] = quad_sum(sum[mt][half]);
  exchange_rows<P>(sum, smem, warp_row, [](float a, float b) { return a + b; });
}

/// Stores P of the warp's keys in 16 bits, with zeros where dropout drops a pair.
template <class P, class WarpRow, class AtQ, class AtKv>
__device__ __forceinline__ void store_p(const ForwardScores<P>& s, const ForwardSmem<P>& smem,
                                        const Params& p, unsigned batch_head, const WarpRow& warp_row,
                                        const AtQ& at_q, const AtKv& at_kv) {
  using Policy = ForwardPolicy<P>;
  constexpr int kPitch = pitch(P::kBc);
  if (column_part<P>() >= Policy::kParts) return;
  const int lane = lane_index();
#pragma unroll
  for (int mt = 0; mt < Policy::kMt; ++mt) {
    [[maybe_unused]] unsigned masks[4];  // of 16 keys
#pragma unroll
    for (int nt = 0; nt < Policy::kNt; ++nt) {
      const float(&c)[4] = s[mt][nt];
      unsigned words[2] = {pack<typename P::Element>(c[0], c[1]), pack<typename P::Element>(c[2], c[3])};
      if constexpr (P::kDropout) {
        if (nt % 2 == 0) drop_masks<P>(masks, p, batch_head, at_q(mt, 0).at, at_kv(nt, 0).at);
        const bool later = Policy::kNt == 1 ? (at_kv(0, 0).at & 8) != 0 : nt % 2 == 1;
#pragma unroll
        for (int half = 0; half < 2; ++half) words[half] &= ~(later ? masks[2 + half] : masks[half]);
      }
      char* at = smem.p_tile() +
                 ((warp_row(mt) + lane / 4) * kPitch + first_key_of_warp<P>() + nt * 8 + lane % 4 * 2) * 2;
      *reinterpret_cast<unsigned*>(at) = words[0];
      *reinterpret_cast<unsigned*>(at + 8 * kPitch * 2) = words[1];
    }
  }
}

/// O += P V for the warp's columns, and all keys.
template <class P, int kMt, int kOt, class WarpRow>
__device__ __forceinline__ void multiply_shared_p(float (&o)[kMt][kOt][4], const ForwardSmem<P>& smem,
                                                  unsigned v_tile, const WarpRow& warp_row) {
  using Policy = ForwardPolicy<P>;
  constexpr int kPitch = pitch(P::kBc);
  const unsigned rows = shared_address(smem.p_tile()) + matrix_offset<true>(kPitch);
#pragma unroll
  for (int k = 0; k < P::kBc / 16; ++k) {
    unsigned a[kMt][4];
#pragma unroll
    for (int mt = 0; mt < kMt; ++mt) load_matrix_x4(a[mt], rows + (warp_row(mt) * kPitch + k * 16) * 2);
    multiply_step<typename P::Mma, typename P::Element, Policy::kOUnitsOfAll, Policy::kGuardO>(
        o, a, v_tile + k * 16 * Policy::kVPitch * 2, column_part<P>() * Policy::kOUnits);
  }
}

}  // namespace flashjit::sm80
