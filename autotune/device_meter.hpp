// The Meter that measures on a GPU, through the same Runtime that users call.
#pragma once

#include <memory>
#include <string>

#include "autotune/inputs.hpp"
#include "autotune/meter.hpp"
#include "autotune/tuner.hpp"
#include "device/resources.hpp"

namespace flashjit::autotune {

/// Options of the Runtimes that compile candidates: they keep nothing on disk and log nothing.
RuntimeOptions candidate_options();

struct MeterOptions {
  double map_density = kDefaultMapDensity;  ///< as plausible_map() takes it
  RuntimeOptions runtime = candidate_options();
};

/// The device of the context, and the versions that timings on it belong to.
/// Throws Error(no_compiler) when there is no NVRTC to tune with.
Setting read_setting(const device::Context& context, const RuntimeOptions& options = candidate_options());

/// Candidates live in memory only: nothing is written to the cache. Inputs are random; lengths of key padding
/// are full, the block map is plausible_map()'s, the dropout probability kDefaultDropout. All work is on a
/// stream of its own.
class DeviceMeter : public Meter {
 public:
  /// The context outlives the meter.
  explicit DeviceMeter(const device::Context& context, MeterOptions options = {});
  ~DeviceMeter() override;

  KernelReport prepare(const Problem& problem, const TileConfig& config) override;
  Comparison compare(const Problem& problem, const TileConfig& reference,
                     std::span<const TileConfig> candidates, int rounds) override;
  device::GpuState state() override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace flashjit::autotune
