// The GPU as the command uses it: a context, and a problem run through Runtime.
#pragma once

#include <memory>

#include "attention.hpp"
#include "device/device_info.hpp"
#include "device/resources.hpp"
#include "flashjit/runtime.hpp"

namespace flashjit::command {

/// The driver that the environment chooses. Throws Error(no_driver) or Error(no_device).
std::shared_ptr<const device::Driver> chosen_driver();

/// Options of a runtime that logs through warn() and tunes nothing by itself.
RuntimeOptions runtime_options();

/// Uploads the problem, fills every output and the workspace with NaN, runs the forward and, where the spec
/// says so, the backward pass, and brings the results back.
Results run_on_gpu(Runtime& runtime, const device::PrimaryContext& gpu, const reference::Problem& problem);

}  // namespace flashjit::command
