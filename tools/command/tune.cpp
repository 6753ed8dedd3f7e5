// flashjit tune: measures tile configurations on this GPU and records the best of each problem.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>

#include "autotune/device_meter.hpp"
#include "autotune/tuner.hpp"
#include "build.hpp"
#include "cache/store.hpp"
#include "command.hpp"
#include "gpu.hpp"
#include "support/environment.hpp"

namespace flashjit::command {
namespace {

struct TuneCommand {
  std::vector<std::string> specs, shapes, families;
  std::string suite, cache_dir;
  double budget_seconds = 0;
  double map_density = autotune::kDefaultMapDensity;
  std::size_t max_candidates = 0;
  bool force = false;
  int device = 0;
};

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
    for (const Problem& line : read_suite(command.suite))
      problems.push_back({line.spec, line.shape.value_or(default_shape())});
    return problems;
  }
  if (command.specs.empty() || command.shapes.empty()) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("{} is missing; tune takes every --spec at every --shape",
                            command.specs.empty() ? "--spec" : "--shape"));
  }
  for (const std::string& spec_text : command.specs) {
    for (const AttentionSpec& spec : parse_passes(spec_text)) {
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
  return folder;
}

autotune::TuneOptions options_of(const TuneCommand& command, double budget_seconds) {
  autotune::TuneOptions options;
  for (const std::string& family : command.families) options.families.push_back(parse_family(family));
  options.max_candidates = command.max_candidates;
  options.budget_seconds = budget_seconds;
  options.force = command.force;
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

autotune::TuneResult tune_one(const autotune::Problem& problem, const autotune::Setting& setting,
                              autotune::Meter& meter, autotune::TuneOptions options,
                              const std::string& folder) {
  std::optional<Progress> progress;
  options.report = [&](const autotune::Event& event) {
    if (!progress)
      progress.emplace(fmt::format("{} {}", to_string(problem.spec), to_string(problem.shape)), event.total);
    progress->step(event_text(event));
  };
  const cache::Store store(folder, cache::Store::Access::read_write, warn);
  autotune::TuneResult result = autotune::tune_into(store.records_folder(), problem, setting, meter, options);
  if (result.measured > 0) keep_best(folder, problem, result.record.best);
  return result;
}

/// Whether the other problems cannot be tuned either.
bool is_fatal(ErrorCode code) {
  return code != ErrorCode::unsupported && code != ErrorCode::invalid_argument &&
         code != ErrorCode::compile_failed;
}

Tuned attempt(const autotune::Problem& problem, const autotune::Setting& setting, autotune::Meter& meter,
              autotune::TuneOptions options, const std::string& folder) {
  try {
    Tuned tuned{problem, tune_one(problem, setting, meter, std::move(options), folder)};
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
  Table table({"spec", "shape", "best", "ms", "heuristic", "ms", "speed-up", "measured", "ending"});
  for (const Tuned& tuned : all) {
    std::vector<std::string> row{to_string(tuned.problem.spec), to_string(tuned.problem.shape)};
    if (tuned.ok()) {
      const autotune::TuneResult& r = tuned.result;
      const double heuristic_ms = r.heuristic_ms();
      row.insert(row.end(), {to_string(r.record.best), format_ms(r.best_ms()), to_string(r.heuristic),
                             heuristic_ms > 0 ? format_ms(heuristic_ms) : "-",
                             heuristic_ms > 0 ? fmt::format("{:.3f}", heuristic_ms / r.best_ms()) : "-",
                             fmt::format("{}", r.measured), to_string(r.ending)});
    } else {
      row.insert(row.end(), {"-", "-", "-", "-", "-", "-", tuned.failure});
    }
    table.add(std::move(row));
  }
  table.print();
}

Json tuned_json(const Tuned& tuned) {
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
               {"ending", to_string(result.ending)}});
  for (const plan::Timing& timing : result.record.timings) {
    json["timings"].push_back(
        {{"config", to_string(timing.config)}, {"ms", timing.ms}, {"skipped", timing.skipped}});
  }
  return json;
}

void print_results(const std::vector<Tuned>& all, const autotune::Setting& setting, const std::string& folder,
                   bool json) {
  if (!json) {
    print_table(all);
    fmt::print("{}, driver {}, {}; records in {}\n", setting.device.name, setting.driver, setting.nvrtc,
               folder);
    return;
  }
  Json problems = Json::array();
  for (const Tuned& tuned : all) problems.push_back(tuned_json(tuned));
  print_json({{"device", setting.device.name},
              {"arch", setting.device.arch},
              {"driver", setting.driver},
              {"nvrtc", setting.nvrtc},
              {"cache_dir", folder},
              {"problems", std::move(problems)}});
}

int tune(const TuneCommand& command, bool json) {
  const std::vector<autotune::Problem> problems = problems_of(command);
  const std::string folder = cache_folder(command);
  options_of(command, 0);  // a wrong family is told before a GPU is looked for
  const device::PrimaryContext gpu(chosen_driver(), command.device);
  const autotune::Setting setting = autotune::read_setting(gpu);
  autotune::DeviceMeter meter(gpu, command.map_density);

  const double end = seconds_now() + command.budget_seconds;
  std::vector<Tuned> all;
  for (std::size_t i = 0; i < problems.size() && !interrupted(); ++i) {
    // What is left of the budget is shared evenly by the problems that are left.
    const double share = (end - seconds_now()) / static_cast<double>(problems.size() - i);
    const double budget = command.budget_seconds > 0 ? std::max(share, 1e-3) : 0;
    try {
      all.push_back(attempt(problems[i], setting, meter, options_of(command, budget), folder));
    } catch (const Error&) {
      if (!all.empty() && !json) print_table(all);  // what is done is recorded and told
      throw;
    }
  }
  print_results(all, setting, folder, json);
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
                      "What is computed; both passes unless it begins with fwd: or bwd:; repeatable");
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
                   "Kernel families to try: sm90,sm80,simt. Default: all that can")
      ->delimiter(',');
  command->add_option("--max-candidates", options->max_candidates,
                      "Candidates a problem, the most promising first. Default: all");
  command->add_option("--map-density", options->map_density,
                      "Share of blocks that attend, for specs with a block map. Default: 0.25");
  command->add_option("--dir", options->cache_dir,
                      "Cache folder. Default: FLASHJIT_CACHE_DIR and its defaults");
  command->add_option("--device", options->device, "CUDA device, counted from 0 (default)");
}

}  // namespace flashjit::command
