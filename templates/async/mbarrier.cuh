// mbarriers: barriers in shared memory that count arrivals and the bytes of asynchronous copies. A barrier is
// named by its address; its phases alternate between parity 0 and 1.
#pragma once

#include "flashjit/common/wait.cuh"

namespace flashjit {

__device__ __forceinline__ void barrier_init(unsigned barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// An arrival, which the barrier counts already, when all copies by copy_async_16() of this thread so far
/// have happened. wgmma reads what they wrote after a publish_to_async_proxy() of the threads that wait.
__device__ __forceinline__ void barrier_arrive_after_copies(unsigned barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
/// Arrives, and adds the bytes of bulk copies that the phase waits for.
__device__ __forceinline__ void barrier_expect(unsigned barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
/// Waits until the phase of this parity is complete. With P::kCheckWaits a hang traps.
template <class P>
__device__ __forceinline__ void barrier_wait(unsigned barrier, int parity) {
  if constexpr (P::kCheckWaits) {
    // One asm statement: with the loop in C++ ptxas spills and serialises wgmma.
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        ".reg .u64 begin, now;\n"
        "mov.u64 begin, %%globaltimer;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra over;\n"
        "mov.u64 now, %%globaltimer;\n"
        "sub.u64 now, now, begin;\n"
        "setp.le.u64 done, now, %2;\n"
        "@done bra again;\n"
        "trap;\n"
        "over:\n"
        "}\n" ::"r"(barrier),
        "r"(parity), "n"(kHangNanoseconds)
        : "memory");
  } else {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
  }
}
/// Whether the phase of this parity is complete. The test has the latency of a wait: issue it beside other
/// work.
__device__ __forceinline__ bool barrier_ready(unsigned barrier, int parity) {
  unsigned yes;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}\n"
      : "=r"(yes)
      : "r"(barrier), "r"(parity)
      : "memory");
  return yes != 0;
}
/// Makes initialised mbarriers visible to TMA.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

}  // namespace flashjit
