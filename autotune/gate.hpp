// A stream that waits until all that is to be timed is queued.
#pragma once

#include <chrono>
#include <future>

#include "device/driver.hpp"

namespace flashjit::autotune {

inline constexpr auto kLongestHold = std::chrono::milliseconds(20);  // a queue takes well under 1 ms to fill

/// Keeps a stream from starting until everything to be timed is queued, so that events next to a short kernel
/// do not time the host. Opens by itself after kLongestHold: loading a kernel on another thread may wait for
/// the device while it holds a lock that queueing needs.
class Gate {
 public:
  Gate(const device::Driver& driver, CUstream stream) : driver_(driver), stream_(stream) {
    driver_.check(driver_.launch_host_func(stream_, wait, &opened_), "cuLaunchHostFunc");
  }
  ~Gate() {
    open_.set_value();
    driver_.stream_synchronize(stream_);  // the driver reads opened_ until then
  }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

 private:
  static void CUDA_CB wait(void* opened) {
    static_cast<std::shared_future<void>*>(opened)->wait_for(kLongestHold);
  }

  const device::Driver& driver_;
  CUstream stream_;
  std::promise<void> open_;
  std::shared_future<void> opened_ = open_.get_future().share();
};

}  // namespace flashjit::autotune
