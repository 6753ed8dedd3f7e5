// What a kernel of O's tangent gets besides the forward pass's parameters.
// Host and device include this file.
#pragma once

#if defined(__CUDACC__)
#include "flashjit/common/params.cuh"
#else
#include "templates/common/params.cuh"
#endif

namespace flashjit {

/// A tangent that is null is zero. CaptureParam::grad is the tangent of a captured tensor.
struct JvpParams : Params {
  TensorParam q_tangent, k_tangent, v_tangent, o_tangent;
  float* lse_tangent;          ///< like lse; null: not wanted
  const float* sinks_tangent;  ///< [heads_q]; null: zero
};

}  // namespace flashjit
