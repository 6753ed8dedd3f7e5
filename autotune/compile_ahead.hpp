// Work on a numbered list by several threads, ahead of the thread that takes the results.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <thread>
#include <vector>

namespace flashjit::autotune {

/// Results do not depend on the number of threads. Destruction waits for what is running and leaves out the
/// rest.
template <class Result>
class CompileAhead {
 public:
  CompileAhead(std::size_t count, unsigned threads, std::function<Result(std::size_t)> work)
      : slots_(count), work_(std::move(work)) {
    for (unsigned i = 0; i < std::max(threads, 1u) && i < count; ++i)
      threads_.emplace_back([this] { run(); });
  }
  ~CompileAhead() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();  // jthread joins
  }
  CompileAhead(const CompileAhead&) = delete;
  CompileAhead& operator=(const CompileAhead&) = delete;

  /// Begins with it when a thread is free, after what was wanted before.
  void want(std::size_t index) {
    {
      const std::lock_guard lock(mutex_);
      if (slots_.at(index).wanted) return;
      slots_[index].wanted = true;
      queue_.push_back(index);
    }
    changed_.notify_one();
  }

  /// Waits for result `index`, once; rethrows what the work threw. What waits in the queue waits behind it.
  Result take(std::size_t index) {
    want(index);
    {
      const std::lock_guard lock(mutex_);
      const auto at = std::find(queue_.begin(), queue_.end(), index);
      if (at != queue_.end()) std::rotate(queue_.begin(), at, at + 1);
    }
    return slots_[index].result.get_future().get();
  }

 private:
  struct Slot {
    std::promise<Result> result;
    bool wanted = false;
  };

  void run() {
    for (;;) {
      std::size_t index = 0;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return stop_ || !queue_.empty(); });
        if (stop_) return;
        index = queue_.front();
        queue_.pop_front();
      }
      try {
        slots_[index].result.set_value(work_(index));
      } catch (...) {
        slots_[index].result.set_exception(std::current_exception());
      }
    }
  }

  std::vector<Slot> slots_;
  std::function<Result(std::size_t)> work_;
  std::mutex mutex_;  // guards the queue, `wanted` and `stop_`
  std::condition_variable changed_;
  std::deque<std::size_t> queue_;
  bool stop_ = false;
  std::vector<std::jthread> threads_;  // last: joined before the rest goes
};

}  // namespace flashjit::autotune
