// Where the parts of a workspace lie.
#pragma once

#include <cstddef>

#include "plan/family.hpp"

namespace flashjit::plan {

/// Offsets in bytes from the workspace's start, each 256-byte aligned; a part that is not needed has size
/// zero.
struct WorkspaceLayout {
  std::size_t d = 0, row_tangents = 0, dout = 0, lse_padded = 0, row_terms = 0, dq_accum = 0, o_splits = 0,
              lse_splits = 0, dk_splits = 0, dv_splits = 0, semaphores = 0, partial_tiles = 0,
              segments_of_tile = 0, decoded_k = 0, decoded_v = 0;
  std::size_t joined_lengths = 0, joined_keys = 0, joined_queries = 0;
  std::size_t q_mod = 0, k_mod = 0;          ///< Q and K as the programs make them
  std::size_t dq_of_mod = 0, dk_of_mod = 0;  ///< and their gradients
  std::size_t list_count = 0, list_entries = 0, list_rank = 0, term_bounds = 0;
  std::size_t bytes = 0;

  /// The lists come last, so that a call that is given its lists needs only what comes before.
  std::size_t bytes_without_lists() const { return list_count; }
  std::size_t list_bytes() const { return bytes - list_count; }

  bool operator==(const WorkspaceLayout&) const = default;
};

/// seqlen_q rounded up to 128: the row count of D, of the LSE copy, of query values and of the dQ
/// accumulator, so that a tile may write past the last query.
std::int64_t padded_seqlen_q(const AttentionShape& shape);

/// Throws Error(invalid_argument) when the size overflows.
WorkspaceLayout workspace_layout(const WorkspaceNeeds& needs, const KernelSpec& spec,
                                 const AttentionShape& shape);

}  // namespace flashjit::plan
