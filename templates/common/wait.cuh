// Waits for another block's work, and when a wait is a hang: RuntimeOptions::check_waits.
#pragma once

namespace flashjit {

/// A hang. Any other wait ends sooner: the longest is for all blocks' work on a head, seconds at a million
/// tokens.
constexpr unsigned long long kHangNanoseconds = 10'000'000'000;

__device__ __forceinline__ unsigned long long nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

/// What was written before `*at` became what is read may be read afterwards.
__device__ __forceinline__ int load_acquire(const int* at) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
__device__ __forceinline__ unsigned long long load_acquire(const unsigned long long* at) {
  unsigned long long value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}

/// Until `has_come()`; meanwhile `idle()`.
template <class P, class HasCome, class Idle>
__device__ __forceinline__ void wait_until(const HasCome& has_come, const Idle& idle) {
  if constexpr (P::kCheckWaits) {
    const unsigned long long begin = nanoseconds();
    while (!has_come()) {
      if (nanoseconds() - begin > kHangNanoseconds) asm volatile("trap;");
      idle();
    }
  } else {
    while (!has_come()) idle();
  }
}

/// Until `*turn` is `mine`. What was written before it became so may be read afterwards.
template <class P, unsigned kSleepNanoseconds, class Turn>
__device__ __forceinline__ void wait_semaphore(const Turn* turn, const Turn& mine) {
  wait_until<P>([&] { return load_acquire(turn) == mine; }, [] { __nanosleep(kSleepNanoseconds); });
}

}  // namespace flashjit
