// Waits for another CTA's work, and when a wait is a hang: RuntimeOptions::check_waits.
#pragma once

namespace flashjit {

/// A longer wait is a hang. The longest legitimate wait is for all CTAs' work on a head: seconds at a million
/// tokens.
constexpr unsigned long long kHangNanoseconds = 10'000'000'000;

__device__ __forceinline__ unsigned long long nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

/// What was written before `*at` got the value returned may be read afterwards.
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

/// Waits until `has_come()`; calls `idle()` meanwhile.
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

/// Waits until `*semaphore` is `value`. What was written before may be read afterwards.
template <class P, unsigned kSleepNanoseconds, class Value>
__device__ __forceinline__ void wait_semaphore(const Value* semaphore, const Value& value) {
  wait_until<P>([&] { return load_acquire(semaphore) == value; }, [] { __nanosleep(kSleepNanoseconds); });
}

}  // namespace flashjit
