// Runs a function over a list on several threads, ahead of the one who takes the results in order.
#pragma once

#include <atomic>
#include <functional>
#include <future>
#include <thread>
#include <vector>

namespace flashjit::autotune {

/// Results do not depend on the number of threads. Destruction waits for what is running and leaves out the
/// rest.
template <class Result>
class CompileAhead {
 public:
  CompileAhead(std::size_t count, unsigned threads, std::function<Result(std::size_t)> work)
      : promises_(count), work_(std::move(work)) {
    for (unsigned i = 0; i < threads && i < count; ++i) threads_.emplace_back([this] { run(); });
  }
  ~CompileAhead() { stop_ = true; }  // jthread joins
  CompileAhead(const CompileAhead&) = delete;
  CompileAhead& operator=(const CompileAhead&) = delete;

  /// Waits for result `index`, once; rethrows what the work threw.
  Result take(std::size_t index) { return promises_.at(index).get_future().get(); }

 private:
  void run() {
    for (std::size_t i = next_++; i < promises_.size() && !stop_; i = next_++) {
      try {
        promises_[i].set_value(work_(i));
      } catch (...) {
        promises_[i].set_exception(std::current_exception());
      }
    }
  }

  std::vector<std::promise<Result>> promises_;
  std::function<Result(std::size_t)> work_;
  std::atomic<std::size_t> next_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::jthread> threads_;  // last: joined before the rest goes
};

}  // namespace flashjit::autotune
