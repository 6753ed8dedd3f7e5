// What one call of a kernel launches.
#pragma once

#include "plan/kernel_plan.hpp"

namespace flashjit::plan {

/// In which calls there is a launch: in those that are given tile lists, lists need not be made.
enum class LaunchedWhen : std::uint8_t { always, lists_are_made, lists_are_given };

/// One launch: an entry by its place in the kernel's list, and a one-dimensional grid.
struct Launch {
  std::size_t entry = 0;
  std::int64_t blocks = 0;  ///< 0: nothing to do, skipped. Of launches_of(): clusters
  LaunchedWhen when = LaunchedWhen::always;
  bool early = false;  ///< may start before the launch before it has ended, for which it waits by itself

  bool operator==(const Launch&) const = default;
};

/// One of each entry, in order: of the main loop a block a tile, whatever the device holds at once.
std::vector<Launch> launches_of(const KernelPlan& kernel, const AttentionShape& shape);

/// The launch of the first entry that holds a main loop.
const Launch& main_launch(const KernelPlan& kernel, const std::vector<Launch>& launches);

}  // namespace flashjit::plan
