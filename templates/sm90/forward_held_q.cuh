// Where a warpgroup's rows of Q are for S = Q K^T; QSource<P> names one of two types.
#pragma once

#include "flashjit/sm90/forward_mainloop.cuh"

namespace flashjit::sm90 {

/// In shared memory.
template <class P>
struct QInSharedMemory {
  struct Held {};

  template <class State>
  static __device__ __forceinline__ void find(const ForwardStorage<P>& smem, int wg, State& c) {
    c.q_tile = tile_descriptor(smem.q(wg, c.round), 0);
  }
  template <class State>
  static __device__ __forceinline__ void start_qk(State& c) {
    sm90::start_qk<P>(c.s, c.q_tile, c.k_tile);
  }
};
/// In registers, as the left operand (kHoldsQ): a product with 64 keys reads as many bytes of Q as of K from
/// shared memory. Blocks of 64 rows at d128 +1 to +5%. NOTES.md#blocks-of-64-rows
template <class P>
struct QInRegisters {
  static constexpr int kSteps = (kQkColumns<P> + 15) / 16;
  struct Held {
    unsigned q[kSteps][4];
  };

  template <class State>
  static __device__ __forceinline__ void find(const ForwardStorage<P>& smem, int wg, State& c) {
    const int lane = static_cast<int>(threadIdx.x) % 32,
              row = static_cast<int>(threadIdx.x) / 32 % 4 * kWarpRows + lane % 16;
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      load_matrix_x4(c.held.q[step],
                     smem.q(wg, c.round) + chunk_offset<kWarpgroupRows>(row, step * 2 + lane / 16));
  }
  template <class State>
  static __device__ __forceinline__ void start_qk(State& c) {
    pin(c.s);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      P::multiply_scores(c.s, &c.held.q[step],
                         c.k_tile + ((step / 4 * ForwardStorage<P>::kSliceBytes + step % 4 * 32) >> 4),
                         step > 0);
    wgmma_commit();
    pin(c.s);
  }
};
template <class P>
using QSource = Conditional<P::kHoldsQ, QInRegisters<P>, QInSharedMemory<P>>;

}  // namespace flashjit::sm90
