#include "call/settings.hpp"

#include <fmt/format.h>

#include <cstdio>
#include <memory>
#include <mutex>

namespace flashjit {
namespace {

/// Lines from several threads do not mix.
Log one_at_a_time(Log log) {
  auto mutex = std::make_shared<std::mutex>();
  return [mutex, log = std::move(log)](std::string_view line) {
    const std::lock_guard lock(*mutex);
    log(line);
  };
}

Log choose_log(const RuntimeOptions& options, const Environment& environment) {
  if (options.log) return one_at_a_time(options.log);
  if (environment.quiet) return [](std::string_view) {};
  return one_at_a_time([](std::string_view line) { fmt::print(stderr, "flashjit: {}\n", line); });
}

}  // namespace

Settings resolve_settings(const RuntimeOptions& options, const Environment& environment) {
  Settings settings;
  settings.cache_dir = options.cache_dir.value_or(environment.cache_dir);
  settings.cache_limit = options.cache_limit.value_or(environment.cache_limit);
  settings.embedded_packs = options.embedded_packs;
  settings.packs = options.packs;
  settings.packs.insert(settings.packs.end(), environment.packs.begin(), environment.packs.end());
  settings.jit = options.jit ? *options.jit == JitMode::on : environment.jit;
  settings.template_dir = options.template_dir.value_or(environment.template_dir);
  settings.nvrtc = options.nvrtc.value_or(environment.nvrtc);
  settings.libcuda = environment.libcuda;
  settings.check_indices = options.check_indices.value_or(environment.check_indices);
  settings.check_waits = options.check_waits.value_or(environment.check_waits);
  settings.tune_in_background =
      options.tune_in_background.value_or(environment.tune_in_background) && settings.jit;
  settings.verbose = environment.verbose;
  settings.log = choose_log(options, environment);
  return settings;
}

}  // namespace flashjit
