// The tensors that a kernel copies by TMA, as the host encodes them. Host and device include this file.
#pragma once

#if !defined(FLASHJIT_PARAMS_BYTES)  // as in params.cuh
#define FLASHJIT_IF_Q_ROPE
#endif

namespace flashjit {

/// The driver's CUtensorMap to the host, opaque to kernels. `o` is O in the forward pass and dO in the
/// backward pass; `bias` is the captured tensor of the
/// bias tile, all zeros where TMA cannot load it. A kernel without Q's last columns has no map of them.
template <class Map>
struct TensorMapsOf {
  Map q, k, v, o, bias;
  FLASHJIT_IF_Q_ROPE Map q_rope;
};
/// What a kernel of O's tangent gets, which has none of O, the bias tile and Q's last columns. A tangent that
/// is zero has no map.
template <class Map>
struct JvpTensorMapsOf {
  Map q, k, v, q_tangent, k_tangent, v_tangent;
};

}  // namespace flashjit
