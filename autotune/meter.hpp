// How the tuner compiles and times a candidate: an interface, so that the search is tested without a GPU.
#pragma once

#include <span>
#include <vector>

#include "autotune/space.hpp"
#include "device/sensors.hpp"
#include "flashjit/error.hpp"
#include "flashjit/runtime.hpp"

namespace flashjit::autotune {

class Meter {
 public:
  virtual ~Meter() = default;

  /// Compiles and loads a candidate. Called from several threads at once.
  /// Throws Error(compile_failed), Error(unsupported) or Error(invalid_argument) when this candidate cannot
  /// be had; any other Error ends the tuning.
  virtual KernelReport prepare(const Problem& problem, const TileConfig& config) = 0;

  /// Median time of one call of each candidate in ms, all of them prepared: `repeats` rounds in which every
  /// candidate is launched once, so that a drift of the clocks meets all alike. Called from one thread.
  /// Throws Error(unsupported) when a candidate cannot be launched though the device is sound; any other
  /// Error ends the tuning.
  virtual std::vector<double> median_ms(const Problem& problem, std::span<const TileConfig> configs,
                                        int repeats) = 0;

  /// While on, nothing that was compiled before is used, so that a search takes as long as the first time.
  /// Called while nothing is prepared.
  virtual void compile_anew(bool /*on*/) {}

  /// The GPU's clocks and temperature; call it right after a measurement, while they are those of the
  /// measurement.
  /// Unknown, unless the meter has a GPU that reports it.
  virtual device::GpuState state() { return {}; }
};

/// Whether an error of these says that one candidate cannot be had, and nothing of the others.
inline bool rules_out_candidate_only(ErrorCode code) {
  return code == ErrorCode::compile_failed || code == ErrorCode::unsupported ||
         code == ErrorCode::invalid_argument;
}

}  // namespace flashjit::autotune
