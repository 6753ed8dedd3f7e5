// flashjit bench: how long kernels take on this GPU, and what rate of arithmetic that is.
#include <fmt/format.h>

#include <ctime>
#include <fstream>
#include <memory>
#include <optional>

#include "autotune/compile_ahead.hpp"
#include "autotune/device_meter.hpp"
#include "autotune/space.hpp"
#include "build.hpp"
#include "command.hpp"
#include "gpu.hpp"
#include "plan/plan.hpp"
#include "support/paths.hpp"
#include "system.hpp"

namespace flashjit::command {
namespace {

struct BenchCommand {
  std::string spec, config, csv;
  std::vector<std::string> shapes;
  bool all_configs = false;
  int repeats = 21;
  double map_density = autotune::kDefaultMapDensity;
  int device = 0;
};

struct Choice {
  TileConfig config;
  std::string source;  ///< "given", "tuned", ..., "searched"
};

/// One kernel's time, or why it has none.
struct Measurement {
  autotune::Problem problem;
  Choice choice;
  autotune::Work work;
  double ms = 0;
  std::string failure;

  double teraflops() const { return ms > 0 ? work.operations / ms * 1e-9 : 0; }
};

std::vector<Choice> choices_of(const BenchCommand& command, const autotune::Problem& problem,
                               const DeviceInfo& device) {
  if (command.all_configs) {
    std::vector<Choice> all;
    for (const TileConfig& config : autotune::candidates(autotune::Model(problem, device)))
      all.push_back({config, "searched"});
    return all;
  }
  std::optional<TileConfig> given;
  if (!command.config.empty()) given = parse_config(command.config);
  const plan::ExecutionPlan plan =
      plan::make_plan(problem.spec, problem.shape, device, chosen_records(), given);
  return {{plan.config, to_string(plan.config_source)}};
}

/// Compiles ahead in parallel, measures in order, each beside the first that can be measured. The clocks are
/// steady when its time is.
std::vector<Measurement> measure(const BenchCommand& command, const autotune::Problem& problem,
                                 const DeviceInfo& device, autotune::Meter& meter) {
  const std::vector<Choice> choices = choices_of(command, problem, device);
  const autotune::Work work = autotune::work_of(
      problem.spec, problem.shape, autotune::plausible_map(problem.spec, problem.shape, command.map_density));
  autotune::CompileAhead<KernelReport> kernels(
      choices.size(), std::max(1u, std::thread::hardware_concurrency()),
      [&](std::size_t i) { return meter.prepare(problem, choices[i].config); });
  for (std::size_t i = 0; i < choices.size(); ++i) kernels.want(i);
  Progress progress(fmt::format("{} {}", to_string(problem.spec), to_string(problem.shape)), choices.size());
  std::vector<Measurement> measurements;
  std::optional<TileConfig> reference;
  double reference_ms = 0;
  for (std::size_t i = 0; i < choices.size() && !interrupted(); ++i) {
    Measurement measurement{problem, choices[i], work, 0, {}};
    try {
      measurement.choice.config = kernels.take(i).config;
      const TileConfig& config = measurement.choice.config;
      if (reference) {
        measurement.ms =
            reference_ms * meter.compare(problem, *reference, {&config, 1}, command.repeats).ratios.front();
      } else {
        measurement.ms = reference_ms = meter.compare(problem, config, {}, command.repeats).reference_ms;
        reference = config;
      }
    } catch (const Error& error) {
      // With one configuration the error says it all; among many the others still count.
      if (choices.size() == 1 || error.code() == ErrorCode::cuda) throw;
      measurement.failure = error.message();
    }
    progress.step(to_string(choices[i].config));
    measurements.push_back(std::move(measurement));
  }
  return measurements;
}

Json measurement_json(const Measurement& m) {
  return {{"spec", to_string(m.problem.spec)},
          {"shape", to_string(m.problem.shape)},
          {"config", to_string(m.choice.config)},
          {"config_source", m.choice.source},
          {"ms", m.ms},
          {"tflops", m.teraflops()},
          {"operations", m.work.operations},
          {"bytes", m.work.bytes},
          {"failure", m.failure}};
}

void print_table(const std::vector<Measurement>& measurements) {
  Table table({"spec", "shape", "config", "from", "ms", "TFLOP/s", "Gop", "MB"});
  for (const Measurement& m : measurements) {
    const bool ok = m.failure.empty();
    table.add({to_string(m.problem.spec), to_string(m.problem.shape), to_string(m.choice.config),
               m.choice.source, ok ? format_ms(m.ms) : "-",
               ok ? fmt::format("{:.1f}", m.teraflops()) : m.failure,
               fmt::format("{:.1f}", m.work.operations * 1e-9), fmt::format("{:.1f}", m.work.bytes * 1e-6)});
  }
  table.print();
}

void check_written(const std::ofstream& file, const std::string& path) {
  if (!file)
    throw Error(ErrorCode::io,
                fmt::format("cannot write '{}'; give --csv a file in a folder that can be written", path));
}

/// Rows are added to a file that is there, so that a series of runs makes one file.
void append_csv(const std::string& path, const std::vector<Measurement>& measurements,
                const std::string& device) {
  std::error_code ignored;
  const bool fresh = !std::filesystem::exists(path_of(path), ignored) ||
                     std::filesystem::file_size(path_of(path), ignored) == 0;
  std::ofstream file(path_of(path), std::ios::app);
  if (fresh) file << "date,device,spec,shape,config,config_source,ms,tflops,operations,bytes\n";
  const std::tm utc = utc_of(std::time(nullptr));
  char date[32];
  std::strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", &utc);
  for (const Measurement& m : measurements) {
    if (!m.failure.empty()) continue;
    file << fmt::format("{},{},{},{},{},{},{:.5f},{:.2f},{:.0f},{:.0f}\n", date, device,
                        to_string(m.problem.spec), to_string(m.problem.shape), to_string(m.choice.config),
                        m.choice.source, m.ms, m.teraflops(), m.work.operations, m.work.bytes);
  }
  file.flush();
  check_written(file, path);
}

int bench(const BenchCommand& command, bool json) {
  if (command.all_configs && !command.config.empty())
    throw Error(ErrorCode::invalid_argument, "--config and --all-configs exclude each other; give one");
  if (!command.csv.empty())
    check_written(std::ofstream(path_of(command.csv), std::ios::app), command.csv);  // before the work
  std::vector<autotune::Problem> problems;
  for (const KernelSpec& spec : parse_passes(command.spec)) {
    require_tuned(spec);
    for (const std::string& text : command.shapes) {
      const AttentionShape shape = parse_shape(text);
      shape.validate();
      problems.push_back({spec, shape});
    }
  }
  const device::PrimaryContext gpu(chosen_driver(), command.device);
  const autotune::Setting setting = autotune::read_setting(gpu);
  autotune::DeviceMeter meter(gpu, {.map_density = command.map_density});

  std::vector<Measurement> all;
  for (const autotune::Problem& problem : problems) {
    if (interrupted()) break;
    for (Measurement& m : measure(command, problem, setting.device, meter)) all.push_back(std::move(m));
  }
  if (!command.csv.empty()) append_csv(command.csv, all, setting.device.name);
  if (json) {
    Json list = Json::array();
    for (const Measurement& m : all) list.push_back(measurement_json(m));
    print_json({{"device", setting.device.name}, {"repeats", command.repeats}, {"kernels", std::move(list)}});
  } else {
    print_table(all);
    fmt::print("{}; medians of {} launches; operations of pairs that attend, bytes of every tensor once\n",
               setting.device.name, command.repeats);
  }
  return interrupted() ? kInterrupted : kOk;
}

}  // namespace

void add_bench(CLI::App& app, Context& context) {
  auto options = std::make_shared<BenchCommand>();
  CLI::App* command =
      add_subcommand(app, context, "bench", "Time kernels on this GPU",
                     "flashjit bench --spec bf16:d128:causal --shape b4:hq16:hkv16:sq4096:skv4096",
                     [options, &context] { return bench(*options, context.json); });
  command->add_option("--spec", options->spec, fmt::format("What is computed; {}", kPassesOfSpec))
      ->required();
  command
      ->add_option("--shape", options->shapes,
                   "Batch, heads and lengths: b4:hq16:hkv16:sq4096:skv4096; repeatable")
      ->required();
  command->add_option("--config", options->config, "Time this tile configuration");
  command->add_flag("--all-configs", options->all_configs, "Time every configuration of the search space");
  command->add_option("--repeats", options->repeats, "Timed launches of each; the median counts. Default: 21")
      ->check(CLI::Range(1, 10000));
  command->add_option("--csv", options->csv, "Add the results to this file");
  command->add_option("--map-density", options->map_density,
                      "Share of blocks that attend, for specs with a block map. Default: 0.25");
  command->add_option("--device", options->device, "CUDA device, counted from 0 (default)");
}

}  // namespace flashjit::command
