// The fp32 dQ accumulator of family sm90: blocks of 64 rows, in each the fragments of the warp group that
// computes it, one after the other, so that what a group adds is one run of bytes, which the TMA unit adds.
#pragma once

#include "flashjit/sm90/wgmma.cuh"

namespace flashjit::sm90 {

constexpr int kDqRows = 64;
constexpr int kDqGroups = 2;  ///< of a block, that compute a KV tile's part of it
/// Of how many parts a KV tile's dQ is; of each is said when it has been added.
template <class P>
constexpr int kDqParts = kDqGroups* cluster_blocks(P::kBc, P::kHeadDim, P::kHeadDimV);

/// Columns of the accumulator.
constexpr int dq_columns(int head_dim) { return (head_dim + 15) / 16 * 16; }
/// Floats from one eight columns of a block to the next: four for each thread of a warp group, two columns of
/// rows lane / 4 and lane / 4 + 8 of the warp's sixteen.
constexpr int kDqStep = 128 * 4;
constexpr int kDqStepBytes = kDqStep * 4;

/// What this thread has written to global memory, or has seen written, may be added to.
__device__ __forceinline__ void publish_to_adders() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
/// Starts adding `bytes` of shared memory to global memory; of this thread's bulk group.
__device__ __forceinline__ void add_line(float* to, unsigned from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
               "r"(from), "r"(bytes)
               : "memory");
  bulk_commit();
}
/// Adds to four floats of global memory; of this thread, as other writes.
__device__ __forceinline__ void add_global(float* to, float4 value) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(value.x),
               "f"(value.y), "f"(value.z), "f"(value.w)
               : "memory");
}
/// Waits until it has been added.
__device__ __forceinline__ void added_lines_done() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace flashjit::sm90
