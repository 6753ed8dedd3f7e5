// Something that is done once, however many threads ask for it.
#pragma once

#include <atomic>
#include <mutex>

namespace flashjit {

/// As std::once_flag and std::call_once: when the action throws, the next caller tries again. Those hang then
/// where pthread_once() is not made for exceptions, as under ThreadSanitizer and on some platforms.
class Once {
 public:
  template <class Action>
  void run(Action&& action) {
    if (done_.load(std::memory_order_acquire)) return;
    const std::lock_guard lock(mutex_);
    if (done_.load(std::memory_order_relaxed)) return;
    action();
    done_.store(true, std::memory_order_release);
  }

 private:
  std::atomic<bool> done_ = false;
  std::mutex mutex_;
};

}  // namespace flashjit
