// flashjit verify: kernels of this GPU against the CPU reference, on fresh random inputs or on those of
// files.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>
#include <random>
#include <thread>

#include "attention.hpp"
#include "autotune/compile_ahead.hpp"
#include "doctor.hpp"
#include "gpu.hpp"
#include "plan/family.hpp"
#include "plan/plan.hpp"
#include "support/environment.hpp"
#include "support/file.hpp"
#include "support/paths.hpp"
#include "support/text.hpp"
#include "tools/parts/everything.hpp"

namespace flashjit::command {
namespace {

struct VerifyOptions {
  std::string spec, shape, data, config, report;
  std::vector<std::string> scalars;
  bool all = false, all_configs = false, cpu = false;
  int seconds = 120;  ///< of --all
  std::optional<std::uint64_t> seed;
  int device = 0;
};

/// What a spec is verified on.
struct Inputs {
  std::string name;  ///< "random", or the layer in --data: "layer0"
  reference::Problem problem;
};

/// One kernel's results against the reference.
struct Verification {
  std::string spec, shape, inputs, config;
  std::vector<Comparison> comparisons;
  std::string failure;  ///< why it could not run; empty when it did

  bool ok() const { return failure.empty() && all_ok(comparisons); }
};

/// The tiles that each family which can would take.
std::vector<std::optional<TileConfig>> config_of_each_family(const KernelSpec& spec,
                                                             const AttentionShape& shape,
                                                             const DeviceInfo& device) {
  std::vector<std::optional<TileConfig>> configs;
  for (const plan::FamilyTraits& family : plan::families()) {
    if (!family.supports(spec, device)) continue;
    const TileConfig config = family.heuristic(spec, shape, device);
    if (family.admits(spec, config, device)) configs.emplace_back(config);
  }
  return configs;
}

/// The configurations to verify a pass with; nothing means the one that the runtime chooses.
std::vector<std::optional<TileConfig>> configs_of(const VerifyOptions& options, const KernelSpec& spec,
                                                  const AttentionShape& shape, const DeviceInfo& device) {
  if (options.all) return config_of_each_family(spec, shape, device);
  if (!options.config.empty()) return {parse_config(options.config)};
  if (!options.all_configs) return {std::nullopt};
  std::vector<std::optional<TileConfig>> configs;
  for (const plan::FamilyTraits& family : plan::families())
    if (family.supports(spec, device))
      for (const TileConfig& config : family.search_space(spec, device)) configs.emplace_back(config);
  return configs;
}

/// The outputs of the spec's own pass: a backward run computes out and lse on the way.
std::vector<Comparison> of_pass(std::vector<Comparison> comparisons, const KernelSpec& spec) {
  const int of_forward = spec.score.is_weight() ? 1 : 2;
  if (spec.pass == Pass::backward) comparisons.erase(comparisons.begin(), comparisons.begin() + of_forward);
  return comparisons;
}

/// "layer0" for each layer0_q.npy of a folder.
std::vector<std::string> layers_in(const std::filesystem::path& folder) {
  constexpr std::string_view kEnding = "_q.npy";
  std::vector<std::string> layers;
  std::error_code problem;
  for (const auto& file : std::filesystem::directory_iterator(folder, problem)) {
    const std::string name = file.path().filename().string();
    if (name.ends_with(kEnding)) layers.push_back(name.substr(0, name.size() - kEnding.size()));
  }
  if (layers.empty())
    throw Error(ErrorCode::io,
                fmt::format("'{}' holds no layer: wanted are layer0_q.npy, layer0_k.npy, layer0_v.npy and "
                            "layer0_dout.npy; give --data flashjit's tests/data",
                            folder.string()));
  std::ranges::sort(layers);
  return layers;
}

/// Q, K, V and dO of files; what else the spec has is random.
reference::Problem problem_of_layer(const KernelSpec& spec, const std::filesystem::path& folder,
                                    const std::string& layer, std::uint64_t seed) {
  if (spec.varlen || spec.kv.shared_kv)
    throw Error(ErrorCode::invalid_argument,
                "--data has sequences of one length, and V apart from K: leave varlen and shared_kv out");
  const auto file = [&](const char* tensor) {
    return (folder / fmt::format("{}_{}.npy", layer, tensor)).string();
  };
  InputFiles files{.q = file("q"), .k = file("k"), .v = file("v")};
  if (spec.pass == Pass::backward) files.dout = file("dout");
  reference::Problem read = read_problem(spec, files, Layout::bhsd);
  reference::Problem problem = random_problem(spec, read.shape, seed);
  for (auto tensor :
       {&reference::Problem::q, &reference::Problem::k, &reference::Problem::v, &reference::Problem::dout,
        &reference::Problem::q_scale, &reference::Problem::k_scale, &reference::Problem::v_scale})
    problem.*tensor = std::move(read.*tensor);
  return problem;
}

std::vector<Inputs> inputs_of(const VerifyOptions& options, const KernelSpec& spec, std::uint64_t seed) {
  std::vector<Inputs> all;
  if (options.data.empty())
    all.push_back({"random", random_problem(spec, parse_shape(options.shape), seed)});
  else
    for (const std::string& layer : layers_in(path_of(options.data)))
      all.push_back({layer, problem_of_layer(spec, path_of(options.data), layer, seed)});
  for (Inputs& inputs : all) set_scalars(inputs.problem, options.scalars);
  return all;
}

std::vector<double> fp32(std::vector<double> values) {
  for (double& value : values) value = reference::round_to(DType::fp32, value);
  return values;
}

std::vector<Verification> verify_on(const VerifyOptions& options, const Inputs& inputs,
                                    const device::PrimaryContext* gpu) {
  const reference::Problem& problem = inputs.problem;
  const KernelSpec& spec = problem.spec;
  const AttentionShape& shape = problem.shape;
  const Results exact = reference_results(problem);
  const Results rounded = reference_results(problem, reference::Precision::rounded);
  Verification verification{to_string(spec), to_string(shape), inputs.name, "CPU", {}, {}};
  if (!gpu) {
    Results computed = rounded;
    computed.lse = fp32(exact.lse);  // kernels keep these in fp32 whatever the spec's type is
    computed.row_max = fp32(exact.row_max);
    verification.comparisons = of_pass(compare(computed, exact, rounded, problem), spec);
    return {verification};
  }
  Runtime runtime(runtime_options());
  std::vector<Verification> verifications;
  for (const std::optional<TileConfig>& config : configs_of(options, spec, shape, runtime.device())) {
    if (interrupted()) break;
    verification.config = config ? to_string(*config) : "";
    verification.comparisons.clear();
    verification.failure.clear();
    try {
      verification.config = to_string(runtime.prepare(spec, shape, config).config);
      verification.comparisons =
          of_pass(compare(run_on_gpu(runtime, *gpu, problem), exact, rounded, problem), spec);
    } catch (const Error& error) {
      // With one configuration the error says it all; among many the others still count.
      const bool is_one_of_many = options.all_configs || options.all;
      if (!is_one_of_many || error.code() == ErrorCode::cuda) throw;
      verification.failure = error.message();
    }
    verifications.push_back(verification);
  }
  return verifications;
}

Json verification_json(const Verification& verification) {
  Json outputs = Json::array();
  for (const Comparison& comparison : verification.comparisons) outputs.push_back(to_json(comparison));
  return {{"spec", verification.spec},      {"shape", verification.shape}, {"inputs", verification.inputs},
          {"config", verification.config},  {"ok", verification.ok()},     {"outputs", std::move(outputs)},
          {"failure", verification.failure}};
}

void print_table(const std::vector<Verification>& verifications) {
  Table table({"spec", "inputs", "config", "output", "error", "limit", "ok"});
  for (const Verification& verification : verifications) {
    for (const Comparison& comparison : verification.comparisons)
      table.add({verification.spec, verification.inputs, verification.config, comparison.output,
                 fmt::format("{:.3g}", comparison.error), fmt::format("{:.3g}", comparison.limit),
                 comparison.ok() ? "yes" : "NO"});
    if (!verification.failure.empty())
      table.add({verification.spec, verification.inputs, verification.config, "-", "-", "-",
                 "NO: " + verification.failure});
  }
  table.print();
}

Json json_of(const std::vector<Verification>& verifications) {
  Json list = Json::array();
  for (const Verification& verification : verifications) list.push_back(verification_json(verification));
  return list;
}

int code_of(bool ok) {
  if (interrupted()) return kInterrupted;
  return ok ? kOk : kCheckFailed;
}

/// Null where the CPU computes.
std::unique_ptr<device::PrimaryContext> chosen_gpu(const VerifyOptions& options) {
  if (options.cpu) return nullptr;
  return std::make_unique<device::PrimaryContext>(chosen_driver(), options.device);
}

void print_verdict(const VerifyOptions& options, std::size_t count, std::uint64_t seed, bool ok) {
  fmt::print("{} {}, seed {}: {}\n", count,
             options.cpu ? "computations of the CPU in the spec's type" : "kernels", seed,
             ok ? "all within their limits" : "NOT all within their limits");
}

/// Compiles what --all will ask for, by all processors, while the CPU computes references: into the cache's
/// folder, where the runtimes of verify_on() find it.
class KernelsAhead {
 public:
  KernelsAhead(const std::vector<Problem>& problems, const device::PrimaryContext& gpu)
      : runtime_(runtime_options()) {
    for (std::size_t i = 0; i < problems.size(); ++i)
      for (const auto& config :
           config_of_each_family(problems[i].spec, *problems[i].shape, runtime_.device()))
        kernels_.push_back({i, config});
    compiled_.emplace(kernels_.size(), std::max(1u, std::thread::hardware_concurrency()), [&](std::size_t i) {
      gpu.make_current_apart();
      const auto& [spec, shape] = problems[kernels_[i].problem];
      return runtime_.prepare(spec, *shape, kernels_[i].config);
    });
    for (std::size_t i = 0; i < kernels_.size(); ++i) compiled_->want(i);
  }

  /// Until the kernels of a problem are there; what fails fails again where it is verified.
  void wait_for(std::size_t problem) {
    for (; next_ < kernels_.size() && kernels_[next_].problem <= problem; ++next_) try {
        compiled_->take(next_);
      } catch (const Error&) {
      }
  }

 private:
  struct Kernel {
    std::size_t problem;
    std::optional<TileConfig> config;
  };

  Runtime runtime_;
  std::vector<Kernel> kernels_;  // by problem
  std::size_t next_ = 0;         // of those that were not waited for
  std::optional<autotune::CompileAhead<KernelReport>> compiled_;
};

/// Every feature, in each family that the GPU has, until the time is over; what is found goes into a report.
int verify_everything(const VerifyOptions& options, std::uint64_t seed, bool json) {
  const std::unique_ptr<device::PrimaryContext> gpu = chosen_gpu(options);
  const auto begin = std::chrono::steady_clock::now();
  const auto is_over = [&] {
    return interrupted() || std::chrono::steady_clock::now() - begin > std::chrono::seconds(options.seconds);
  };
  const std::vector<Problem> problems = every_problem();
  std::optional<KernelsAhead> ahead;
  if (gpu && !read_environment().cache_dir.empty()) ahead.emplace(problems, *gpu);
  Progress progress("verify", problems.size());
  std::vector<Verification> verifications;
  Json left_out = Json::array();
  for (std::size_t i = 0; i < problems.size(); ++i) {
    const auto& [spec, shape] = problems[i];
    if (is_over()) {
      left_out.push_back(to_string(spec));
      continue;
    }
    if (ahead) ahead->wait_for(i);
    for (Verification& verification :
         verify_on(options, {"random", random_problem(spec, *shape, seed)}, gpu.get()))
      verifications.push_back(std::move(verification));
    progress.step(to_string(spec));
  }
  const bool ok = std::ranges::all_of(verifications, &Verification::ok);
  const Json report = {
      {"flashjit", library_version()},     {"seed", seed},        {"ok", ok}, {"machine", findings_json()},
      {"kernels", json_of(verifications)}, {"left_out", left_out}};
  if (!options.report.empty()) write_output(path_of(options.report), report.dump(1) + "\n");
  if (json) {
    print_json(report);
    return code_of(ok);
  }
  print_table(verifications);
  print_verdict(options, verifications.size(), seed, ok);
  if (!left_out.empty())
    fmt::print("{} of {} problems were left out after {} seconds; give --seconds more\n", left_out.size(),
               problems.size(), options.seconds);
  if (!options.report.empty()) fmt::print("the report to send is in {}\n", options.report);
  return code_of(ok);
}

void require_one_purpose(const VerifyOptions& options) {
  const auto refuse = [](const char* text) { throw Error(ErrorCode::invalid_argument, text); };
  const bool has_problem = !options.spec.empty() || !options.shape.empty() || !options.data.empty();
  if (options.all && (has_problem || !options.config.empty() || options.all_configs))
    refuse(
        "--all has problems and configurations of its own; leave --spec, --shape, --data, --config and "
        "--all-configs out");
  if (!options.all && !options.report.empty())
    refuse("--report is for --all; --json prints one spec's results");
  if (options.all) return;
  if (options.spec.empty()) refuse("give --spec and --shape or --data, or --all for every feature");
  if (options.shape.empty() == options.data.empty()) refuse("give one of --shape and --data beside --spec");
  if (options.all_configs && !options.config.empty())
    refuse("--config and --all-configs exclude each other; give one");
}

int verify(const VerifyOptions& options, bool json) {
  require_one_purpose(options);
  const std::uint64_t seed = options.seed ? *options.seed : std::random_device()();
  if (options.all) return verify_everything(options, seed, json);
  const std::vector<KernelSpec> specs = parse_passes(options.spec);
  std::ranges::for_each(specs, require_attention);
  if (options.data.empty()) parse_shape(options.shape).validate();
  std::vector<Inputs> all;
  for (const KernelSpec& spec : specs)
    for (Inputs& inputs : inputs_of(options, spec, seed)) all.push_back(std::move(inputs));
  const std::unique_ptr<device::PrimaryContext> gpu = chosen_gpu(options);

  std::vector<Verification> verifications;
  for (const Inputs& inputs : all)
    for (Verification& verification : verify_on(options, inputs, gpu.get()))
      verifications.push_back(std::move(verification));
  const bool ok = std::ranges::all_of(verifications, &Verification::ok);
  if (json) {
    print_json({{"seed", seed}, {"ok", ok}, {"kernels", json_of(verifications)}});
  } else {
    print_table(verifications);
    print_verdict(options, verifications.size(), seed, ok);
  }
  return code_of(ok);
}

}  // namespace

void add_verify(CLI::App& app, Context& context) {
  auto options = std::make_shared<VerifyOptions>();
  CLI::App* command =
      add_subcommand(app, context, "verify", "Check this GPU's kernels against the CPU reference",
                     "flashjit verify --spec bf16:d64:causal --shape b2:hq4:hkv2:sq200:skv333",
                     [options, &context] { return verify(*options, context.json); });
  command->add_option("--spec", options->spec, fmt::format("What is computed; {}", kPassesOfSpec));
  command->add_option("--shape", options->shape,
                      "Batch, heads and lengths of random inputs: b2:hq4:hkv2:sq200:skv333");
  command->add_option("--data", options->data,
                      "Folder with layer<N>_{q,k,v,dout}.npy, [batch, heads, length, dim], instead");
  command->add_flag("--all", options->all,
                    "Instead of one spec every feature, in each family that the GPU has, in two minutes");
  command->add_option("--seconds", options->seconds, "Time for --all; default 120")
      ->check(CLI::Range(1, 86400));
  command->add_option("--report", options->report,
                      "File for what --all finds of machine and kernels, as JSON, to send to the project");
  command->add_option("--scalar", options->scalars,
                      "name=value of a scalar that a program declares; else random, as captured tensors are; "
                      "repeatable");
  command->add_option("--config", options->config, "Verify this tile configuration");
  command->add_flag("--all-configs", options->all_configs, "Verify every configuration of the search space");
  command
      ->add_option("--seed", options->seed, "Seed of the random inputs; default a new one, which is printed")
      ->check(whole_number());
  command->add_flag("--cpu", options->cpu,
                    "Compute in the spec's type on the CPU instead: the errors that set the limits");
  command->add_option("--device", options->device, "CUDA device, counted from 0 (default)");
}

}  // namespace flashjit::command
