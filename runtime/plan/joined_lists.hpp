// Lists of keys of neighbouring queries, joined before the main loop of family sm90 (TileConfig::join_lists),
// so that a Q tile has several queries where the heads of one leave rows idle.
#pragma once

#include <cstdint>

#include "flashjit/error.hpp"
#include "plan/kernel_plan.hpp"

namespace flashjit::plan {

/// Whether lists of the spec can be joined.
Support may_join_lists(const AnalysedSpec& spec);

/// Whether tiles of several queries are quicker: measured over latents.
bool gains_by_joined_lists(const AnalysedSpec& spec, const AttentionShape& shape);

/// Adds the entry before all others.
void add_join_lists(KernelPlan& kernel);

/// How many joined lists there are, and how many keys each has room for.
struct JoinedLists {
  std::int64_t count = 0, capacity = 0;

  bool operator==(const JoinedLists&) const = default;
};
JoinedLists joined_lists(const KernelPlan& kernel, const AttentionShape& shape);

}  // namespace flashjit::plan
