// Compile-time switches of the forward pass's schedule and copies: what each decides, and the measurement
// that decided it (H100, ../sm90/NOTES.md).
#pragma once

#include "flashjit/common/kv_source.cuh"
#include "flashjit/common/tile_walk.cuh"
#include "flashjit/common/visible.cuh"
#include "flashjit/tma/tile_layout.cuh"

namespace flashjit::tma {

// --- Schedule ---------------------------------------------------------------------------------------------

/// Q tiles that a CTA computes at a time. Each is a slot with its own consumer warpgroups, producer warps and
/// shared memory. One CTA of two slots leaves a thread 112 registers, two CTAs of one slot 104, one too few
/// for 128 x 64. d64: butterfly 401 -> 384 us, windows +7 to +18%, causal 384 to 1k +5 to +10%, longer rows
/// slower. ../sm90/NOTES.md#two-q-tiles-per-cta
template <class P>
constexpr int kQTilesPerCta = P::kQTilesPerCta;

/// LPT order: Q tiles of several heads come longest first. A mask of keys alone leaves all rows alike, and
/// tiles that must be evaluated to be classed are scattered: without a known long row, heads one after the
/// other keep their K and V in L2. Butterfly +4.4%, padding +8% (d64) to +23% (d256).
/// ../sm90/NOTES.md#walking-lists
template <class P>
constexpr bool kQTileLptOrder = P::kHasMask&& P::kMaskBlockQ > 0 && !P::kEvaluateTiles;

/// Without a mask no heads are mixed, so one division finds a Q tile instead of eight, which a CTA's first
/// load waits for. d128, 1k: 18.9 -> 18.8 us; d64 -0.5 to -1%, as ptxas orders its softmax otherwise.
/// ../sm90/NOTES.md#exponentials-and-instructions
template <class P>
constexpr bool kHeadMajorOrder = !P::kHasMask && P::kHeadDimV > 64;

/// Tail-wave split: without a mask all Q tiles cost the same, so the tiles of the last, partial wave are
/// split by warpgroups among more CTAs. d64 512 to 4k +2.2 to +2.9%, d128 8k and 16k +1.7%.
/// ../sm90/NOTES.md#tail-wave-split
template <class P>
constexpr bool kSplitTailWave = P::kSplitTailWave;

/// A mask that ends within a KV tile, as causal ones do, leaves some warpgroups without its second half: the
/// softmax of a Q tile's first step is then over a partial KV tile. Causal d64 512 +3.0%, 1k +1.5%, 2k +2.9%;
/// d128 0, d256 -0.8%, where products take longer than the softmax; two Q tiles at a time spill.
/// ../sm90/NOTES.md#the-first-and-the-last-product-of-a-q-tile
template <class P>
constexpr int kPartialKvTile = (P::kBc / 2 + 15) / 16 * 16;
template <class P>
constexpr bool kPartialFirstStep =
    P::kHasMask && !kLists<P> && !P::kPackGqa && P::kHeadDim <= 64 && kPartialKvTile<P> != P::kBc &&
    (P::kBr > kWarpgroupRows) && kQTilesPerCta<P> == 1 && !P::kQCodes;

// --- Columns and rows of a CTA ----------------------------------------------------------------------------

/// Above 256 columns of V a warpgroup's registers do not hold its rows of O: then two warpgroups have the
/// same rows (d_split), each for half of O's columns, and the first computes S and P for both. See
/// forward_wide.cuh.
template <class P>
constexpr bool kSharesRows = (P::kDSplit > 1);
template <class P>
constexpr int kOwnColumns = own_columns(P::kHeadDimV, P::kDSplit);
/// With shared_kv the two then release their columns of a tile apart, as halves with barriers of their
/// own: the right half, columns of V of the second warpgroup, has V's, the left one, which is all others,
/// K's.
template <class P>
constexpr bool kTileInHalves = (kSharesRows<P> && P::kSharedKv);
/// Which 64 rows of a Q tile a warpgroup has.
template <class P>
__device__ __forceinline__ int row_group(int wg) {
  return kSharesRows<P> ? 0 : wg;
}

// --- Copies -----------------------------------------------------------------------------------------------

/// Warps that copy K and V row by row, where TMA cannot.
constexpr int kGatherWarps = 2;

}  // namespace flashjit::tma
