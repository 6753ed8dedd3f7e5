// The tensor maps of kernels that copy tiles by TMA.
#pragma once

#include <span>

#include "device/driver.hpp"
#include "flashjit/tensor.hpp"
#include "plan/family.hpp"
#include "templates/common/params.cuh"
#include "templates/common/tensor_maps.cuh"

namespace flashjit::device {

/// A kernel's second parameter.
using TensorMaps = TensorMapsOf<CUtensorMap>;
static_assert(sizeof(TensorMaps) == std::size_t{6} * 128 && alignof(TensorMaps) >= 64);
/// That of a kernel of O's tangent.
using JvpTensorMaps = JvpTensorMapsOf<CUtensorMap>;

/// The maps of one call's tensors, without memory where it has none, `o` being O of a forward pass and dO of
/// a backward pass, by the name that its caller knows; the map of a tensor without elements, or whose rows
/// are not copied, stays zero: no kernel reads it. So does a bias tile of `captures` whose memory or strides
/// TMA cannot load: kernels then read it themselves. Throws Error(unsupported) that names the tensor whose
/// strides the driver refuses.
TensorMaps make_tensor_maps(const Driver& driver, const plan::TensorBoxes& boxes, DType dtype, DType kv_dtype,
                            const ConstTensorView& q, const ConstTensorView& q_rope, const ConstTensorView& k,
                            const ConstTensorView& v, const ConstTensorView& o, const char* o_name,
                            std::span<const CaptureParam> captures);
/// The tensors of O's tangent. Tangents may be null.
struct JvpTensors {
  ConstTensorView q, k, v, q_tangent, k_tangent, v_tangent;
};
/// Batch entries and heads may have a stride of 0, as an expanded tensor's: the map then has one of them.
JvpTensorMaps make_jvp_tensor_maps(const Driver& driver, const plan::TensorBoxes& boxes, DType dtype,
                                   const JvpTensors& tensors);

}  // namespace flashjit::device
