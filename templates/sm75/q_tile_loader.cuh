// How a Q tile, its dO and its rows' LSE and D get to shared memory in the backward pass, in the place of
// cp.async.
#pragma once

#include "flashjit/sm75/held_tile.cuh"
#include "flashjit/sm75/instructions.cuh"
#include "flashjit/sm80/backward_loader.cuh"

namespace flashjit::sm75 {

template <class P>
struct HeldQTile {
  using Q = HeldTile<P::kBr, P::kHeadDim, P::kWarps * 32>;
  using Dout = HeldTile<P::kBr, P::kHeadDimV, P::kWarps * 32>;
  uint4 q_held[Q::kVectors], dout_held[Dout::kVectors];
  uint4 stats_held;  ///< four rows' LSE, or D
};

template <class P>
struct HeldQTileLoader {
  using Held = HeldQTile<P>;
  static_assert(P::kStages <= 2, "one tile is on its way");
  static constexpr int kFours = P::kBr / 4;  ///< threads for LSE, and as many for D
  static_assert(2 * kFours <= P::kWarps * 32, "one thread for each four rows of LSE and of D");

  static __device__ __forceinline__ int four() { return static_cast<int>(threadIdx.x) % kFours * 4; }

  static __device__ __forceinline__ void load(const Params& p, const Sequence<P>& sequence,
                                              const StagedTile& next, Held& held, int) {
    const int h = next.head, q = next.tile * P::kBr, valid = sequence.seqlen_q(p) - q;
    Held::Q::load(held.q_held, sequence.q_pointer(p.q, h, q), p.q.stride_s, valid);
    Held::Dout::load(held.dout_held, sequence.q_pointer(p.dout, h, q), p.dout.stride_s, valid);
    const float* stats = threadIdx.x < kFours ? p.lse_padded : p.d;
    if (threadIdx.x < 2 * kFours)
      held.stats_held = *reinterpret_cast<const uint4*>(stats + sequence.stats_row(p, h) + q + four());
  }
  static __device__ __forceinline__ void put(const sm80::BackwardSmem<P>& smem, int stage) {
    Held::Q::put(smem.q_held, smem.q(stage));
    Held::Dout::put(smem.dout_held, smem.dout(stage));
    if (threadIdx.x < 2 * kFours)
      store_shared_16(smem.row_stats(threadIdx.x < kFours, stage, four()), smem.stats_held);
  }
};

}  // namespace flashjit::sm75
