#include "tools/parts/expectations.hpp"

#include <fmt/format.h>

#include <cmath>

#include "autotune/model.hpp"
#include "plan/family.hpp"
#include "plan/plan.hpp"

namespace flashjit::command {
namespace {

constexpr AttentionShape kUsualShape = {4, 16, 16, 4096, 4096};
constexpr int kUsualHeadDim = 128;

KernelSpec usual_spec(DType dtype, Pass pass) {
  KernelSpec spec;
  spec.pass = pass;
  spec.dtype = dtype;
  spec.head_dim = kUsualHeadDim;
  spec.mask = causal();
  return spec.normalized();
}

double share_of_peak(const KernelSpec& spec, const TileConfig& config, const DeviceInfo& device) {
  const autotune::Model model({spec, kUsualShape}, device);
  return model.roofline_ms() / model.predict(config).ms;
}

/// The reasons of the families before this one that compute something on the device.
std::string why_not_better(const plan::AnalysedSpec& spec, Family chosen, const DeviceInfo& device) {
  const KernelSpec usual = usual_spec(DType::fp16, Pass::forward);
  std::string reasons;
  for (const plan::FamilyTraits& family : plan::families()) {
    if (family.family == chosen) break;
    const Support able = family.supports(spec, device);
    if (able || family.search_space(usual, device).empty()) continue;
    reasons += fmt::format("{}{}: {}", reasons.empty() ? "" : "; ", to_string(family.family), able.reason);
  }
  return reasons;
}

}  // namespace

std::vector<Expectation> expectations_of(const DeviceInfo& device) {
  std::vector<Expectation> all;
  for (const DType dtype : {DType::fp16, DType::bf16, DType::fp32}) {
    const KernelSpec forward = usual_spec(dtype, Pass::forward), backward = usual_spec(dtype, Pass::backward);
    try {
      const TileConfig of_forward = plan::make_plan(forward, kUsualShape, device, {}).config;
      const TileConfig of_backward = plan::make_plan(backward, kUsualShape, device, {}).config;
      all.push_back({dtype, of_forward.family, of_backward.family, share_of_peak(forward, of_forward, device),
                     share_of_peak(backward, of_backward, device),
                     why_not_better(forward, of_forward.family, device)});
    } catch (const Error&) {  // no family can
    }
  }
  return all;
}

std::string to_string(const Expectation& expectation) {
  const auto percent = [](double share) { return std::lround(100 * share); };
  std::string text = fmt::format("{}: forward by {}, at an estimated {}% of the peak, backward by {}, at {}%",
                                 to_string(expectation.dtype), to_string(expectation.forward),
                                 percent(expectation.forward_share), to_string(expectation.backward),
                                 percent(expectation.backward_share));
  if (!expectation.missing.empty()) text += " (" + expectation.missing + ")";
  return text;
}

}  // namespace flashjit::command
