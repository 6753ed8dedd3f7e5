// Skip-softmax in the forward pass: a warp decides for its own rows whether a KV tile's exponentials and P V
// are left out.
#pragma once

#include "flashjit/common/skip_softmax.cuh"
#include "flashjit/sm80/forward_smem.cuh"
#include "flashjit/sm80/forward_softmax.cuh"

namespace flashjit::sm80 {

/// Whether none of the warp's rows that exist wants the tile, which is then counted. Their maxima in it go to
/// `shift`, for MaxOfTile.
template <class P, class AtQ>
__device__ __forceinline__ bool leaves_out_tile(const Params& p, ForwardSmem<P>& smem,
                                                const ForwardScores<P>& s, const RowValues<P>& row_max,
                                                RowValues<P>& shift, float scale_log2, int seqlen_q,
                                                const AtQ& at_q) {
  using Policy = ForwardPolicy<P>;
  bool wanted = false;
#pragma unroll
  for (int mt = 0; mt < Policy::kMt; ++mt)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float highest = -infinity();
#pragma unroll
      for (int nt = 0; nt < Policy::kNt; ++nt)
        highest = max_or_nan(highest, max_or_nan(s[mt][nt][2 * half], s[mt][nt][2 * half + 1]));
      shift[mt][half] = max_or_nan_of_quad(highest);
      wanted |=
          at_q(mt, 2 * half).at < seqlen_q && wants_tile(p, shift[mt][half], row_max[mt][half], scale_log2);
    }
  const bool far = !__any_sync(kWholeWarp, wanted);
  smem.skipped += far && at_q(0, 0).at - lane_index() / 4 < seqlen_q;  // else the warp has no rows
  return far;
}

/// A RowMax, see shared_rows.cuh: the KV tile's maxima are in `shift` already.
template <class P>
struct MaxOfTile {
  template <class WarpRow>
  static __device__ __forceinline__ bool update(RowValues<P>& row_max, RowValues<P>& row_sum,
                                                RowValues<P>& shift, RowValues<P>& rescale, float scale_log2,
                                                const ForwardScores<P>&, const ForwardSmem<P>&,
                                                const WarpRow&) {
    return update_max<P>(row_max, row_sum, shift, rescale, scale_log2,
                         [&](float before, int mt, int half) { return fmaxf(before, shift[mt][half]); });
  }
};

}  // namespace flashjit::sm80
