// The tensors that a kernel copies by TMA, as the host encodes them. Host and device include this file.
#pragma once

namespace flashjit {

/// The driver's CUtensorMap to the host, opaque to kernels. `o` is O in the forward pass and dO in the
/// backward pass; `plane` is the captured bias, all zeros where TMA cannot copy it.
template <class Map>
struct TensorMapsOf {
  Map q, k, v, o, plane;
};

}  // namespace flashjit
