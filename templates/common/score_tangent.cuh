// Jvp: the tangent of a pair's score.
#pragma once

#include "flashjit/common/capture_grads.cuh"
#include "flashjit/common/jvp_params.cuh"
#include "flashjit/common/types.cuh"

namespace flashjit {

/// dS of a pair, from Q K^T and its tangent: through the score program, with what the captured tensors' own
/// tangents add.
template <class P>
__device__ __forceinline__ float score_tangent(const JvpParams& p, const typename P::Head& head, float dot,
                                               float dot_tangent, Position q, Position kv) {
  float tangent = chained(dot_tangent * p.softmax_scale, P::score_grad(p, head, dot, q, kv));
  P::add_capture_grads(p, head, 1.0f, dot, q, kv,
                       [&](auto, const float* at, float derivative) { tangent += chained(*at, derivative); });
  return tangent;
}

/// The row's tangent of LSE, from rowsum(P dS) over its keys. `factor`: the keys' part of the row sum, the
/// rest is the sink's.
template <class P>
__device__ __forceinline__ float with_sink_tangent(const JvpParams& p, int h, float of_keys, float factor) {
  return P::kSinks && p.sinks_tangent ? of_keys + (1.0f - factor) * p.sinks_tangent[h] : of_keys;
}

}  // namespace flashjit
