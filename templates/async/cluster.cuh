// Thread block clusters: the shared memory of the other CTAs of a cluster.
#pragma once

namespace flashjit {

/// CTAs in this cluster; 1 without clusters.
__device__ __forceinline__ unsigned cluster_size() {
  unsigned ctas;
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(ctas));
  return ctas;
}
/// This CTA's rank in its cluster.
__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
/// The address in CTA `rank` of what lies at `address` in this CTA's shared memory.
__device__ __forceinline__ unsigned in_cta(unsigned address, int rank) {
  unsigned there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
/// Waits for all threads of the cluster that have not exited.
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;" ::
          : "memory");
}
/// Stores one, two or four words in another CTA's shared memory, and completes on an mbarrier there.
__device__ __forceinline__ void store_remote(unsigned to, unsigned value, unsigned barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(to),
               "r"(value), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void store_remote(unsigned to, float4 value, unsigned barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
          to),
      "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void store_remote(unsigned to, float2 value, unsigned barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to),
      "f"(value.x), "f"(value.y), "r"(barrier)
      : "memory");
}
/// Arrives on another CTA's mbarrier to release a buffer that was read. Relaxed, where ptxas knows it: it
/// does not publish this thread's writes, which would wait until the whole GPU could see them.
__device__ __forceinline__ void barrier_arrive_remote(unsigned barrier) {
#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1208
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
#else
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}
/// Copies `bytes` (a multiple of 16) to another CTA's shared memory, and completes on an mbarrier there.
__device__ __forceinline__ void copy_remote(unsigned to, unsigned from, int bytes, unsigned barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(to),
      "r"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

}  // namespace flashjit
