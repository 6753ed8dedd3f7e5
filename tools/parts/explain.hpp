// A page on one kernel: what was made of a spec, and why.
#pragma once

#include <string>
#include <vector>

#include "flashjit/runtime.hpp"
#include "plan/plan.hpp"

namespace flashjit::command {

/// One pass of a spec, planned, rendered and, where there is a compiler, compiled.
struct Explained {
  plan::ExecutionPlan plan;
  DeviceInfo device;
  std::string source;                ///< as rendered
  std::vector<EntryReport> entries;  ///< registers and spills are 0 unless `compiled`
  std::vector<int> resident;         ///< blocks of each entry that a multiprocessor holds
  bool compiled = false;
  std::string compiler;  ///< its tag; else why there is none
};

/// One HTML file that needs nothing else: of each kernel the family, configuration and where it comes from,
/// the tiles of S that are computed, masked and skipped, registers, spills, shared memory and occupancy, the
/// time that the tuner's model expects, also of other configurations, and the source.
std::string explain_html(const std::vector<Explained>& kernels);

}  // namespace flashjit::command
