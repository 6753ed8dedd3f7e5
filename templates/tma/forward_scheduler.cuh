// The tile scheduler of the forward pass's CTAs.
#pragma once

#include "flashjit/tma/cluster_parts.cuh"
#include "flashjit/tma/fixed_parts.cuh"
#include "flashjit/tma/ragged_tiles.cuh"

namespace flashjit::tma {

/// CTAs have segments of all work.
template <class P>
using SegmentScheduler = Conditional<P::kFixedParts, FixedPartScheduler<P>, StreamKScheduler<P>>;
/// They take work tile after work tile.
template <class P>
using WorkTileScheduler = Conditional<P::kRaggedTiles, RaggedTileScheduler<P>, TileScheduler<P>>;
template <class P>
using ForwardScheduler =
    Conditional<kSharesWork<P>, SegmentScheduler<P>,
                Conditional<P::kClusterSplit, ClusterScheduler<P>, WorkTileScheduler<P>>>;

/// The Q tiles among which rows without keys are looked for.
template <class P>
using AllTiles = Conditional<P::kRaggedTiles, RaggedTiles<P>, GridTiles<P>>;

}  // namespace flashjit::tma
