// Waits for what other threads do, and what ends one that never ends: RuntimeOptions::check_waits.
#pragma once

namespace flashjit {

/// A hang. Any other wait ends sooner by far: the longest are for a tile's work of another block.
constexpr unsigned long long kHangNanoseconds = 10'000'000'000;

/// Made as a wait begins. Asked again and again, it ends the kernel with an error of the launch when the wait
/// is a hang. No call: around one, wgmma's products would wait for each other.
class HangTrap {
 public:
  __device__ __forceinline__ void check() const {
    if (now() - begin_ > kHangNanoseconds) asm volatile("trap;");
  }

 private:
  static __device__ __forceinline__ unsigned long long now() {
    unsigned long long nanoseconds;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
    return nanoseconds;
  }

  unsigned long long begin_ = now();
};

/// Until `*turn` is `mine`. What was written before it became so may be read afterwards.
template <class P, unsigned kSleepNanoseconds, class Turn>
__device__ __forceinline__ void await_turn(const volatile Turn* turn, const Turn& mine) {
  if constexpr (P::kCheckWaits) {
    for (const HangTrap trap; *turn != mine; trap.check()) __nanosleep(kSleepNanoseconds);
  } else {
    while (*turn != mine) __nanosleep(kSleepNanoseconds);
  }
  __threadfence();
}

}  // namespace flashjit
