// flashjit verify: kernels of this GPU against the CPU reference, on fresh random inputs.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <random>

#include "attention.hpp"
#include "gpu.hpp"
#include "plan/family.hpp"
#include "plan/plan.hpp"

namespace flashjit::command {
namespace {

struct VerifyOptions {
  std::string spec, shape, config;
  std::vector<std::string> scalars;
  bool all_configs = false;
  std::optional<std::uint64_t> seed;
  int device = 0;
};

/// One kernel's results against the reference.
struct Verification {
  std::string spec, config;
  std::vector<Comparison> comparisons;
  std::string failure;  ///< why it could not run; empty when it did

  bool ok() const { return failure.empty() && all_ok(comparisons); }
};

/// The configurations to verify a pass with; nothing means the one that the runtime chooses.
std::vector<std::optional<TileConfig>> configs_of(const VerifyOptions& options, const AttentionSpec& spec,
                                                  const DeviceInfo& device) {
  if (!options.config.empty()) return {parse_config(options.config)};
  if (!options.all_configs) return {std::nullopt};
  std::vector<std::optional<TileConfig>> configs;
  for (const plan::FamilyTraits& family : plan::families())
    if (family.supports(spec, device))
      for (const TileConfig& config : family.search_space(spec, device)) configs.emplace_back(config);
  return configs;
}

/// The outputs of the spec's own pass: a backward run computes out and lse on the way.
std::vector<Comparison> of_pass(std::vector<Comparison> comparisons, Pass pass) {
  if (pass == Pass::backward) comparisons.erase(comparisons.begin(), comparisons.begin() + 2);
  return comparisons;
}

std::vector<Verification> verify_pass(const VerifyOptions& options, const AttentionSpec& spec,
                                      const AttentionShape& shape, std::uint64_t seed,
                                      const device::PrimaryContext& gpu) {
  reference::Problem problem = random_problem(spec, shape, seed);
  set_scalars(problem, options.scalars);
  const Results exact = reference_results(problem);
  const Results rounded = reference_results(problem, reference::Precision::rounded);
  Runtime runtime(runtime_options());
  std::vector<Verification> verifications;
  for (const std::optional<TileConfig>& config : configs_of(options, spec, runtime.device())) {
    if (interrupted()) break;
    Verification verification{to_string(spec), config ? to_string(*config) : "", {}, {}};
    try {
      verification.config = to_string(runtime.prepare(spec, shape, config).config);
      verification.comparisons =
          of_pass(compare(run_on_gpu(runtime, gpu, problem), exact, rounded, problem), spec.pass);
    } catch (const Error& error) {
      // With one configuration the error says it all; among many the others still count.
      if (!options.all_configs || error.code() == ErrorCode::cuda) throw;
      verification.failure = error.message();
    }
    verifications.push_back(std::move(verification));
  }
  return verifications;
}

Json verification_json(const Verification& verification) {
  Json outputs = Json::array();
  for (const Comparison& comparison : verification.comparisons) outputs.push_back(to_json(comparison));
  return {{"spec", verification.spec},
          {"config", verification.config},
          {"ok", verification.ok()},
          {"outputs", std::move(outputs)},
          {"failure", verification.failure}};
}

void print_table(const std::vector<Verification>& verifications) {
  Table table({"spec", "config", "output", "error", "limit", "ok"});
  for (const Verification& verification : verifications) {
    for (const Comparison& comparison : verification.comparisons)
      table.add({verification.spec, verification.config, comparison.output,
                 fmt::format("{:.3g}", comparison.error), fmt::format("{:.3g}", comparison.limit),
                 comparison.ok() ? "yes" : "NO"});
    if (!verification.failure.empty())
      table.add({verification.spec, verification.config, "-", "-", "-", "NO: " + verification.failure});
  }
  table.print();
}

int verify(const VerifyOptions& options, bool json) {
  if (options.all_configs && !options.config.empty())
    throw Error(ErrorCode::invalid_argument, "--config and --all-configs exclude each other; give one");
  const std::vector<AttentionSpec> specs = parse_passes(options.spec);
  std::ranges::for_each(specs, require_attention);
  const AttentionShape shape = parse_shape(options.shape);
  shape.validate();
  const std::uint64_t seed = options.seed ? *options.seed : std::random_device()();
  const device::PrimaryContext gpu(chosen_driver(), options.device);

  std::vector<Verification> verifications;
  for (const AttentionSpec& spec : specs)
    for (Verification& verification : verify_pass(options, spec, shape, seed, gpu))
      verifications.push_back(std::move(verification));
  bool ok = true;
  Json list = Json::array();
  for (const Verification& verification : verifications) {
    ok = ok && verification.ok();
    list.push_back(verification_json(verification));
  }
  if (json) {
    print_json({{"shape", to_string(shape)}, {"seed", seed}, {"ok", ok}, {"kernels", std::move(list)}});
  } else {
    print_table(verifications);
    fmt::print("{} kernels on {}, seed {}: {}\n", verifications.size(), to_string(shape), seed,
               ok ? "all within their limits" : "NOT all within their limits");
  }
  if (interrupted()) return kInterrupted;
  return ok ? kOk : kCheckFailed;
}

}  // namespace

void add_verify(CLI::App& app, Context& context) {
  auto options = std::make_shared<VerifyOptions>();
  CLI::App* command =
      add_subcommand(app, context, "verify", "Check this GPU's kernels against the CPU reference",
                     "flashjit verify --spec bf16:d64:causal --shape b2:hq4:hkv2:sq200:skv333",
                     [options, &context] { return verify(*options, context.json); });
  command
      ->add_option("--spec", options->spec,
                   "What is computed; both passes unless it begins with fwd: or bwd:")
      ->required();
  command->add_option("--shape", options->shape, "Batch, heads and lengths: b2:hq4:hkv2:sq200:skv333")
      ->required();
  command->add_option("--scalar", options->scalars,
                      "name=value of a scalar that a program declares; else random, as captured tensors are; "
                      "repeatable");
  command->add_option("--config", options->config, "Verify this tile configuration");
  command->add_flag("--all-configs", options->all_configs, "Verify every configuration of the search space");
  command
      ->add_option("--seed", options->seed, "Seed of the random inputs; default a new one, which is printed")
      ->check(whole_number());
  command->add_option("--device", options->device, "CUDA device, counted from 0 (default)");
}

}  // namespace flashjit::command
