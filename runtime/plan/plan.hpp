// From a spec and a shape to what is compiled and launched. Pure: no device, no environment, no clock.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "plan/family.hpp"
#include "plan/launches.hpp"
#include "plan/records.hpp"
#include "plan/workspace.hpp"

namespace flashjit::plan {

/// A spec at a shape.
struct Problem {
  KernelSpec spec;
  AttentionShape shape;

  bool operator==(const Problem&) const = default;
};
/// What is computed: the problem with a normalized spec, or with the query heads that share K and V folded
/// into queries of one head, which so reads K and V once. That is done to the forward pass of one query a
/// head, as when tokens are generated, where all heads are treated alike. The shape tells whether it was
/// done.
Problem fold_gqa(const KernelSpec& spec, const AttentionShape& shape);

/// Everything about a call that does not depend on its pointers: a kernel at a shape.
struct ExecutionPlan : KernelPlan {
  AttentionShape shape = {};  ///< of what is computed
  bool fold_gqa = false;      ///< the heads of the arguments are to be folded as the shape's are
  ConfigSource config_source = ConfigSource::heuristic;
  std::string tuned_nvrtc = {};  ///< whose code the record has timed; empty: not known, or no record's choice
  std::vector<Launch> launches = {};
  WorkspaceNeeds needs = {};
  WorkspaceLayout workspace = {};
  std::int64_t heads_cleared = 0;  ///< Params::heads_cleared
  std::int64_t lpt_heads = 0;      ///< Params::lpt_heads: the last heads, whose KV tiles come longest first
  std::int64_t head_groups = 1;    ///< Params::head_groups
  /// The call's decodes, which this kernel skips: see divided_batch.hpp. They use the workspace after it.
  std::shared_ptr<const ExecutionPlan> decodes = {};
};

/// The given configuration, else the tuned record's, else the nearest shape's, else the first able family's
/// heuristic. Throws Error(unsupported) with every family's reason, or Error(invalid_argument) when the given
/// configuration is not admitted.
ExecutionPlan make_plan(const KernelSpec& spec, const AttentionShape& shape, const DeviceInfo& device,
                        const TuningRecords& records, const std::optional<TileConfig>& given = {},
                        const Checks& checks = {});

}  // namespace flashjit::plan
