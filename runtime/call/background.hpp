// Tuning while a service runs. The runtime is below the tuner, and knows only this of it;
// autotune/background.cpp is the other half.
#pragma once

#include <functional>
#include <memory>

#include "call/settings.hpp"
#include "device/resources.hpp"
#include "plan/plan.hpp"

namespace flashjit {

/// A shape in use that deserves tuning.
struct BackgroundJob {
  KernelSpec spec;
  AttentionShape shape;
  TileConfig current;           ///< what calls use until then: the family stays
  std::size_t workspace_bytes;  ///< what callers give, so what the new configuration may need at most
  device::Context context;      ///< the caller's
};

class BackgroundTuner {
 public:
  /// Ends soon: waits for the measurement or compile under way and drops the rest.
  virtual ~BackgroundTuner() = default;
  /// Returns at once. Safe from many threads.
  virtual void want(BackgroundJob job) = 0;
};

/// What is done with a result, on the tuner's thread with the job's context current.
using Adopt = std::function<void(const BackgroundJob& job, const TileConfig& best)>;

using MakeBackgroundTuner = std::function<std::unique_ptr<BackgroundTuner>(const Settings&, Adopt)>;

/// The real one. Settings outlive it.
std::unique_ptr<BackgroundTuner> make_background_tuner(const Settings& settings, Adopt adopt);

}  // namespace flashjit
