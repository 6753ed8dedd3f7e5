// One maker a key: threads that ask meanwhile wait for its result.
#pragma once

#include <chrono>
#include <future>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include "flashjit/error.hpp"

namespace flashjit {

/// Values by key, each made once and kept. Safe from many threads; different keys are made in parallel.
template <class Value>
class SingleFlight {
 public:
  struct Result {
    Value value;
    bool made;  ///< by this call
  };

  /// The value of `key`, else that of `make()`. What make() throws reaches every waiting thread and is not
  /// kept: the next call tries again. Throws Error(invalid_argument) where make() asks for its own key, as a
  /// log does that calls the library; it would wait for itself.
  template <class Make>
  Result get(const std::string& key, Make&& make) {
    std::promise<Value> promise;
    std::unique_lock lock(mutex_);
    const auto [flight, first] = flights_.try_emplace(key);
    if (!first) {
      const auto [other, maker] = flight->second;
      lock.unlock();
      if (maker == std::this_thread::get_id() && !is_ready(other))
        throw Error(ErrorCode::invalid_argument,
                    "a log asks for the kernel whose making it is told of: call after it has returned");
      return {other.get(), false};
    }
    flight->second = {promise.get_future().share(), std::this_thread::get_id()};
    lock.unlock();
    try {
      Value value = make();
      promise.set_value(value);
      return {std::move(value), true};
    } catch (...) {
      lock.lock();
      flights_.erase(key);
      lock.unlock();
      promise.set_exception(std::current_exception());
      throw;
    }
  }

  /// Whether some thread makes the value.
  bool is_in_flight(const std::string& key) const {
    const std::lock_guard lock(mutex_);
    const auto flight = flights_.find(key);
    return flight != flights_.end() && !is_ready(flight->second.value);
  }
  /// Whether the value is there already; does not wait.
  bool holds(const std::string& key) const {
    const std::lock_guard lock(mutex_);
    const auto flight = flights_.find(key);
    return flight != flights_.end() && is_ready(flight->second.value);
  }

 private:
  struct Flight {
    std::shared_future<Value> value;
    std::thread::id maker;
  };
  static bool is_ready(const std::shared_future<Value>& value) {
    return value.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }

  mutable std::mutex mutex_;
  std::map<std::string, Flight> flights_;
};

}  // namespace flashjit
