// A reference problem's captures in device memory, for the command, the tuner and the tests.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "device/resources.hpp"
#include "flashjit/spec.hpp"
#include "flashjit/tensor.hpp"
#include "reference/programs.hpp"

namespace flashjit {

class DeviceCaptures {
 public:
  DeviceCaptures() = default;
  /// `captures` are those that the spec's programs declare. Room for gradients is made, and zeroed, but
  /// in the forward pass; in the jvp pass it is for tangents. `stream` as DeviceBuffer takes it.
  DeviceCaptures(const std::shared_ptr<const device::Driver>& driver, const KernelSpec& spec,
                 const std::vector<reference::Captured>& captures, CUstream stream = nullptr);

  /// For ForwardArgs and BackwardArgs; valid while this is.
  std::span<const Capture> view() const { return view_; }
  /// For BackwardJvpArgs; zeros, in the backward_jvp pass alone.
  std::span<const float* const> tangents() const { return tangent_pointers_; }
  void zero_grads();
  /// As reference::Backward::captures.
  reference::CaptureGrads grads() const;

 private:
  std::vector<std::string> names_;
  std::vector<device::DeviceBuffer> values_, grads_, tangents_;
  std::vector<const float*> tangent_pointers_;
  std::vector<Capture> view_;
};

}  // namespace flashjit
