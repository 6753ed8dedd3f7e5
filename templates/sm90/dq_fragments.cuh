// The fp32 dQ accumulator of family sm90. It lies as the wgmma fragments of 64 rows, so that what a warp
// group adds is one run of bytes, which one instruction of TMA adds.
#pragma once

#include "flashjit/sm90/wgmma.cuh"

namespace flashjit::sm90 {

constexpr int kDqRows = 64;
constexpr int kDqWgs = 2;  ///< warpgroups of a CTA that compute dQ
/// Parts of a KV tile's dQ, one a consumer warpgroup of the cluster. Each is counted when it has been added.
template <class P>
constexpr int kDqParts = kOwnTiles<P> ? 1 : kDqWgs* cluster_ctas(P::kBc, P::kHeadDim, P::kHeadDimV);

/// Columns of the accumulator.
constexpr int dq_columns(int head_dim) { return (head_dim + 15) / 16 * 16; }
/// Floats from eight columns of 64 rows to the next eight: four for each thread of a warpgroup, two columns
/// of rows lane / 4 and lane / 4 + 8 of its warp's sixteen.
constexpr int kDqStep = 128 * 4;
constexpr int kDqStepBytes = kDqStep * 4;

/// Lets TMA add to what this thread has written to global memory, or has seen written.
__device__ __forceinline__ void publish_to_adders() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
/// Starts adding `bytes` of shared memory to global memory, in this thread's bulk group.
__device__ __forceinline__ void add_line(float* to, unsigned from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
               "r"(from), "r"(bytes)
               : "memory");
  bulk_commit();
}
/// Adds to four floats of global memory, as an ordinary write of this thread.
__device__ __forceinline__ void add_global(float* to, float4 value) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(value.x),
               "f"(value.y), "f"(value.z), "f"(value.w)
               : "memory");
}
/// Waits until all that this thread's bulk group adds has been added.
__device__ __forceinline__ void wait_lines_added() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace flashjit::sm90
