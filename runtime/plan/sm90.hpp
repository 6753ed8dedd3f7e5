// What the renderer and the tuner must know of family sm90 as the planner does.
#pragma once

#include "flashjit/spec.hpp"
#include "templates/common/params.cuh"
#include "templates/sm90/layout.cuh"

namespace flashjit::plan {

/// Q tiles that a block computes at a time: more than one in this family's forward pass alone.
int tiles_at_a_time(const AttentionSpec& spec, const TileConfig& config);

/// Rows of a Q tile of which its list tells whether they meet a KV tile: all together, or in the forward pass
/// each warp group's, where the blocks of a map divide into those but not into whole tiles.
int listed_rows(const AttentionSpec& spec, const TileConfig& config);

/// How the heads that share K and V are packed, where they are; nothing without heads.
PackedHeadsParam packed_heads(const AttentionShape& shape);

/// Q tiles of the forward pass, of any family: so many queries each, of so many sets of heads of a batch
/// entry. A set is one head, or where heads are packed those of a tile.
struct ForwardTiles {
  std::int64_t queries, heads;
};
ForwardTiles forward_tiles(const AttentionShape& shape, const TileConfig& config);

/// Blocks of the forward pass that take neighbouring Q tiles, as TileScheduler in
/// templates/sm90/forward_schedule.cuh has it: two where a mask makes tiles unlike and the kernel shares them
/// out, else one.
int sm90_forward_cluster(const AttentionSpec& spec, const TileConfig& config);

/// The shared memory of the backward pass, as BackwardSmem in templates/sm90/backward_smem.cuh has it.
sm90::BackwardLayout sm90_backward_layout(const AttentionSpec& spec, const TileConfig& config);

/// Whether a KV tile of the backward pass is of a cluster whose blocks sum up dQ; asked of any configuration.
bool clusters_sum_dq(const AttentionSpec& spec, const TileConfig& config);

}  // namespace flashjit::plan
