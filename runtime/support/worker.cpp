#include "support/worker.hpp"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "support/process.hpp"

namespace flashjit {

class Worker::Thread {
 public:
  Thread() : thread_([this](const std::stop_token& stop) { run(stop); }) {}

  void want(Job job) {
    {
      const std::lock_guard lock(mutex_);
      jobs_.push_back(std::move(job));
    }
    changed_.notify_one();
  }

 private:
  void run(const std::stop_token& stop) {
    run_after_others();
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, stop, [&] { return !jobs_.empty(); });
      if (stop.stop_requested()) return;  // with jobs in the queue, too
      const Job job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      job(stop);
    }
  }

  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::deque<Job> jobs_;
  std::jthread thread_;  // last: ended before the rest goes
};

Worker::Worker() : process_(process_id()), thread_(std::make_unique<Thread>()) {}

Worker::~Worker() {
  if (!is_here()) (void)thread_.release();
}

bool Worker::is_here() const { return process_id() == process_; }

void Worker::want(Job job) {
  if (is_here()) thread_->want(std::move(job));
}

}  // namespace flashjit
