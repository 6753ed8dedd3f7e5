// The epilogue of the forward pass joins the call's keys with a running state, if there is one.
// Where O goes after that is an Output of forward_output.cuh.
#pragma once

#include "flashjit/common/running_state.cuh"
#include "flashjit/sm80/forward_output.cuh"
#include "flashjit/sm80/shared_rows.cuh"

namespace flashjit::sm80 {

/// All keys are the call's, or the combine entry joins them with a running state.
template <class P>
struct NoState {
  static __device__ __forceinline__ void join(const Params&, bool, long long, RowEnd&, int) {}
  static __device__ __forceinline__ void add_to(const Params&, const Sequence<P>&, int, int, OutTile<P>&,
                                                float (&)[2]) {}
};

/// O and LSE of other keys join the call's.
template <class P>
struct JoinedState {
  float factor[2];  ///< of the state's O, for a lane's two rows

  /// `row`: of LSE, if it `exists`.
  __device__ __forceinline__ void join(const Params& p, bool exists, long long row, RowEnd& end, int half) {
    factor[half] = join_state<P>(p, exists, row, end);
    if constexpr (ForwardPolicy<P>::kSharesRows) sync_rows<P>();  // which all read, before one writes
  }
  /// Scales O and adds the state's; `scale` becomes 1.
  __device__ __forceinline__ void add_to(const Params& p, const Sequence<P>& sequence, int h, int first_q,
                                         OutTile<P>& o, float (&scale)[2]) const {
    scale_tile<P>(o, scale);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      scale[half] = 1.0f;
      const float* row = sequence.template q_pointer<float>(p.o_state, h, first_q + half * 8);
      add_state<ForwardPolicy<P>::kOt>(
          o[0], half, row + first_column<P>(), factor[half],
          ForwardPolicy<P>::kSharesRows ? own_chunks<P>() : ForwardPolicy<P>::kOt);
    }
  }
};

template <class P>
using RunningState = Conditional<kJoinsState<P>, JoinedState<P>, NoState<P>>;

}  // namespace flashjit::sm80
