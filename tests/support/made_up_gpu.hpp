// A GPU that is a formula: times that differ from the model's as a real one's do, for tests of the search.
#pragma once

#include <cmath>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>

#include "autotune/meter.hpp"
#include "autotune/model.hpp"

namespace flashjit::test {

/// Each seed is another GPU: families, warps, depths of stages and sizes of tiles are good or bad for reasons
/// that the model does not know; the largest tiles spill; every candidate has a quirk of its own, and every
/// measurement noise.
class MadeUpGpu : public autotune::Meter {
 public:
  MadeUpGpu(const autotune::Problem& problem, const DeviceInfo& device, unsigned seed)
      : model_(problem, device), seed_(seed) {}

  double quirk = 0.015;  ///< of each candidate
  double noise = 0.002;  ///< of each measurement
  double chance = 0;     ///< another number is other noise
  double clock = 0;      ///< seconds that measuring took

  /// The time without noise.
  double true_ms(const TileConfig& c) const {
    const double bc = std::log2(static_cast<double>(c.bc)), br = std::log2(static_cast<double>(c.br));
    const double family = 0.15 * wave(1, static_cast<double>(c.family));
    const double warps = 0.10 * wave(2, c.warps + 10.0 * static_cast<double>(c.family));
    const double shape = 0.12 * std::sin(1.5 * bc + 6 * unit(3)) + 0.12 * std::sin(1.5 * br + 6 * unit(4));
    const double switches = 0.04 * wave(5, c.stages) + (c.q_in_registers ? 0.06 * wave(6, 1) : 0) +
                            (c.d_split > 1 ? 0.08 * wave(7, 1) : 0);
    const double own = quirk * wave(8, static_cast<double>(std::hash<std::string>()(to_string(c)) % 100003));
    return model_.predict(c).ms * std::exp(family + warps + shape + switches + own);
  }
  bool spills(const TileConfig& c) const {
    return static_cast<double>(c.br) * c.bc / c.warps > 3600 + 1200 * unit(9);
  }

  KernelReport prepare(const autotune::Problem& problem, const TileConfig& config) override {
    KernelReport report;
    report.spec = problem.spec;
    report.config = config;
    const bool forward = problem.spec.pass == Pass::forward;
    report.entries.push_back({.entry = forward                         ? "forward"
                                       : config.family == Family::simt ? "backward_dkdv"
                                                                       : "backward",
                              .registers = 128,
                              .spill_bytes = spills(config) ? 32 : 0,
                              .shared_bytes = 1024,
                              .threads = config.warps * 32});
    const std::lock_guard lock(mutex_);
    prepared_.insert(to_string(config));
    return report;
  }

  autotune::Comparison compare(const autotune::Problem&, const TileConfig& reference,
                               std::span<const TileConfig> candidates, int rounds) override {
    const auto measured_ms = [&](const TileConfig& config) {
      const double jitter =
          noise * wave(10, static_cast<double>(++launches_) + 0.37 * chance) / std::sqrt(rounds / 5.0);
      clock += true_ms(config) * rounds / 1e3;
      measured_.insert(to_string(config));
      return true_ms(config) * (1 + jitter);
    };
    autotune::Comparison compared{measured_ms(reference), {}};
    for (const TileConfig& config : candidates)
      compared.ratios.push_back(measured_ms(config) / compared.reference_ms);
    return compared;
  }

  std::size_t prepared() const { return prepared_.size(); }
  std::size_t measured() const { return measured_.size(); }

 private:
  /// In [0, 1), the same for the same GPU and salt.
  double unit(unsigned salt, double x = 0) const {
    const double y = std::sin(12.9898 * (seed_ + 1) + 78.233 * salt + 37.719 * x) * 43758.5453;
    return y - std::floor(y);
  }
  double wave(unsigned salt, double x) const { return 2 * unit(salt, x) - 1; }

  autotune::Model model_;
  unsigned seed_;
  std::mutex mutex_;
  std::set<std::string> prepared_, measured_;
  std::size_t launches_ = 0;
};

}  // namespace flashjit::test
