#include "call/settings.hpp"

#include <fmt/format.h>

#include <deque>
#include <filesystem>
#include <memory>
#include <mutex>
#include <utility>

#include "support/paths.hpp"
#include "support/stderr.hpp"
#include "support/text.hpp"

namespace flashjit {
namespace {

/// Hands lines to a log, one at a time. A line that comes meanwhile, from another thread or from the log
/// itself, is left to the thread that is inside the log: so nobody waits for a log that calls the library.
class Lines {
 public:
  explicit Lines(Log log) : log_(std::move(log)) {}

  void add(std::string_view line) {
    std::unique_lock lock(mutex_);
    waiting_.push_back(printable(line));
    if (busy_) return;
    busy_ = true;
    while (!waiting_.empty()) {
      const std::string next = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      hand_over(next);
      lock.lock();
    }
    busy_ = false;
  }

 private:
  /// A log that fails is no reason for the work to fail.
  void hand_over(const std::string& line) noexcept {
    try {
      log_(line);
    } catch (...) {
    }
  }

  const Log log_;
  std::mutex mutex_;
  std::deque<std::string> waiting_;
  bool busy_ = false;  // a thread is inside the log, or about to be
};

Log one_at_a_time(Log log) {
  return [lines = std::make_shared<Lines>(std::move(log))](std::string_view line) { lines->add(line); };
}

Log choose_log(const RuntimeOptions& options, const Environment& environment) {
  if (options.log) return one_at_a_time(options.log);
  if (environment.quiet || !stderr_is_open()) return [](std::string_view) {};
  return one_at_a_time([](std::string_view line) { write_to_stderr(fmt::format("flashjit: {}\n", line)); });
}

/// A relative path is meant for the folder that the process is in now; it may change that.
std::string fixed(const std::string& path) {
  std::error_code error;
  const std::filesystem::path absolute = std::filesystem::absolute(path_of(path), error);
  return path.empty() || error ? path : absolute.string();
}

}  // namespace

Settings resolve_settings(const RuntimeOptions& options, const Environment& environment) {
  Settings settings;
  settings.cache_dir = fixed(options.cache_dir.value_or(environment.cache_dir));
  settings.cache_limit = options.cache_limit.value_or(environment.cache_limit);
  settings.embedded_packs = options.embedded_packs;
  settings.packs = options.packs;
  settings.packs.insert(settings.packs.end(), environment.packs.begin(), environment.packs.end());
  for (std::string& pack : settings.packs) pack = fixed(pack);
  settings.jit = options.jit ? *options.jit == JitMode::on : environment.jit;
  settings.template_dir = fixed(options.template_dir.value_or(environment.template_dir));
  settings.nvrtc = options.nvrtc.value_or(environment.nvrtc);
  settings.libcuda = environment.libcuda;
  settings.check_indices = options.check_indices.value_or(environment.check_indices);
  settings.check_waits = options.check_waits.value_or(environment.check_waits);
  settings.tune_in_background =
      options.tune_in_background.value_or(environment.tune_in_background) && settings.jit;
  settings.compile_in_background =
      options.compile_in_background.value_or(environment.compile_in_background) && settings.jit;
  settings.verbose = environment.verbose;
  settings.log = choose_log(options, environment);
  return settings;
}

}  // namespace flashjit
