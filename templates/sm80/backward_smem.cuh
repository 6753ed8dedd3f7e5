// Shared memory of the backward pass by name. BackwardLayout in layout.cuh decides where each tile lies.
#pragma once

#include "flashjit/common/ptx.cuh"
#include "flashjit/common/tile_walk.cuh"
#include "flashjit/sm80/backward_policy.cuh"

namespace flashjit::sm80 {

/// Addresses of what ldmatrix and cp.async touch, pointers to what ordinary code does. One overlap: dK lies
/// over K and dV over V, when all warps are done with both. What is on its way to a stage belongs to
/// it.
template <class P>
struct BackwardSmem : P::Copies::template HeldQTile<P> {
  using Policy = BackwardPolicy<P>;
  static constexpr BackwardLayout kLayout = Policy::kLayout;

  char* shared;
  unsigned base;  ///< its address

  __device__ __forceinline__ explicit BackwardSmem(char* memory)
      : shared(memory), base(shared_address(memory)) {}

  __device__ __forceinline__ unsigned k() const { return base + kLayout.k(); }
  __device__ __forceinline__ unsigned v() const { return base + kLayout.v(); }
  __device__ __forceinline__ char* dk() const { return shared + kLayout.k(); }
  __device__ __forceinline__ char* dv() const { return shared + kLayout.v(); }

  // The stages: a Q tile, its dO, and LSE and D of its rows; and which Q tile it is.
  __device__ __forceinline__ unsigned q(int stage) const {
    return base + kLayout.q() + stage * Policy::kQBytes;
  }
  __device__ __forceinline__ unsigned dout(int stage) const {
    return base + kLayout.dout() + stage * Policy::kDoutBytes;
  }
  __device__ __forceinline__ float* lse(int stage) const {
    return reinterpret_cast<float*>(shared + kLayout.lse()) + stage * P::kBr;
  }
  __device__ __forceinline__ float* d(int stage) const {
    return reinterpret_cast<float*>(shared + kLayout.d()) + stage * P::kBr;
  }
  /// The address of LSE, or of D, of a stage's row.
  __device__ __forceinline__ unsigned row_stats(bool is_lse, int stage, int row) const {
    return base + (is_lse ? kLayout.lse() : kLayout.d()) + (stage * P::kBr + row) * 4;
  }
  __device__ __forceinline__ StagedTile& staged(int stage) const {
    return reinterpret_cast<StagedTile*>(shared + kLayout.staged())[stage];
  }

  /// P where it passes through shared memory.
  __device__ __forceinline__ unsigned p() const { return base + kLayout.p(); }
  __device__ __forceinline__ char* p_pointer() const { return shared + kLayout.p(); }
  /// dS: two buffers where dQ comes a step late.
  __device__ __forceinline__ unsigned ds(int buffer) const { return base + ds_offset(buffer); }
  __device__ __forceinline__ char* ds_pointer(int buffer) const { return shared + ds_offset(buffer); }
  /// Pairs of warps: what the first hands over to the second. Static, since ptxas orders the kernels of pairs
  /// differently when their lambda captures this struct.
  static __device__ __forceinline__ float4* exchange(char* shared) {
    return reinterpret_cast<float4*>(shared + kLayout.exchange());
  }

 private:
  static __device__ __forceinline__ int ds_offset(int buffer) {
    return kLayout.ds() + buffer * Policy::kDsBytes;
  }
};

}  // namespace flashjit::sm80
