// The Meter that measures on a GPU, through the same Runtime that users call.
#pragma once

#include <memory>
#include <string>

#include "autotune/inputs.hpp"
#include "autotune/meter.hpp"
#include "autotune/tuner.hpp"
#include "device/resources.hpp"

namespace flashjit::autotune {

/// The device of the context, and the versions that timings on it belong to.
/// Throws Error(no_compiler) when there is no NVRTC to tune with.
Setting read_setting(const device::PrimaryContext& context);

/// Candidates live in memory only: nothing is written to the cache. Inputs are random; lengths of key padding
/// are full, the block map is plausible_map()'s, the dropout probability kDefaultDropout.
class DeviceMeter : public Meter {
 public:
  /// The context outlives the meter. `map_density` as plausible_map() takes it.
  explicit DeviceMeter(const device::PrimaryContext& context, double map_density = kDefaultMapDensity);
  ~DeviceMeter() override;

  KernelReport prepare(const Problem& problem, const TileConfig& config) override;
  std::vector<double> median_ms(const Problem& problem, std::span<const TileConfig> configs,
                                int repeats) override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace flashjit::autotune
