// The tensors that a kernel copies by TMA, as the host encodes them. Host and device include this file.
#pragma once

namespace flashjit {

/// The driver's CUtensorMap to the host, opaque to kernels. `o` is O in the forward pass and dO in the
/// backward pass; `bias` is the captured tensor of the
/// bias tile, all zeros where TMA cannot load it.
template <class Map>
struct TensorMapsOf {
  Map q, k, v, o, bias;
};

}  // namespace flashjit
