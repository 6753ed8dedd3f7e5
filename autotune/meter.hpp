// How the tuner compiles and times a candidate: an interface, so that the search is tested without a GPU.
#pragma once

#include <span>
#include <vector>

#include "autotune/space.hpp"
#include "device/sensors.hpp"
#include "flashjit/error.hpp"
#include "flashjit/runtime.hpp"

namespace flashjit::autotune {

/// How long candidates take beside a reference: clocks that fall slow both alike.
struct Comparison {
  double reference_ms = 0;     ///< median
  std::vector<double> ratios;  ///< of each candidate's time to the reference's
};

/// What is launched, in rounds of the reference (0) and the candidates (1, 2, ...): back and forth, 0 1 2 2 1
/// 0 0 1 2 ..., so that over two rounds a clock that falls steadily slows all alike.
std::vector<std::size_t> launch_order(std::size_t candidates, int rounds);
/// Takes the times of launches in that order; a ratio is the median over every two rounds.
Comparison compare_times(const std::vector<double>& ms, std::size_t candidates);

class Meter {
 public:
  virtual ~Meter() = default;

  /// Compiles and loads a candidate. Called from several threads at once.
  /// Throws Error(compile_failed), Error(unsupported) or Error(invalid_argument) when this candidate cannot
  /// be had; any other Error ends the tuning.
  virtual KernelReport prepare(const Problem& problem, const TileConfig& config) = 0;

  /// Runs the reference until the clocks are steady, as they are while a model runs, and then launches all of
  /// them in turn, see launch_order(). All were prepared. Called from one thread.
  /// Throws Error(unsupported) when one cannot be launched though the device is sound; any other Error ends
  /// the tuning.
  virtual Comparison compare(const Problem& problem, const TileConfig& reference,
                             std::span<const TileConfig> candidates, int rounds) = 0;

  /// The GPU's clocks and temperature. Call it right after a measurement, before they change. Unknown, unless
  /// the meter has a GPU that reports it.
  virtual device::GpuState state() { return {}; }
};

/// Whether an error of these says that one candidate cannot be had, and nothing of the others.
inline bool rules_out_candidate_only(ErrorCode code) {
  return code == ErrorCode::compile_failed || code == ErrorCode::unsupported ||
         code == ErrorCode::invalid_argument;
}

}  // namespace flashjit::autotune
