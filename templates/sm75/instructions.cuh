// The instructions that family sm75 multiplies and copies with, in the place of
// templates/sm80/instructions.cuh.
#pragma once

#include "flashjit/common/ptx.cuh"

namespace flashjit::sm80 {

template <class P>
struct AsyncQTileLoader;  // backward_loader.cuh

}  // namespace flashjit::sm80

namespace flashjit::sm75 {

template <class P>
struct HeldKvLoader;  // kv_loader.cuh
template <class P>
struct HeldQTileLoader;  // q_tile_loader.cuh
template <class P>
struct HeldQTile;
struct NoHeldQTile {};
/// Whether a thread's registers hold its part of a Q tile and dO: at most 64 bytes. Beyond they spill, and
/// nothing is gained.
template <class P>
constexpr bool kHoldsQTile = P::kBr*(P::kHeadDim + P::kHeadDimV) * 2 <= 64 * P::kWarps * 32;

/// C += A B with A 16x16 and B 16x8 of fp16, eight columns of A at a time.
struct Mma16x8x8 {
  static constexpr bool kHasCodes = false;

  template <class Element>
  static __device__ __forceinline__ void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                                  unsigned b1) {
    static_assert(kIsFp16<Element>, "sm_75 multiplies fp16 alone");
    mma_16x8x8(c, a[0], a[1], b0);
    mma_16x8x8(c, a[2], a[3], b1);
  }
};

/// Copies to shared memory by way of registers. They are complete when they have been started: what is at
/// `to` must be free, as it must for cp.async.
struct RegisterCopies {
  template <class P>
  using DenseKvLoader = HeldKvLoader<P>;
  template <class P>
  using QTileLoader = Conditional<kHoldsQTile<P>, HeldQTileLoader<P>, sm80::AsyncQTileLoader<P>>;
  template <class P>
  using HeldQTile = Conditional<kHoldsQTile<P>, sm75::HeldQTile<P>, NoHeldQTile>;

  static __device__ __forceinline__ void start_16(unsigned to, const void* from, bool valid) {
    uint4 x{0, 0, 0, 0};
    if (valid) x = *static_cast<const uint4*>(from);
    store_shared_16(to, x);
  }
  static __device__ __forceinline__ void start_4(unsigned to, const void* from, bool valid) {
    store_shared_4(to, valid ? *static_cast<const unsigned*>(from) : 0u);
  }
  static __device__ __forceinline__ void commit() {}
  template <int kPending>
  static __device__ __forceinline__ void wait() {}
};

}  // namespace flashjit::sm75
