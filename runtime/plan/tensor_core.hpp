// What the tensor-core families (sm80, sm90) share: the kernels around the main one, and what all of them
// need.
#pragma once

#include "plan/tiles.hpp"

namespace flashjit::plan {

/// The main kernel of a family: templates/<family>/{forward, backward}.cuh.
Entry main_entry(Family family, const AttentionSpec& spec, int threads, int shared_bytes);

/// The main kernel among those that a call launches with it: row sums and gradients of sinks before a
/// backward pass, lists of tiles where there are some, dQ's conversion or the parts' joining after it.
std::vector<Entry> with_auxiliaries(const AttentionSpec& spec, const TileConfig& config, const Entry& main);

/// The launches of with_auxiliaries(): of the main kernel a block a Q tile forward, a KV tile backward.
std::vector<Launch> tensor_core_launches(const AttentionSpec& spec, const AttentionShape& shape,
                                         const TileConfig& config);
WorkspaceNeeds tensor_core_workspace(const AttentionSpec& spec, const AttentionShape& shape,
                                     const TileConfig& config);

}  // namespace flashjit::plan
