// What the forward pass decides from its problem alone: how warps share a tile, and which tricks registers
// allow.
#pragma once

#include "flashjit/common/kv_source.cuh"
#include "flashjit/sm80/layout.cuh"

namespace flashjit::sm80 {

template <class P>
struct ForwardPolicy {
  static constexpr int kThreads = P::kWarps * 32;
  static constexpr bool kSharesRows = P::kDSplit > 1;                   // warps share rows: shared_rows.cuh
  static constexpr int kRowWarps = P::kWarps / P::kDSplit;              // warps along the rows
  static constexpr int kMt = P::kBr / (16 * kRowWarps);                 // m16 tiles of queries a warp owns
  static constexpr int kParts = score_parts(P::kBc, P::kDSplit);        // warps with different keys
  static constexpr int kNt = P::kBc / 8 / kParts;                       // n8 tiles of S
  static constexpr int kOUnitsOfAll = round_up(P::kHeadDimV, 16) / 16;  // n16 units of O
  static constexpr int kOUnits = units_of(P::kHeadDimV, P::kDSplit);    // of a warp
  static constexpr bool kGuardO = kOUnits * P::kDSplit != kOUnitsOfAll;
  static constexpr int kOt = 2 * kOUnits;  // n8 tiles of O
  static constexpr bool kCodeProducts =
      P::Mma::kHasCodes && multiplies_codes(P::kQCodes, P::kKeyScales, P::kArch);
  // Columns of a tile of Q, of two codes where these are multiplied.
  static constexpr int kQColumns = kCodeProducts ? P::kHeadDim / 2 : P::kHeadDim;
  static constexpr int kQSteps = round_up(kQColumns, 16) / 16;
  // Steps of Q K^T at a time.
  static constexpr int kQkUnroll = P::kQInRegisters ? kQSteps : kCodeProducts ? 2 : 8;
  static constexpr int kKvBytes = kScaledKv<P> ? 1 : 2;
  // Columns of a tile of K and V, which has two codes in each.
  static constexpr int kKColumns = P::kHeadDim * kKvBytes / 2, kVColumns = P::kHeadDimV * kKvBytes / 2;
  static constexpr int kVPitch = pitch(P::kSharedKv ? kKColumns : kVColumns);
  static constexpr ForwardLayout kLayout{P::kBr,   P::kBc,        P::kHeadDim, P::kHeadDimV, P::kStages,
                                         kKvBytes, P::kKeyScales, P::kDSplit,  P::kSharedKv};
  static constexpr int kKBytes = kLayout.k_tile(), kVBytes = kLayout.v_tile();
  static_assert(kLayout.bytes() == P::kSharedBytes, "what the planner counts on");

  /// P V of a tile is computed among the softmax of the next one: if registers suffice, and not where small
  /// CTAs are several a multiprocessor and hide each other's waits.
  static constexpr int kLateRegisters =
      forward_registers(kMt, P::kBc, P::kHeadDim, P::kHeadDimV, P::kQInRegisters, true);
  static constexpr bool kLatePv = !kCodeProducts && !kSharesRows && !P::kSharedKv && kLateRegisters <= 192 &&
                                  !P::kDropout && !P::kBlockMap && !P::kSkipSoftmax && !P::kTwoTerms &&
                                  (kMt > 1 || P::kWarps > 4);
  /// Where codes are multiplied P is as large as this power of two, so that small P are not lost: e4m3 has
  /// 2^-9 to 448, and a row's largest P exactly.
  static constexpr float kLargestP = kCodeProducts ? 256.0f : 1.0f, kLargestPLog2 = 8.0f;
  /// A word of bits holds which keys of a row attend. Beside a block map it takes too many registers.
  static constexpr bool kKeyBits = P::kMaskBounds > 0 && !P::kBlockMap;
  /// Copies that may still be under way when a step begins.
  static constexpr int kPendingCopies = P::kStages == 1 ? 0 : P::kStages - 2;
};

/// Which of the warps along the rows this one is, and which of those that share its rows.
template <class P>
__device__ __forceinline__ int row_warp(int warp) {
  return ForwardPolicy<P>::kSharesRows ? warp % ForwardPolicy<P>::kRowWarps : warp;
}
template <class P>
__device__ __forceinline__ int column_part() {
  return ForwardPolicy<P>::kSharesRows ? static_cast<int>(threadIdx.x) / 32 / ForwardPolicy<P>::kRowWarps : 0;
}
/// The first of a KV tile's keys for which this warp computes S.
template <class P>
__device__ __forceinline__ int first_key_of_warp() {
  return column_part<P>() % ForwardPolicy<P>::kParts * ForwardPolicy<P>::kNt * 8;
}

}  // namespace flashjit::sm80
