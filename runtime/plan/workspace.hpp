// Where the parts of a workspace lie.
#pragma once

#include <cstddef>

#include "plan/family.hpp"

namespace flashjit::plan {

/// Offsets in bytes from the workspace's start, each 256-byte aligned; a part that is not needed has size
/// zero.
struct WorkspaceLayout {
  std::size_t d = 0, lse_padded = 0, dq_accum = 0, tickets = 0, list_count = 0, list_entries = 0,
              list_rank = 0;
  std::size_t bytes = 0;

  bool operator==(const WorkspaceLayout&) const = default;
};

/// seqlen_q rounded up to 128: the row count of D, of the LSE copy and of the dQ accumulator, so that a tile
/// may write past the last query.
std::int64_t padded_seqlen_q(const AttentionShape& shape);

/// Throws Error(invalid_argument) when the size overflows.
WorkspaceLayout workspace_layout(const WorkspaceNeeds& needs, const AttentionSpec& spec,
                                 const AttentionShape& shape);

}  // namespace flashjit::plan
