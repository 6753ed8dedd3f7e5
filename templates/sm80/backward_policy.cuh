// What the backward pass decides from its problem alone: how warps share a tile, and where dQ waits a step.
#pragma once

#include "flashjit/common/problem.cuh"
#include "flashjit/sm80/layout.cuh"

namespace flashjit::sm80 {

/// How the warps share the Br x head_dim tile of dQ: `rows` of them along Br, the rest along head_dim, such
/// that they read the fewest operands from shared memory. Wide, beside dK and dV, with the fewest registers.
template <class P>
constexpr int dq_warp_rows() {
  if (is_wide(P::kHeadDim, P::kHeadDimV) || P::kIndices)
    return P::kBr / 16 < P::kWarps ? P::kBr / 16 : P::kWarps;
  int best = 1, least = 1 << 30;
  for (int rows = 1; rows <= P::kWarps; rows *= 2) {
    if (P::kWarps % rows != 0 || P::kBr / 16 % rows != 0) continue;
    const int units = round_up(P::kHeadDim, 16) / 16, across = P::kWarps / rows;
    const int traffic = P::kBr / rows + (units + across - 1) / across * 16;
    if (traffic < least) least = traffic, best = rows;
  }
  return best;
}

template <class P>
struct BackwardPolicy {
  static constexpr int kThreads = P::kWarps * 32;
  // backward_wide.cuh, backward_of_indices.cuh
  static constexpr bool kWide = is_wide(P::kHeadDim, P::kHeadDimV) || P::kIndices;
  static constexpr bool kPairs =
      !kWide && P::kDSplit == 2;  // two warps have the same rows: backward_pairs.cuh
  static constexpr int kRowWarps = P::kWarps / P::kDSplit;  // warps along the KV rows
  static constexpr int kMt = P::kBc / (16 * kRowWarps);     // m16 tiles of KV rows a warp owns
  static constexpr int kParts = kWide ? score_parts(P::kBr, P::kDSplit) : 1;  // warps with different queries
  static constexpr int kNt = P::kBr / 8 / kParts;                             // n8 tiles of queries
  static constexpr int kDUnits = round_up(P::kHeadDim, 16) / 16;              // n16 units of dK and dQ
  static constexpr int kDvUnits = round_up(P::kHeadDimV, 16) / 16;            // of dV
  static constexpr int kDqRowWarps = dq_warp_rows<P>();
  static constexpr int kDqColumnWarps = P::kWarps / kDqRowWarps;
  static constexpr int kDqMt = P::kBr / 16 / kDqRowWarps;
  // Wide, a warp computes its units of dQ in passes, so that few registers are enough.
  static constexpr int kDqUnitsOfWarp = (kDUnits + kDqColumnWarps - 1) / kDqColumnWarps;
  static constexpr int kDqPasses = kWide ? (kDqMt * kDqUnitsOfWarp + 5) / 6 : 1;
  static constexpr int kDqUnits = (kDqUnitsOfWarp + kDqPasses - 1) / kDqPasses;
  static constexpr bool kGuardDq = kDqUnits * kDqPasses * kDqColumnWarps != kDUnits;
  // A warp's units of dK and of dV: all, but for wide dimensions.
  static constexpr int kColumnWarps = kWide ? P::kDSplit : 1;
  static constexpr int kOwnDUnits = units_of(P::kHeadDim, kColumnWarps),
                       kOwnDvUnits = units_of(P::kHeadDimV, kColumnWarps);
  static constexpr bool kGuardDk = kOwnDUnits * kColumnWarps != kDUnits,
                        kGuardDv = kOwnDvUnits * kColumnWarps != kDvUnits;
  static constexpr int kQPitch = pitch(P::kHeadDim), kVPitch = pitch(P::kHeadDimV), kDsPitch = pitch(P::kBr);
  static constexpr int kTerms = P::kTwoTerms ? 2 : 1, kDsTermBytes = tile_bytes(P::kBc, P::kBr);
  static constexpr int kDsBytes = kTerms * kDsTermBytes;
  static constexpr int kQBytes = tile_bytes(P::kBr, P::kHeadDim);
  static constexpr int kDoutBytes = tile_bytes(P::kBr, P::kHeadDimV);
  /// Values of a pair that one warp of two hands to the other: P, the slope, Q K^T.
  static constexpr int kExchanged = P::kExchanged;
  static constexpr BackwardLayout kLayout{P::kBr,     P::kBc,     P::kHeadDim, P::kHeadDimV,
                                          P::kStages, kExchanged, P::kIndices, kTerms};
  static_assert(kLayout.bytes() == P::kSharedBytes, "what the planner counts on");
  /// With more stages than one dQ of a tile comes a step late: then a step has one barrier, and a warp that
  /// would wait for another's P has work.
  static constexpr bool kLateDq = P::kStages > 1 && !P::kDeterministic && !kWide;
  static constexpr int kPendingCopies = P::kStages == 1 ? 0 : P::kStages - 2;
};

/// Wide: which of the warps that share its rows this one is.
template <class P>
__device__ __forceinline__ int column_part() {
  return BackwardPolicy<P>::kWide ? static_cast<int>(threadIdx.x) / 32 / BackwardPolicy<P>::kRowWarps : 0;
}

/// S^T of a tile, then P^T; and dP^T, then dS^T: a warp's m16n8 tiles, four values a lane.
template <class P>
using BackwardScores = float[BackwardPolicy<P>::kMt][BackwardPolicy<P>::kNt][4];
/// The same where `kKept`, else next to nothing.
template <class P, bool kKept>
using KeptScores = float[kKept ? BackwardPolicy<P>::kMt : 1][kKept ? BackwardPolicy<P>::kNt : 1][4];
template <class P>
using Slopes = KeptScores<P, P::kScoreGrad>;
template <class P>
using Dots = KeptScores<P, (P::kCaptureGrads > 0)>;

}  // namespace flashjit::sm80
