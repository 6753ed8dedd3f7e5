// The instructions that family sm80 multiplies and copies with. The planner names these types in the Problem,
// as `Mma` and `Copies`; another family that is built of these templates has types of its own.
#pragma once

#include "flashjit/common/ptx.cuh"

namespace flashjit::sm80 {

template <class P>
struct DenseKvLoader;  // kv_loader.cuh
template <class P>
struct AsyncQTileLoader;  // backward_loader.cuh

/// C += A B with A 16x16 and B 16x8, of 16 bits or of pairs of codes.
struct Mma16x8x16 {
  static constexpr bool kHasCodes = true;

  template <class Element>
  static __device__ __forceinline__ void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                                  unsigned b1) {
    mma_16x8x16<Element>(c, a, b0, b1);
  }
};

/// Copies to shared memory by cp.async: they run while their threads go on, until these wait.
struct AsyncCopies {
  template <class P>
  using DenseKvLoader = sm80::DenseKvLoader<P>;
  template <class P>
  using QTileLoader = AsyncQTileLoader<P>;
  template <class P>
  struct HeldQTile {};

  static __device__ __forceinline__ void start_16(unsigned to, const void* from, bool valid) {
    copy_async_16(to, from, valid);
  }
  static __device__ __forceinline__ void start_4(unsigned to, const void* from, bool valid) {
    copy_async_4(to, from, valid);
  }
  static __device__ __forceinline__ void commit() { copy_async_commit(); }
  template <int kPending>
  static __device__ __forceinline__ void wait() {
    copy_async_wait<kPending>();
  }
};

}  // namespace flashjit::sm80
