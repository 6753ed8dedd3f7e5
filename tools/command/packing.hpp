// Many kernels built into one folder, in parallel, with the records that make a runtime choose them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "build.hpp"

namespace flashjit::command {

/// What goes into a pack: one kernel, and the shape that it is chosen for.
struct PackItem {
  DeviceInfo device;
  plan::ExecutionPlan plan;
  /// The runtime chooses it again for this shape and others: it needs no record.
  bool chosen_again = false;
};
/// "sm_90a fwd:bf16:d128 sm80:br128:...".
std::string to_string(const PackItem& item);
/// A plan's kernels: its own and, in a divided batch, the decodes'. No record says that a batch is divided,
/// so the runtime chooses these again.
std::vector<PackItem> items_of(const DeviceInfo& device, plan::ExecutionPlan plan, bool chosen_again = false);

struct PackOutcome {
  enum class State : std::uint8_t { skipped, compiled, kept, failed };
  State state = State::skipped;  ///< until it is built: after Ctrl-C some stay so
  KernelReport report;
  bool spills_in_main_loop = false;
  std::string message, detail;  ///< why it failed
};
std::string to_string(PackOutcome::State state);  // "skipped", "compiled", "already there", "failed"

/// Builds every item that `store` lacks with `jobs` threads (0: one a processor), and writes its record. The
/// outcomes are in the order of the items. A kernel that fails is an outcome; a folder that cannot be written
/// is Error(io).
std::vector<PackOutcome> pack_all(const std::vector<PackItem>& items, cache::Store& store,
                                  const render::TemplateSet& templates, const compile::Compiler& compiler,
                                  int jobs);

Json to_json(const PackItem& item, const PackOutcome& outcome);
/// Each failed item's message and log, on stderr.
void warn_of_failures(const std::vector<PackItem>& items, const std::vector<PackOutcome>& outcomes);
std::size_t count(const std::vector<PackOutcome>& outcomes, PackOutcome::State state);

}  // namespace flashjit::command
