// What was logged, for tests that look at it.
#pragma once

#include <chrono>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

namespace flashjit::test {

/// Keeps lines, of whatever thread.
class KeptLog {
 public:
  void add(std::string_view line) {
    const std::lock_guard lock(mutex_);
    text_ += std::string(line) + "\n";
  }
  /// To log with; the log outlives it.
  std::function<void(std::string_view)> writer() {
    return [this](std::string_view line) { add(line); };
  }
  void clear() {
    const std::lock_guard lock(mutex_);
    text_.clear();
  }
  std::string text() const {
    const std::lock_guard lock(mutex_);
    return text_;
  }
  bool has(std::string_view part) const { return text().find(part) != std::string::npos; }
  /// Whether it has it, now or after some time.
  bool hears(std::string_view part, std::chrono::milliseconds at_most = std::chrono::minutes(1)) const {
    const auto end = std::chrono::steady_clock::now() + at_most;
    while (!has(part) && std::chrono::steady_clock::now() < end)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    return has(part);
  }

 private:
  mutable std::mutex mutex_;
  std::string text_;
};

}  // namespace flashjit::test
