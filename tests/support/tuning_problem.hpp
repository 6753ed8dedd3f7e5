// A problem to tune, its candidates, and what a compiler could report of them.
#pragma once

#include <string>
#include <vector>

#include "autotune/meter.hpp"
#include "autotune/model.hpp"
#include "autotune/space.hpp"
#include "autotune/tuner.hpp"
#include "flashjit/flashjit.hpp"
#include "plan/family.hpp"

namespace flashjit::test {

using autotune::Problem;
using autotune::Setting;

inline Problem problem() {
  Problem p;
  p.spec = parse_spec("fwd:bf16:d64:causal").normalized();
  p.shape = parse_shape("b2:hq4:hkv2:sq1024:skv1024");
  return p;
}

inline Setting setting() { return {DeviceInfo::parse("sm_80"), "13.0", "nvrtc13.0", "0.1.0"}; }

inline std::vector<TileConfig> candidates_of(const Problem& p, const DeviceInfo& device,
                                             const std::vector<Family>& families = {}) {
  return autotune::candidates(autotune::Model(p, device), families);
}
inline std::vector<TileConfig> all_candidates() { return candidates_of(problem(), setting().device); }

inline KernelReport report_with(const TileConfig& config, int registers, int spill, int shared) {
  KernelReport report;
  report.config = config;
  for (const plan::Entry& entry : plan::traits(config.family).kernel(problem().spec, config).entries) {
    report.entries.push_back({entry.name, registers, entry.hot ? spill : 0, shared, entry.threads});
  }
  return report;
}

}  // namespace flashjit::test
