// Rings of stages in shared memory, which some threads or TMA fill and others read: the pipelines between a
// producer and its consumers.
#pragma once

#include "flashjit/async/mbarrier.cuh"
#include "flashjit/common/ptx.cuh"

namespace flashjit {

/// Releases a stage: one arrival a warp, when all its lanes have read.
__device__ __forceinline__ void release(unsigned barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

/// A ring of stages by its barriers: `Stages` has full(smem, n...), empty(smem, n...) and phase(smem, n...)
/// of the stage of its element n, counted from the kernel's start. Static functions alone, over addresses as
/// the storage writes them: sums in another order, or a ring as an object, make ptxas order a main loop
/// otherwise.
template <class P, class Stages>
struct Ring : Stages {
  /// Waits until an element is there.
  template <class Smem, class... At>
  static __device__ __forceinline__ void wait_full(const Smem& smem, At... n) {
    barrier_wait<P>(Stages::full(smem, n...), Stages::phase(smem, n...));
  }
  template <class Smem, class... At>
  static __device__ __forceinline__ bool is_full(const Smem& smem, At... n) {
    return barrier_ready(Stages::full(smem, n...), Stages::phase(smem, n...));
  }
  /// Waits until the element before in the same stage has been read.
  template <class Smem, class... At>
  static __device__ __forceinline__ void acquire(const Smem& smem, At... n) {
    barrier_wait<P>(Stages::empty(smem, n...), Stages::phase(smem, n...) ^ 1);
  }
  /// One arrival a warp, when all its lanes have read.
  template <class Smem, class... At>
  static __device__ __forceinline__ void release(const Smem& smem, At... n) {
    flashjit::release(Stages::empty(smem, n...));
  }
  /// An arrival of each thread that has read, or that has written.
  template <class Smem, class... At>
  static __device__ __forceinline__ void release_thread(const Smem& smem, At... n) {
    barrier_arrive(Stages::empty(smem, n...));
  }
  template <class Smem, class... At>
  static __device__ __forceinline__ void commit_thread(const Smem& smem, At... n) {
    barrier_arrive(Stages::full(smem, n...));
  }
};

}  // namespace flashjit
