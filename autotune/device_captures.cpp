#include "autotune/device_captures.hpp"

#include <algorithm>

#include "expr/declarations.hpp"
#include "reference/inputs.hpp"

namespace flashjit {

DeviceCaptures::DeviceCaptures(const std::shared_ptr<const device::Driver>& driver, const KernelSpec& spec,
                               const std::vector<reference::Captured>& captures, CUstream stream)
    : values_(captures.size()), grads_(captures.size()), tangents_(captures.size()) {
  for (const reference::Captured& captured : captures) names_.push_back(captured.name);
  const std::vector<expr::Declaration> declared =
      expr::declarations(spec.score, spec.mask, spec.epilogue.out_mod, spec.prologue);
  for (std::size_t i = 0; i < captures.size(); ++i) {
    const reference::Captured& captured = captures[i];
    const auto d = std::ranges::find(declared, captured.name, &expr::Declaration::name);
    if (d == declared.end() || d->is_scalar()) {
      view_.push_back(Capture::number(names_[i], captured.values.at(0)));
      continue;
    }
    values_[i] = device::upload(driver, reference::encode(d->type, captured.values), stream);
    if (d->wants_grad && spec.pass != Pass::forward)  // its tangent in the jvp pass
      grads_[i] = device::DeviceBuffer(driver, captured.values.size() * sizeof(float), stream);
    if (d->wants_grad && spec.pass == Pass::backward_jvp)
      tangents_[i] = device::upload(driver, std::vector<float>(captured.values.size()), stream);
    Capture view{.name = names_[i],
                 .data = values_[i].data(),
                 .grad = static_cast<float*>(grads_[i].data()),
                 .rank = d->rank,
                 .type = d->type};
    std::int64_t stride = 1;
    for (int dimension = d->rank; dimension-- > 0; stride *= captured.size[dimension]) {
      view.size[dimension] = captured.size[dimension];
      view.stride[dimension] = stride;
    }
    view_.push_back(view);
  }
  zero_grads();
  if (spec.pass != Pass::backward_jvp) return;
  for (const device::DeviceBuffer& tangent : tangents_)
    tangent_pointers_.push_back(static_cast<const float*>(tangent.data()));
}

void DeviceCaptures::zero_grads() {
  for (device::DeviceBuffer& grad : grads_)
    if (grad.bytes() > 0) grad.fill(0);
}

reference::CaptureGrads DeviceCaptures::grads() const {
  reference::CaptureGrads grads;
  for (const device::DeviceBuffer& grad : grads_) {
    const std::vector<float> values = device::download<float>(grad);
    grads.emplace_back(values.begin(), values.end());
  }
  return grads;
}

}  // namespace flashjit
