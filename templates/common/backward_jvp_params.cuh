// What a kernel of the gradients' tangents gets besides the backward pass's parameters.
// Host and device include this file.
#pragma once

#if defined(__CUDACC__)
#include "flashjit/common/jvp_params.cuh"
#else
#include "templates/common/jvp_params.cuh"
#endif

namespace flashjit {

/// Params::dq, dk, dv and dsinks are where tangents of these gradients go. Of JvpParams the tangents of O and
/// LSE are not used.
struct BackwardJvpParams : JvpParams {
  TensorParam dout_tangent;
  const float* dlse_tangent;   ///< like dlse; null: zero
  float* row_tangents;         ///< [3, batch, heads_q, seqlen_q_padded]: D, and tangents of LSE and D
  float* grads[kMaxCaptures];  ///< tangents of captures' gradients, added to
};

#if defined(__CUDACC__)
/// Where the tangent of a capture's gradient is added to, from its tangent's element.
__device__ __forceinline__ float* capture_grad_of(const BackwardJvpParams& p, int capture, const float* at) {
  return p.grads[capture] + (at - p.captures[capture].grad);
}
#endif

}  // namespace flashjit
