// What the backward pass decides when it is compiled: how CTAs and warpgroups share a tile, and every
// switch that was measured (H100, NOTES.md). To tune the kernel, begin here.
#pragma once

#include "flashjit/async/warp_roles.cuh"
#include "flashjit/common/tile_walk.cuh"
#include "flashjit/sm90/dq_fragments.cuh"

namespace flashjit::sm90 {

template <class P>
struct BackwardPolicy {
  static constexpr BackwardLayout kLayout{.br = P::kBr,
                                          .bc = P::kBc,
                                          .head_dim = P::kHeadDim,
                                          .head_dim_v = P::kHeadDimV,
                                          .stages = P::kStages,
                                          .reads_bias_tile = P::kBiasTile,
                                          .reads_row_terms = P::kScoreRowTerm,
                                          .own_tiles = kOwnTiles<P>};
  static_assert(kLayout.bytes() == P::kSharedBytes, "what the planner counts on");

  // --- How a tile is shared -------------------------------------------------------------------------------

  // The CTAs of a cluster share a KV tile: each has kKeys of its keys. NOTES.md#clusters-above-d128,
  // NOTES.md#clusters-that-hold-all-keys-of-a-row
  static constexpr int kClusterSize = kLayout.cluster(), kKeys = kLayout.keys();
  static constexpr bool kExchangesDs = kLayout.exchanges_ds();  ///< each CTA computes some columns of dQ
  // Then with a fifth slice of columns, which warpgroups share, the other CTA's dS comes over P.
  static constexpr int kFifthSlice = kLayout.fifth_slice();
  static constexpr bool kOtherDsOverP = kLayout.other_ds_over_p();
  static constexpr bool kSumsDq = kLayout.sums_dq();  ///< each CTA sums up some columns of all CTAs' dQ
  // Or each CTA has half of all columns. NOTES.md#columns-split-above-d256
  static constexpr bool kSplitsColumns = kLayout.splits_columns();
  /// A CTA's first key of the KV tile.
  static __device__ int first_key_of_cta(int rank) { return kSplitsColumns ? 0 : rank * kKeys; }
  // A CTA's columns of a tensor.
  static __device__ int first_column(int columns) {
    return kSplitsColumns ? rank() * cta_columns(columns, true) : 0;
  }
  static __device__ int end_column(int columns) {
    return kSplitsColumns ? min(columns, first_column(columns) + cta_columns(columns, true)) : columns;
  }

  // Two consumer warpgroups share a CTA's keys: each has 64 of 128 keys, or, "wide", both have the same
  // 64 and each half of the queries of S and dP and half of the columns of dK and dV. Or each has a KV tile
  // of its own, in a slot of shared memory. NOTES.md#kv-tiles-of-64-keys, NOTES.md#blocks-of-64-rows
  static constexpr int kSlots = kLayout.slots(), kWgs = kDqWgs / kSlots;
  static constexpr bool kWide = kLayout.wide();
  static constexpr int kCtaDim = kLayout.cta_dim(), kCtaDimV = kLayout.cta_dim_v();
  static constexpr int kDim = kLayout.columns(), kDimV = kLayout.columns_v();  // in shared memory
  static constexpr int kStageRows = kLayout.rows();
  static constexpr int kWgQueries = kWide ? P::kBr / 2 : kStageRows;
  static constexpr int kFirstDim = first_wg_columns(kLayout.shared_dim()),
                       kFirstDimV = first_wg_columns(kLayout.shared_dim_v());
  static constexpr int kWgDim = kLayout.wg_dim(), kWgDimV = kLayout.wg_dim_v();
  /// A warpgroup's columns of dK in whole slices; its other columns are in the fifth.
  static constexpr int kWgSlices = kWgDim - kFifthSlice / 2;
  static_assert(kKeys == (kWide || kOwnTiles<P> ? 64 : 128) && (P::kBr == 64 || (P::kBr == 128 && !kWide)));

  /// A warpgroup's first row and column of a CTA's S^T and dP^T.
  static __device__ int first_row(int wg) { return kWide || kOwnTiles<P> ? 0 : wg * 64; }
  static __device__ int first_query(int wg) { return kWide ? wg * kWgQueries : 0; }
  /// The queries whose P and dS a warpgroup computes: all of these, or half where CTAs split columns.
  static constexpr int kPairQueries = kSplitsColumns ? kWgQueries / 2 : kWgQueries;
  static __device__ int first_pair_query(int wg) {
    return kSplitsColumns ? wg * kWgQueries + rank() * kPairQueries : kWide ? wg * kWgQueries : 0;
  }

  // A warpgroup computes 64 rows of dQ where a Q tile has 128, else some of the columns.
  // NOTES.md#q-tiles-of-128-rows-at-d64
  static constexpr bool kSplitsDqRows = P::kBr == 128;
  static constexpr int kDqColumns = kLayout.dq_columns(), kDqSlices = kDqColumns - kFifthSlice / 4;
  /// Which CTA of the cluster this is.
  static __device__ int rank() { return kClusterSize > 1 ? cluster_rank() : 0; }
  /// Which of the Q tile's parts of dQ a warpgroup computes, and the part's first row and column.
  static __device__ int dq_part(int wg) { return (kExchangesDs || kSplitsColumns ? rank() * kWgs : 0) + wg; }
  static __device__ int first_dq_row(int wg) { return kSplitsDqRows ? wg * kDqRows : 0; }
  static __device__ int first_dq_column(int wg) {
    return kSplitsDqRows    ? 0
           : kSplitsColumns ? first_column(P::kHeadDim) + wg * kFirstDim
                            : dq_part(wg) * kDqSlices;
  }
  // In the fifth slice, a warpgroup's first column of dK, and of dQ.
  static __device__ int fifth_dk_column(int wg) { return kMostCtaColumns + wg * (kFifthSlice / 2); }
  static __device__ int fifth_dq_column(int wg) { return kMostCtaColumns + dq_part(wg) * (kFifthSlice / 4); }
  // dQ leaves through shared memory, eight columns a step: the first kDqStepsInDout steps lie over dO, the
  // next kDqStepsInQ over Q, the others in memory of their own.
  static constexpr int kDqSteps = kDqColumns / 8;
  /// Columns that it hands on, without the fifth slice.
  static __device__ int own_dq_columns(int wg) {
    return kFifthSlice > 0 ? kDqSlices : wg == 0 ? kLayout.own_dq_columns(0) : kDqColumns;
  }
  /// Wide, the thread that adds dQ to global memory releases the stage.
  static constexpr bool kAdderReleases = kWide && (!kSplitsColumns || kLayout.is_dq_over_stage());
  static constexpr int kDqStepsInDout = kLayout.dq_within_dout() / kDqStepBytes;
  static constexpr int kDqStepsInQ = kLayout.dq_within_q() / kDqStepBytes;
  /// The steps of each warpgroup that one CTA of the cluster sums up.
  static constexpr int kSummedSteps = kDqSteps / kClusterSize;

  // --- Switches -------------------------------------------------------------------------------------------

  /// The roles of warpgroups. The producer's additions to dQ need 56 registers; 216 and 48 spill 460 to 640
  /// bytes. NOTES.md#dq-zeros-additions-and-conversion
  static constexpr WarpgroupRole kProducer{.first = 0, .registers = 56, .gives = true};
  static constexpr WarpgroupRole kConsumers{.first = 1, .registers = 224, .gives = false};
  /// The first KV tile and Q tile are loaded before their stats are read.
  static constexpr bool kLoadsAhead = !kExchangesDs && !kSplitsColumns && !kOwnTiles<P>;
  /// Where CTAs exchange dS there is no room for a second dO.
  static constexpr int kDoutStages = kLayout.dout_stages();

  /// The scores read a bias tile in shared memory.
  static constexpr bool kHasBiasTile = kLayout.has_bias_tile();
  // The warps that add dQ also add gradients of captures from dS in shared memory: of key - query, and of
  // the bias tile. Up to 64 columns the consumers have registers to add the latter themselves: 2876 us, by
  // those warps 3152; above, d128 4014 -> 3586. NOTES.md#gradients-of-captures
  static constexpr bool kAddsBiasGrad = P::kBiasTileGrad && P::kHeadDim > 64;
  static constexpr int kGradsFromDs = P::kDifferenceGrads + kAddsBiasGrad;
  static constexpr bool kReadsDs = kGradsFromDs > 0;
  template <class Addition>
  static constexpr bool is_from_ds(Addition which) {
    return which.kPattern == AccumulationPattern::by_difference ||
           (kAddsBiasGrad && which.kPattern == AccumulationPattern::own);
  }

  /// The score's column term of a thread's keys is found before the wait for the products. With lengths and
  /// more than 64 columns there are no registers for it, unless the score has a row term, too: then finding
  /// it pair by pair takes more. Key bias d64 3317 -> 2720 us, d128 2395 -> 2349.
  /// NOTES.md#row-terms-in-the-backward-pass
  static constexpr bool kFindsColumnTermsEarly =
      P::kScoreColumnTerm && (P::kHeadDim <= 64 || P::kScoreRowTerm || !kOutOfRangeKeys<P>);
  /// Dropout's bits are drawn while S is computed. Wide, registers suffice to draw them beside dP, too.
  static constexpr bool kDrawsBesideDp = kWide;
  /// S starts before it is known whether there is a Q tile. Where S is read while dP is computed, ptxas
  /// serialises all products then.
  static constexpr bool kStartsSEarly = !kOutOfRangeKeys<P> && !kSplitsColumns;
  /// dS of sixteen queries is stored when the next queries' is computed. Scores of programs leave no
  /// registers for it.
  static constexpr bool kStoresDsLate = !P::kHasScore && !P::kDropout && !P::kMaskTerms;
  /// The loops that clear rows are unrolled. Elsewhere the values that live across the copies spill (24 to 32
  /// bytes). NOTES.md#order-of-a-step-registers
  static constexpr bool kUnrollsClearing = kWide || kSumsDq || P::kHeadDim <= 64;
};

}  // namespace flashjit::sm90
