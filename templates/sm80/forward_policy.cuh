// What the forward pass decides from its problem alone: how warps share a tile, and which tricks registers
// allow.
#pragma once

#include "flashjit/common/kv_source.cuh"
#include "flashjit/sm80/layout.cuh"

namespace flashjit::sm80 {

template <class P>
struct ForwardPolicy {
  static constexpr int kThreads = P::kWarps * 32;
  static constexpr int kMt = P::kBr / (16 * P::kWarps);       // m16 tiles of queries a warp owns
  static constexpr int kNt = P::kBc / 8;                      // n8 tiles of S
  static constexpr int kOt = round_up(P::kHeadDimV, 16) / 8;  // n8 tiles of O
  static constexpr int kQSteps = round_up(P::kHeadDim, 16) / 16;
  static constexpr int kQkUnroll = P::kQInRegisters ? kQSteps : 8;  // steps of Q K^T at a time
  static constexpr int kKvBytes = kScaledKv<P> ? 1 : 2;
  // Columns of a tile of K and V, which has two codes in each.
  static constexpr int kKColumns = P::kHeadDim * kKvBytes / 2, kVColumns = P::kHeadDimV * kKvBytes / 2;
  static constexpr ForwardLayout kLayout{P::kBr,     P::kBc,   P::kHeadDim,  P::kHeadDimV,
                                         P::kStages, kKvBytes, P::kKeyScales};
  static constexpr int kKBytes = kLayout.k_tile(), kVBytes = kLayout.v_tile();
  static_assert(kLayout.bytes() == P::kSharedBytes, "what the planner counts on");

  /// P V of a tile is computed among the softmax of the next one: if registers suffice, and not where small
  /// CTAs are several a multiprocessor and hide each other's waits.
  static constexpr int kLateRegisters =
      forward_registers(kMt, P::kBc, P::kHeadDim, P::kHeadDimV, P::kQInRegisters, true);
  static constexpr bool kLatePv =
      kLateRegisters <= 192 && !P::kDropout && !P::kBlockMap && (kMt > 1 || P::kWarps > 4);
  /// A word of bits holds which keys of a row attend. Beside a block map it takes too many registers.
  static constexpr bool kKeyBits = P::kMaskBounds > 0 && !P::kBlockMap;
  /// Copies that may still be under way when a step begins.
  static constexpr int kPendingCopies = P::kStages == 1 ? 0 : P::kStages - 2;
};

}  // namespace flashjit::sm80
