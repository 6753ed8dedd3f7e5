// A thread that does one job after the other, for what a service does beside its calls, which go first.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <stop_token>

namespace flashjit {

/// Ends soon: waits for the job under way and drops the rest. A forked child has a copy of the thread's
/// memory and no thread: to wait for it, or to touch a lock that it may hold, would take for ever. There jobs
/// are dropped, and nothing is waited for.
class Worker {
 public:
  /// Sees by the token that it is to end. It throws nothing.
  using Job = std::function<void(const std::stop_token&)>;

  Worker();
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  /// Returns at once. Safe from many threads.
  void want(Job job);

 private:
  class Thread;
  bool is_here() const;

  const std::int64_t process_;
  std::unique_ptr<Thread> thread_;
};

}  // namespace flashjit
