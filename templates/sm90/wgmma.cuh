// wgmma: the warpgroup's matrix products, one wrapper an instruction, and the shared memory tiles they read.
#pragma once

#include "flashjit/async/cluster.cuh"
#include "flashjit/async/mbarrier.cuh"
#include "flashjit/async/warp_roles.cuh"
#include "flashjit/common/ptx.cuh"
#include "flashjit/sm90/layout.cuh"
#include "flashjit/tma/tile.cuh"

namespace flashjit::sm90 {

/// Stores four 8 x 8 matrices of 16-bit elements in mma's register layout. Lane l gives the address of row
/// l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(unsigned to, const unsigned (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
/// ptxas hoists a wait for products above arithmetic that is independent of them, which then does not run
/// beside them. This keeps the wait below the computation of `value`: a store to `address` that never
/// happens, as `value` is never negative.
__device__ __forceinline__ void finish_before_wait(float value, unsigned address) {
  asm volatile(
      "{\n"
      ".reg .pred negative;\n"
      "setp.lt.f32 negative, %0, 0f00000000;\n"
      "@negative st.shared.f32 [%1], %0;\n"
      "}\n" ::"f"(value),
      "r"(address)
      : "memory");
}
/// Keeps the compiler from moving reads and writes of an accumulator across an asynchronous product.
template <int kCount>
__device__ __forceinline__ void pin(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

/// wgmma's descriptor of a 128-byte-swizzled tile whose rows are the M or N dimension of the product, or K.
/// `slice_bytes` is the stride from one slice of 64 columns to the next; the hardware reads it when rows are
/// K.
__device__ __forceinline__ unsigned long long tile_descriptor(unsigned address, int slice_bytes) {
  constexpr unsigned long long kSwizzle128 = 1ull << 62;
  constexpr unsigned long long kEightRows = static_cast<unsigned long long>(8 * kRowBytes >> 4) << 32;
  return kSwizzle128 | kEightRows | static_cast<unsigned long long>(slice_bytes >> 4) << 16 |
         (address & 0x3ffff) >> 4;
}

}  // namespace flashjit::sm90
