// The tuner as a Runtime uses it in a running service: one thread, one shape after another.
#include "call/background.hpp"

#include <fmt/format.h>

#include "autotune/device_meter.hpp"
#include "autotune/tuner.hpp"
#include "cache/folders.hpp"
#include "cache/store.hpp"
#include "support/paths.hpp"
#include "support/worker.hpp"

namespace flashjit {
namespace {

constexpr unsigned kCompileThreads = 2;  // the rest of the machine is the service's
constexpr double kBudgetSeconds = 60;    // a shape
// All are read at a process's first call. A service that sees many lengths would go on for ever.
constexpr std::size_t kMostRecords = 1000;

class TunerThread : public BackgroundTuner {
 public:
  TunerThread(const Settings& settings, Adopt adopt) : settings_(settings), adopt_(std::move(adopt)) {}

  void want(BackgroundJob job) override {
    worker_.want([this, job = std::move(job)](const std::stop_token& stop) {
      // The service goes on without tuning: the error is reported, and calls keep their configurations.
      try {
        tune(job, stop);
      } catch (const std::exception& error) {
        settings_.log(fmt::format("cannot tune {} at {} in the background: {}", to_string(job.spec),
                                  to_string(job.shape), error.what()));
      }
    });
  }

 private:
  RuntimeOptions candidate_options() const {
    RuntimeOptions options = autotune::candidate_options();
    options.nvrtc = settings_.nvrtc;
    options.template_dir = settings_.template_dir;
    return options;
  }

  void tune(const BackgroundJob& job, const std::stop_token& stop) {
    job.context.make_current_apart();
    autotune::DeviceMeter meter(job.context, {.runtime = candidate_options()});
    const autotune::Setting setting = autotune::read_setting(job.context, candidate_options());
    autotune::TuneOptions options;
    options.families = {job.current.family};
    options.leads = {job.current};
    options.max_workspace = job.workspace_bytes;
    options.budget_seconds = kBudgetSeconds;
    options.compile_threads = kCompileThreads;
    options.stop = [&] { return stop.stop_requested(); };
    const autotune::Problem problem{job.spec, job.shape};
    // Without a log: the calls' store of this folder has said what is wrong with it.
    cache::Store store(path_of(settings_.cache_dir), cache::Store::Access::cache);
    const bool keeps = !settings_.cache_dir.empty() && store.is_usable(cache::kTuningFolder);
    const autotune::TuneResult result =
        keeps ? autotune::tune_into(store.records_folder(), problem, setting, meter, options)
              : autotune::tune(problem, setting, meter, options);
    if (keeps) store.prune_records(kMostRecords);
    if (!result.has_best() || stop.stop_requested()) return;
    adopt_(job, result.record.best);
    settings_.log(fmt::format("tuned {} at {} in the background: {} takes {:.4f} ms, {} measured in {:.1f} s",
                              to_string(job.spec), to_string(job.shape), to_string(result.record.best),
                              result.best_ms(), result.measured, result.seconds));
  }

  const Settings& settings_;
  const Adopt adopt_;
  Worker worker_;  // last: ended before the rest goes
};

}  // namespace

std::unique_ptr<BackgroundTuner> make_background_tuner(const Settings& settings, Adopt adopt) {
  return std::make_unique<TunerThread>(settings, std::move(adopt));
}

}  // namespace flashjit
