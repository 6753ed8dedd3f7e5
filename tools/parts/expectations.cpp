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

/// What the planner chooses, and what the tuner's model expects of it.
struct Estimate {
  Family family;
  double share_of_peak, ms;
};
Estimate estimate(const KernelSpec& spec, const DeviceInfo& device) {
  const TileConfig config = plan::make_plan(spec, kUsualShape, device, {}).config;
  const autotune::Model model({spec, kUsualShape}, device);
  const double ms = model.predict(config).ms;
  return {config.family, model.roofline_ms() / ms, ms};
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
  double ms_of_fp16 = 0;
  for (const DType dtype : {DType::fp16, DType::bf16, DType::fp32}) {
    const KernelSpec spec = usual_spec(dtype, Pass::forward);
    try {
      const Estimate forward = estimate(spec, device),
                     backward = estimate(usual_spec(dtype, Pass::backward), device);
      const double ms = forward.ms + backward.ms;
      if (dtype == DType::fp16) ms_of_fp16 = ms;
      all.push_back({dtype, forward.family, backward.family, forward.share_of_peak, backward.share_of_peak,
                     why_not_better(spec, forward.family, device), ms / ms_of_fp16});
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
  if (expectation.times_of_fp16 >= 1.5)
    text +=
        fmt::format(", in an estimated {} times the time of fp16", std::lround(expectation.times_of_fp16));
  if (!expectation.missing.empty()) text += " (" + expectation.missing + ")";
  return text;
}

}  // namespace flashjit::command
