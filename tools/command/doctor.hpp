// What flashjit doctor finds, for reports.
#pragma once

#include "command.hpp"

namespace flashjit::command {

/// [{"subject", "state", "text"}]: driver, devices, what attention gets there, NVRTC, folders, variables.
Json findings_json();

}  // namespace flashjit::command
