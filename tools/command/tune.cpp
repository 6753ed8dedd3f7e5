// flashjit tune: measures tile configurations on this GPU and records the best of each problem.
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "autotune/device_meter.hpp"
#include "autotune/tuner.hpp"
#include "build.hpp"
#include "cache/folders.hpp"
#include "cache/store.hpp"
#include "command.hpp"
#include "gpu.hpp"
#include "plan/family.hpp"
#include "plan/shipped.hpp"
#include "support/environment.hpp"
#include "support/file.hpp"
#include "support/paths.hpp"
#include "support/stderr.hpp"
#include "tools/parts/report.hpp"

namespace flashjit::command {
namespace {

struct TuneCommand {
  std::vector<std::string> specs, shapes, families, devices;
  std::string suite, cache_dir, report, ship;
  double budget_seconds = 0, prune = 0;
  double map_density = autotune::kDefaultMapDensity;
  std::size_t max_candidates = 0;
  bool force = false, exhaustive = false;
};

/// Clocks that settle and a warm GPU move times less than this.
constexpr double kSuspiciousDrift = 0.10;

/// One problem's result, or why it has none.
struct Tuned {
  autotune::Problem problem;
  autotune::TuneResult result;
  std::string failure = {};
  int exit = kOk;

  bool ok() const { return failure.empty(); }
};

std::vector<autotune::Problem> problems_of(const TuneCommand& command) {
  const bool listed = !command.specs.empty() || !command.shapes.empty();
  if (listed == !command.suite.empty()) {
    throw Error(ErrorCode::invalid_argument,
                "tune takes either --spec with --shape, or --suite; give one of the two ways");
  }
  std::vector<autotune::Problem> problems;
  if (!listed) {
    for (const Problem& line : read_suite(path_of(command.suite))) {
      require_tuned(line.spec);
      problems.push_back({line.spec, line.shape.value_or(default_shape())});
    }
    return problems;
  }
  if (command.specs.empty() || command.shapes.empty()) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("{} is missing; tune takes every --spec at every --shape",
                            command.specs.empty() ? "--spec" : "--shape"));
  }
  for (const std::string& spec_text : command.specs) {
    for (const KernelSpec& spec : parse_passes(spec_text)) {
      require_tuned(spec);
      for (const std::string& shape_text : command.shapes) {
        const AttentionShape shape = parse_shape(shape_text);
        shape.validate();
        problems.push_back({spec, shape});
      }
    }
  }
  return problems;
}

std::string cache_folder(const TuneCommand& command) {
  const std::string folder = command.cache_dir.empty() ? read_environment().cache_dir : command.cache_dir;
  if (folder.empty()) {
    throw Error(ErrorCode::invalid_argument,
                "there is no cache folder to keep tuning records in; give --dir or set FLASHJIT_CACHE_DIR");
  }
  if (const std::string cause = cache::why_foreign(path_of(folder)); !cause.empty())
    throw Error(ErrorCode::io,
                fmt::format("no tuning records are kept in '{}', as no call would read them: {}; "
                            "give --dir a folder of your own that only you can write",
                            folder, cause));
  if (!can_keep_files(path_of(folder)))
    throw Error(ErrorCode::io,
                fmt::format("no tuning records can be kept in '{}', where no file can be made; "
                            "give --dir a folder that can be written",
                            folder));
  return folder;
}

/// Reported before minutes are spent, not after.
void require_folder_of(const std::string& file, const char* option) {
  if (file.empty()) return;
  const std::filesystem::path folder = std::filesystem::absolute(path_of(file)).parent_path();
  if (!std::filesystem::is_directory(folder))
    throw Error(ErrorCode::invalid_argument,
                fmt::format("{} is '{}', but there is no folder '{}'; make it, or name another file", option,
                            file, folder.string()));
}

autotune::TuneOptions options_of(const TuneCommand& command, double budget_seconds) {
  autotune::TuneOptions options;
  for (const std::string& family : command.families) options.families.push_back(parse_family(family));
  options.max_candidates = command.max_candidates;
  options.budget_seconds = budget_seconds;
  options.force = command.force;
  options.exhaustive = command.exhaustive;
  options.prune = command.prune;
  options.map_density = command.map_density;
  options.stop = interrupted;
  return options;
}

std::string event_text(const autotune::Event& event) {
  const plan::Timing& timing = event.timing;
  const std::string outcome = timing.skipped.empty() ? format_ms(timing.ms) + " ms" : timing.skipped;
  const std::string best = event.best_ms > 0 ? fmt::format(", best {} ms", format_ms(event.best_ms)) : "";
  return fmt::format("{} {}{}", to_string(timing.config), outcome, best);
}

/// The best kernel goes into the cache now, so that its first user does not compile.
void keep_best(const std::string& folder, const autotune::Problem& problem, const TileConfig& best) {
  Runtime runtime(
      {.cache_dir = folder, .packs = {}, .jit = JitMode::on, .template_dir = {}, .log = [](std::string_view) {
       }});
  runtime.prepare(problem.spec, problem.shape, best);
}

std::string why_nothing_was_measured(const autotune::TuneResult& result) {
  if (result.ending != autotune::Ending::complete)
    return to_string(result.ending) + " before anything was measured";
  const plan::Timing& heuristic =
      *std::ranges::find(result.record.timings, result.heuristic, &plan::Timing::config);
  return fmt::format("no candidate could be measured; {}: {}", to_string(heuristic.config),
                     heuristic.skipped);
}

/// What several devices share: the records as they grow, and the right to print.
struct Shared {
  std::mutex mutex;
  plan::TuningRecords records;
  bool several_devices = false;
};

/// Where the search begins: what was found for a near shape, also in what this run has tuned before.
std::vector<TileConfig> leads_for(const autotune::Problem& problem, const DeviceInfo& device,
                                  Shared& shared) {
  const auto usable = [&](const TileConfig& config) {
    const plan::FamilyTraits& family = plan::traits(config.family);
    return family.supports(problem.spec, device) && family.admits(problem.spec, config, device);
  };
  const std::lock_guard lock(shared.mutex);
  const auto match = shared.records.find(problem.spec, problem.shape, device, usable);
  return match.record ? std::vector{match.record->best} : std::vector<TileConfig>{};
}

/// Reports every candidate on stderr, and in the end the state of the GPU.
class Reporter {
 public:
  Reporter(const autotune::Problem& problem, int device, Shared& shared)
      : what_(fmt::format("{} {}", to_string(problem.spec), to_string(problem.shape))), shared_(shared) {
    if (shared.several_devices) what_ = fmt::format("GPU {}: {}", device, what_);
  }
  void operator()(const autotune::Event& event) {
    const std::lock_guard lock(shared_.mutex);
    if (!progress_) progress_.emplace(what_, event.total, shared_.several_devices);
    progress_->at(event.done, event.total, event_text(event));
  }
  void end(const autotune::Conditions& conditions) {
    const std::lock_guard lock(shared_.mutex);
    progress_.reset();  // ends the bar's line
    const std::string text = to_string(conditions);
    if (!text.empty()) write_to_stderr(fmt::format("{}: {}\n", what_, text));
  }

 private:
  std::string what_;
  Shared& shared_;
  std::optional<Progress> progress_;
};

autotune::TuneResult tune_one(const autotune::Problem& problem, const autotune::Setting& setting,
                              autotune::Meter& meter, autotune::TuneOptions options,
                              const std::string& folder, Shared& shared) {
  options.leads = leads_for(problem, setting.device, shared);
  const cache::Store store(path_of(folder), cache::Store::Access::read_write, warn);
  autotune::TuneResult result = autotune::tune_into(store.records_folder(), problem, setting, meter, options);
  if (result.has_best()) {
    const std::lock_guard lock(shared.mutex);
    shared.records.add(result.record);
  }
  if (result.drift > kSuspiciousDrift)
    warn(
        fmt::format("{} {}: the time of the heuristic's choice moved by {:.0f}% while others were measured "
                    "beside it; let nothing else use the GPU, and tune again with --force",
                    to_string(problem.spec), to_string(problem.shape), 100 * result.drift));
  if (result.measured > 0) keep_best(folder, problem, result.record.best);
  return result;
}

/// Whether the other problems cannot be tuned either.
bool is_fatal(ErrorCode code) {
  return code != ErrorCode::unsupported && code != ErrorCode::invalid_argument &&
         code != ErrorCode::compile_failed;
}

Tuned attempt(const autotune::Problem& problem, const autotune::Setting& setting, autotune::Meter& meter,
              autotune::TuneOptions options, const std::string& folder, Shared& shared) {
  try {
    Tuned tuned{problem, tune_one(problem, setting, meter, std::move(options), folder, shared)};
    if (!tuned.result.has_best()) {
      tuned.failure = why_nothing_was_measured(tuned.result);
      tuned.exit = kFailed;
    }
    return tuned;
  } catch (const Error& error) {
    if (is_fatal(error.code())) throw;
    return {problem, {}, error.message(), exit_code(error.code())};
  }
}

void print_table(const std::vector<Tuned>& all) {
  Table table({"spec", "shape", "best", "ms", "heuristic", "ms", "speed-up", "measured", "s", "ending"});
  for (const Tuned& tuned : all) {
    std::vector<std::string> row{to_string(tuned.problem.spec), to_string(tuned.problem.shape)};
    if (tuned.ok()) {
      const autotune::TuneResult& r = tuned.result;
      const double heuristic_ms = r.heuristic_ms();
      row.insert(row.end(), {to_string(r.record.best), format_ms(r.best_ms()), to_string(r.heuristic),
                             heuristic_ms > 0 ? format_ms(heuristic_ms) : "-",
                             heuristic_ms > 0 ? fmt::format("{:.3f}", heuristic_ms / r.best_ms()) : "-",
                             fmt::format("{}/{}", r.measured, r.candidates), fmt::format("{:.1f}", r.seconds),
                             to_string(r.ending)});
    } else {
      row.insert(row.end(), {"-", "-", "-", "-", "-", "-", "-", tuned.failure});
    }
    table.add(std::move(row));
  }
  table.print();
}

Json range_json(const std::optional<autotune::Range>& range) {
  if (!range) return nullptr;
  return {{"first", range->first}, {"last", range->last}, {"least", range->least}, {"most", range->most}};
}

Json tuned_json(const Tuned& tuned, const DeviceInfo& device, double map_density) {
  Json json{{"spec", to_string(tuned.problem.spec)}, {"shape", to_string(tuned.problem.shape)}};
  if (!tuned.ok()) {
    json["failure"] = tuned.failure;
    return json;
  }
  const autotune::TuneResult& result = tuned.result;
  json.update({{"best", to_string(result.record.best)},
               {"best_ms", result.best_ms()},
               {"heuristic", to_string(result.heuristic)},
               {"heuristic_ms", result.heuristic_ms()},
               {"measured", result.measured},
               {"candidates", result.candidates},
               {"seconds", result.seconds},
               {"drift", result.drift},
               {"clock_mhz", range_json(result.conditions.clock_mhz)},
               {"celsius", range_json(result.conditions.celsius)},
               {"slowed_by", autotune::slowed_text(result.conditions.slowed_by)},
               {"ending", to_string(result.ending)}});
  const autotune::Model model({result.record.spec, result.record.shape}, device, map_density);
  for (const plan::Timing& timing : result.record.timings) {
    json["timings"].push_back({{"config", to_string(timing.config)},
                               {"ms", timing.ms},
                               {"predicted_ms", model.predict(timing.config).ms},
                               {"skipped", timing.skipped}});
  }
  return json;
}

void print_results(const std::vector<Tuned>& all, const autotune::Setting& setting, const std::string& folder,
                   const TuneCommand& command, bool json) {
  if (!json) {
    print_table(all);
    fmt::print("{}, driver {}, {}; records in {}\n", setting.device.name, setting.driver, setting.nvrtc,
               folder);
    return;
  }
  Json problems = Json::array();
  for (const Tuned& tuned : all) problems.push_back(tuned_json(tuned, setting.device, command.map_density));
  print_json({{"device", setting.device.name},
              {"arch", setting.device.arch},
              {"driver", setting.driver},
              {"nvrtc", setting.nvrtc},
              {"cache_dir", folder},
              {"problems", std::move(problems)}});
}

/// The ordinals that --device names.
std::vector<int> ordinals(const std::vector<std::string>& devices, const device::Driver& driver) {
  if (devices.empty()) return {0};
  const int count = device::device_count(driver);
  std::vector<int> all;
  for (const std::string& text : devices) {
    if (text == "all") {
      for (int i = 0; i < count; ++i) all.push_back(i);
      continue;
    }
    int ordinal = -1;
    const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), ordinal);
    if (problem != std::errc() || end != text.data() + text.size() || ordinal < 0 || ordinal >= count)
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("--device is '{}'; there are {} devices: give numbers from 0 on, separated by "
                              "commas, or all",
                              text, count));
    all.push_back(ordinal);
  }
  std::ranges::sort(all);
  all.erase(std::unique(all.begin(), all.end()), all.end());
  return all;
}

/// A run over all problems: devices take one after the other, side by side.
class TuneRun {
 public:
  TuneRun(const TuneCommand& command, std::vector<autotune::Problem> problems, std::string folder)
      : command_(command),
        problems_(std::move(problems)),
        folder_(std::move(folder)),
        results_(problems_.size()),
        end_(seconds_now() + command.budget_seconds) {
    shared_.records = chosen_records();
  }

  /// Throws what ended the work of a device; the others end their problem first.
  void run(const std::shared_ptr<const device::Driver>& driver, const std::vector<int>& devices) {
    shared_.several_devices = devices.size() > 1;
    devices_ = devices.size();
    std::vector<std::future<void>> workers;
    for (const int device : devices)
      workers.push_back(std::async(std::launch::async, [this, driver, device] { work(driver, device); }));
    std::exception_ptr failure;
    for (std::future<void>& worker : workers) {
      try {
        worker.get();
      } catch (...) {
        if (!failure) failure = std::current_exception();
      }
    }
    if (failure) std::rethrow_exception(failure);
  }

  /// In the order of the problems; those that were not reached are left out.
  std::vector<Tuned> results() const {
    std::vector<Tuned> done;
    for (const std::optional<Tuned>& result : results_)
      if (result) done.push_back(*result);
    return done;
  }
  const autotune::Setting& setting() const { return setting_; }

 private:
  void work(const std::shared_ptr<const device::Driver>& driver, int ordinal) {
    try {
      const device::PrimaryContext gpu(driver, ordinal);
      const autotune::Setting setting = autotune::read_setting(gpu);
      {
        const std::lock_guard lock(shared_.mutex);
        setting_ = setting;
      }
      autotune::DeviceMeter meter(gpu, {.map_density = command_.map_density});
      for (std::size_t i = next_++; i < problems_.size() && !interrupted() && !failed_; i = next_++) {
        autotune::TuneOptions options = options_of(command_, budget(i));
        options.compile_threads =
            std::max(1u, std::thread::hardware_concurrency() / static_cast<unsigned>(devices_));
        Reporter reporter(problems_[i], ordinal, shared_);
        options.report = std::ref(reporter);
        results_[i] = attempt(problems_[i], setting, meter, options, folder_, shared_);
        reporter.end(results_[i]->result.conditions);
      }
    } catch (...) {
      failed_ = true;
      throw;
    }
  }

  /// What is left of the budget is shared evenly by the problems that are left.
  double budget(std::size_t problem) const {
    if (command_.budget_seconds <= 0) return 0;
    const auto rounds = (problems_.size() - problem + devices_ - 1) / devices_;
    return std::max((end_ - seconds_now()) / static_cast<double>(rounds), 1e-3);
  }

  const TuneCommand& command_;
  std::vector<autotune::Problem> problems_;
  std::string folder_;
  std::vector<std::optional<Tuned>> results_;  // each written by the thread that took its problem
  double end_;
  std::size_t devices_ = 1;
  Shared shared_;
  autotune::Setting setting_;
  std::atomic<std::size_t> next_{0};
  std::atomic<bool> failed_{false};
};

/// For --report: what was tuned, with the conditions of what this run measured.
std::vector<autotune::Reported> reported(const std::vector<Tuned>& all) {
  std::vector<autotune::Reported> records;
  for (const Tuned& tuned : all)
    if (tuned.ok() && tuned.result.has_best())
      records.push_back({tuned.result.record, tuned.result.conditions});
  return records;
}

/// For --ship: the records alone.
std::vector<plan::TuningRecord> records_of(const std::vector<Tuned>& all) {
  std::vector<plan::TuningRecord> records;
  for (autotune::Reported& tuned : reported(all)) records.push_back(std::move(tuned.record));
  return records;
}

int tune(const TuneCommand& command, bool json) {
  const std::vector<autotune::Problem> problems = problems_of(command);
  const std::string folder = cache_folder(command);
  require_folder_of(command.report, "--report");
  require_folder_of(command.ship, "--ship");
  options_of(command, 0);  // a wrong family is reported before a GPU is looked for
  const std::shared_ptr<const device::Driver> driver = chosen_driver();
  const std::vector<int> devices = ordinals(command.devices, *driver);

  interrupted();  // from here on Ctrl-C is a question that is asked between candidates
  TuneRun run(command, problems, folder);
  try {
    run.run(driver, devices);
  } catch (const Error&) {
    if (!run.results().empty() && !json) print_table(run.results());  // what is done is recorded and printed
    throw;
  }
  const std::vector<Tuned> all = run.results();
  print_results(all, run.setting(), folder, command, json);
  if (!command.report.empty())
    write_output(path_of(command.report),
                 autotune::report_html(reported(all), run.setting().device, command.map_density));
  if (!command.ship.empty()) write_output(path_of(command.ship), plan::shipped_text(records_of(all)));
  if (interrupted()) return kInterrupted;
  const auto failed = std::ranges::find_if(all, [](const Tuned& tuned) { return !tuned.ok(); });
  return failed == all.end() ? kOk : failed->exit;
}

}  // namespace

void add_tune(CLI::App& app, Context& context) {
  auto options = std::make_shared<TuneCommand>();
  CLI::App* command =
      add_subcommand(app, context, "tune", "Measure tile configurations on this GPU and record the best",
                     "flashjit tune --spec bf16:d128:causal --shape b2:hq16:hkv16:sq4096:skv4096",
                     [options, &context] { return tune(*options, context.json); });
  command->add_option("--spec", options->specs,
                      fmt::format("What is computed; {}; repeatable", kPassesOfSpec));
  command->add_option("--shape", options->shapes,
                      "Batch, heads and lengths; every --spec is tuned at every --shape");
  command->add_option("--suite", options->suite,
                      "File with \"spec [shape]\" on each line, '#' begins a comment");
  command->add_flag("--force", options->force, "Measure again what a record already holds");
  command
      ->add_option("--budget", options->budget_seconds,
                   "Seconds for all problems together; the best so far is kept. Default: no limit")
      ->check(CLI::NonNegativeNumber);
  command
      ->add_option("--families", options->families,
                   "Kernel families to try: sm90,sm80,sm75,simt. Default: all that can")
      ->delimiter(',');
  command->add_flag("--exhaustive", options->exhaustive,
                    "Measure every candidate, not the promising ones alone");
  command
      ->add_option("--prune", options->prune,
                   "Leave out candidates that the model expects to be this many times slower than the best")
      ->check(CLI::NonNegativeNumber);
  command->add_option("--max-candidates", options->max_candidates,
                      "The most candidates that are measured a problem. Default: 15%, at least 6");
  command->add_option("--report", options->report, "Write a page (HTML) on what was measured");
  command->add_option("--ship", options->ship,
                      "Write the choices as a file for runtime/plan/shipped, which the library embeds");
  command->add_option("--map-density", options->map_density,
                      "Share of blocks that attend, for specs with a block map. Default: 0.25");
  command->add_option("--dir", options->cache_dir,
                      "Cache folder. Default: FLASHJIT_CACHE_DIR and its defaults");
  command
      ->add_option(
          "--device", options->devices,
          "CUDA devices, counted from 0 (default), separated by commas, or all: they work side by side")
      ->delimiter(',');
}

}  // namespace flashjit::command
