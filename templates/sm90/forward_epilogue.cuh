// The epilogue of the forward pass: LSE of a warpgroup's rows, and the running state that its O joins. Where
// both go is an Output of forward_output.cuh.
#pragma once

#include "flashjit/sm90/forward_out_mod.cuh"
#include "flashjit/sm90/forward_softmax.cuh"

namespace flashjit::sm90 {

/// All keys are the call's, or the combine entry joins them with a running state.
template <class P>
struct NoState {
  __device__ __forceinline__ void join(const Params&, const WorkTile<P>&, int, int, RowEnd&) {}
  template <int kCount>
  __device__ __forceinline__ void add_to(const Params&, const WorkTile<P>&, int, float (&)[kCount]) const {}
};
/// O and LSE of other keys join the call's.
template <class P>
struct JoinedState {
  float factor[2] = {};  ///< of the state's O, for a thread's two rows

  __device__ __forceinline__ void join(const Params& p, const WorkTile<P>& work, int wg, int half,
                                       RowEnd& end) {
    const int q = first_query(work, wg) + own_row() + half * 8;
    factor[half] = join_state<P>(p, q < work.sequence.seqlen_q(p), work.sequence.lse_row(p, work.h, q), end);
  }
  /// Adds the state's O to O of a work tile, which is scaled already.
  template <int kCount>
  __device__ __forceinline__ void add_to(const Params& p, const WorkTile<P>& work, int wg,
                                         float (&o)[kCount]) const {
    const int q = first_query(work, wg) + own_row();
#pragma unroll
    for (int half = 0; half < 2; ++half)
      add_state<kCount / 4>(o, half, work.sequence.template q_pointer<float>(p.o_state, work.h, q + half * 8),
                            factor[half]);
  }
};
template <class P>
using RunningState = Conditional<kJoinsState<P>, JoinedState<P>, NoState<P>>;

/// Writes LSE = m + log(l) of the rows; `scale` is what O must be multiplied by, 1 / l.
template <class P>
__device__ __forceinline__ void finalize_rows(const Params& p, const WorkTile<P>& work,
                                              const RowState<P>& rows, int wg, float (&scale)[2],
                                              RunningState<P>& state) {
  const float to_log2[] = {exponent_scale(p, rows, 0), exponent_scale(p, rows, 1)};
  float lse[2], highest[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = sum_of_quad(rows.sum[half]);
    highest[half] = largest_score(p, rows, half);
    const float rest = shift_rest<P>(rows.max[half], to_log2[half]);
    lse[half] = row_lse<P>(sum, highest[half], rest);
    if (P::kSplit && P::kNearMinScores && sum > 0.0f && is_near_min(highest[half]))
      lse[half] = near_min_lse(highest[half], sum);
    if (P::kRowMax) highest[half] = largest_or_nan(highest[half], sum);
    RowEnd end = end_of_row<P>(p, work.h, lse[half]);
    Output<P>::join_sink(p, work, wg, half, lse[half], end);
    state.join(p, work, wg, half, end);
    lse[half] = end.lse;
    scale[half] = scale_of_row(p, rows, sum, rest, end.factor);
  }
  Output<P>::store_lse(p, work, wg, lse, highest);
}
/// O of a work tile: times `scale`, with a running state's, to global memory.
template <class P, int kCount>
__device__ __forceinline__ void store_o(const Params& p, const TensorMaps& maps,
                                        const ForwardStorage<P>& smem, const WorkTile<P>& work, int wg,
                                        const RunningState<P>& state, const float (&scale)[2],
                                        float (&o)[kCount]) {
  scale_o(o, scale);  // O / l
  state.add_to(p, work, wg, o);
  Output<P>::store(p, maps, smem, work, wg, o);
}

}  // namespace flashjit::sm90
