// Shared memory of the forward pass by name. ForwardLayout in layout.cuh decides where each tile lies.
#pragma once

#include "flashjit/common/skip_softmax.cuh"
#include "flashjit/sm80/forward_policy.cuh"
#include "flashjit/sm80/kv_loader.cuh"

namespace flashjit::sm80 {

/// `i` counts the KV tiles of the work tile; its stage is the count modulo the number of stages. One overlap:
/// O lies over Q, when all warps are done with Q. What is on its way to K's or V's tile belongs to it, and
/// the count of skipped tiles: one more variable that the steps capture would change the machine code.
template <class P>
struct ForwardSmem : KvTileLoader<P>::Held, SkippedTiles<P::kSkipSoftmax> {
  using Policy = ForwardPolicy<P>;
  static constexpr ForwardLayout kLayout = Policy::kLayout;

  char* shared;
  unsigned q, k_stages, v_stages;  ///< addresses

  __device__ __forceinline__ explicit ForwardSmem(char* memory)
      : shared(memory),
        q(shared_address(memory) + kLayout.q()),
        k_stages(shared_address(memory) + kLayout.k()),
        v_stages(shared_address(memory) + kLayout.v()) {}

  __device__ __forceinline__ unsigned k(int i) const { return k_stages + i % P::kStages * Policy::kKBytes; }
  __device__ __forceinline__ unsigned v(int i) const {
    return P::kSharedKv ? k(i) : v_stages + i % P::kStages * Policy::kVBytes;
  }
  /// The scales of a tile's keys, with kKeyScales.
  __device__ __forceinline__ float* k_scales(int i) const { return scales(kLayout.k_scales(), i); }
  __device__ __forceinline__ float* v_scales(int i) const { return scales(kLayout.v_scales(), i); }
  __device__ __forceinline__ char* o() const { return shared + kLayout.q(); }
  // Warps that share rows: P, and a value of each row from each of them.
  __device__ __forceinline__ char* p_tile() const { return shared + kLayout.p(); }
  __device__ __forceinline__ float* row_values(int part) const {
    return reinterpret_cast<float*>(shared + kLayout.row_values()) + part * P::kBr;
  }

 private:
  __device__ __forceinline__ float* scales(int first, int i) const {
    return reinterpret_cast<float*>(shared + first + i % P::kStages * kLayout.scales());
  }
};

}  // namespace flashjit::sm80
