// Waits for another block's work, and when a wait is a hang: RuntimeOptions::check_waits.
#pragma once

namespace flashjit {

/// A hang. Any other wait ends sooner by far: the longest are for what another block does with a tile.
constexpr unsigned long long kHangNanoseconds = 10'000'000'000;

__device__ __forceinline__ unsigned long long nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

/// Until `*turn` is `mine`. What was written before it became so may be read afterwards.
template <class P, unsigned kSleepNanoseconds, class Turn>
__device__ __forceinline__ void await_turn(const volatile Turn* turn, const Turn& mine) {
  if constexpr (P::kCheckWaits) {
    const unsigned long long begin = nanoseconds();
    while (*turn != mine) {
      if (nanoseconds() - begin > kHangNanoseconds) asm volatile("trap;");
      __nanosleep(kSleepNanoseconds);
    }
  } else {
    while (*turn != mine) __nanosleep(kSleepNanoseconds);
  }
  __threadfence();
}

}  // namespace flashjit
