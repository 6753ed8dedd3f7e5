// Predicts what a configuration takes, without compiling it: orders and prunes the search.
#pragma once

#include <string>
#include <vector>

#include "autotune/coverage.hpp"
#include "autotune/inputs.hpp"
#include "autotune/problem.hpp"

namespace flashjit::autotune {

/// What a GPU does at best. One common product of each architecture gives clocks and memory.
struct Rates {
  double clocks_per_ms;
  double group_macs, tensor_macs;  ///< 16-bit multiply-adds a clock and multiprocessor: wgmma, mma.sync
  double plain_macs;               ///< fp32
  double exponentials;             ///< a clock and multiprocessor
  double bytes_per_ms;             ///< of device memory
};
Rates rates_of(const DeviceInfo& device);

/// The time that no kernel beats: products at the tensor cores' peak, exponentials, or each tensor read or
/// written once, whichever is longest.
double roofline_ms(const KernelSpec& spec, const Work& work, const DeviceInfo& device);

/// Where the time of one configuration goes.
struct Prediction {
  double ms = 0;            ///< one call
  double tile_clocks = 0;   ///< of one multiprocessor, for one visited tile
  double tiles = 0;         ///< visited, of all heads
  double waves = 0;         ///< rounds of thread blocks, not rounded up
  int blocks_resident = 0;  ///< on a multiprocessor at once
  std::string bound;        ///< the busiest unit: "products", "exponentials", "arithmetic", "shared memory",
                            ///< "L2 cache", "reductions"
};

/// The model of one problem.
class Model {
 public:
  Model(const Problem& problem, const DeviceInfo& device, double map_density = kDefaultMapDensity);

  Prediction predict(const TileConfig& config) const;
  const Problem& problem() const { return problem_; }
  const plan::AnalysedSpec& spec() const { return spec_; }  ///< the problem's
  const DeviceInfo& device() const { return device_; }
  double roofline_ms() const { return autotune::roofline_ms(problem_.spec, work_, device_); }
  const Work& work() const { return work_; }

 private:
  Problem problem_;
  plan::AnalysedSpec spec_;
  DeviceInfo device_;
  Rates rates_;
  double program_operations_;  ///< of a pair
  Coverage coverage_;
  Work work_;
};

}  // namespace flashjit::autotune
