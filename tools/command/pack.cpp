// flashjit pack: specs x architectures -> a folder of cubins and the records that choose them. Needs no GPU.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <memory>

#include "cache/folders.hpp"
#include "model.hpp"
#include "packing.hpp"
#include "support/paths.hpp"
#include "support/text.hpp"
#include "tools/parts/manifest.hpp"

namespace flashjit::command {
namespace {

struct PackOptions {
  std::vector<std::string> specs, models, architectures, shapes;
  std::string suite, out, config;
  int jobs = 0;
};

std::vector<Problem> wanted_problems(const PackOptions& options) {
  std::vector<AttentionShape> shapes;
  for (const std::string& text : options.shapes) {
    shapes.push_back(parse_shape(text));
    shapes.back().validate();
  }
  std::vector<Problem> named;
  for (const std::string& text : options.specs)
    for (const KernelSpec& spec : parse_passes(text)) named.push_back({spec, {}});
  if (!options.suite.empty())
    for (const Problem& problem : read_suite(path_of(options.suite))) named.push_back(problem);
  if (named.empty() && options.models.empty())
    throw Error(
        ErrorCode::invalid_argument,
        "nothing to pack: give --spec bf16:d128:causal, --suite FILE or --model '32/8 heads, d128, pages "
        "of 16, bf16'");
  if (shapes.empty()) shapes.push_back(default_shape());

  std::vector<Problem> problems;
  for (const Problem& problem : named) {
    if (problem.shape)
      problems.push_back(problem);
    else
      for (const AttentionShape& shape : shapes) problems.push_back({problem.spec, shape});
  }
  return problems;
}

/// Plans everything before anything is compiled, so that a wrong spec costs no waiting.
std::vector<PackItem> plan_items(const PackOptions& options) {
  const std::vector<Problem> problems = wanted_problems(options);
  const plan::TuningRecords records = chosen_records();
  std::optional<TileConfig> config;
  if (!options.config.empty()) config = parse_config(options.config);
  std::vector<PackItem> items;
  for (const std::string& arch : options.architectures) {
    const DeviceInfo device = DeviceInfo::parse(arch);
    if (device.arch == "sm_90")
      warn("on compute capability 9.0 the runtime looks for sm_90a; pack that instead of sm_90");
    for (const Problem& problem : problems)
      std::ranges::move(
          items_of(device, plan::make_plan(problem.spec, *problem.shape, device, records, config)),
          std::back_inserter(items));
    for (const std::string& model : options.models)
      std::ranges::move(model_items(model, device, records), std::back_inserter(items));
  }
  return items;
}

void print_table(const std::vector<PackItem>& items, const std::vector<PackOutcome>& outcomes) {
  Table table({"arch", "spec", "shape", "config", "chosen", "state", "compile ms"});
  for (std::size_t i = 0; i < items.size(); ++i) {
    const PackOutcome& outcome = outcomes[i];
    const std::string note = outcome.spills_in_main_loop ? ", spills in its main loop" : "";
    table.add({items[i].device.arch, to_string(items[i].plan.spec), to_string(items[i].plan.shape),
               to_string(items[i].plan.config), to_string(items[i].plan.config_source),
               to_string(outcome.state) + note,
               outcome.state == PackOutcome::State::compiled ? format_ms(outcome.report.compile_ms) : "-"});
  }
  table.print();
}

void check_architectures(const std::vector<PackItem>& items, const compile::Compiler& compiler) {
  const std::vector<std::string> known = compiler.architectures();
  for (const PackItem& item : items)
    if (std::find(known.begin(), known.end(), item.device.arch) == known.end())
      throw Error(ErrorCode::unsupported,
                  fmt::format("{} ({}) cannot compile for {}; it can for {}", compiler.tag(), compiler.path(),
                              item.device.arch, fmt::join(known, ", ")));
}

/// What the pack holds already is kept, and its manifest speaks for it: so it must be sound, as `cache
/// verify` sees it.
void remove_damaged(cache::Store& store) {
  for (const cache::EntryInfo& removed : store.repair())
    warn(printable(fmt::format("removed {}: {}", removed.key, removed.damage)));
}

int pack(const PackOptions& options, bool json) {
  const std::vector<PackItem> items = plan_items(options);
  const render::TemplateSet templates = chosen_templates();
  const std::shared_ptr<const compile::Compiler> compiler = chosen_compiler();
  check_architectures(items, *compiler);
  cache::Store store(path_of(options.out), cache::Store::Access::read_write, warn);
  remove_damaged(store);
  const std::vector<PackOutcome> outcomes = pack_all(items, store, templates, *compiler, options.jobs);

  const std::string manifest = write_manifest(path_of(options.out));

  const std::size_t failed = count(outcomes, PackOutcome::State::failed);
  const std::size_t skipped = count(outcomes, PackOutcome::State::skipped);
  if (json) {
    Json kernels = Json::array();
    for (std::size_t i = 0; i < items.size(); ++i) kernels.push_back(to_json(items[i], outcomes[i]));
    print_json({{"folder", options.out},
                {"compiler", compiler->tag()},
                {"manifest_sha256", manifest},
                {"failed", failed},
                {"skipped", skipped},
                {"kernels", std::move(kernels)}});
  } else {
    print_table(items, outcomes);
    fmt::print("{} of {} kernels are in {}; use them with FLASHJIT_PACKS={}\n",
               items.size() - failed - skipped, items.size(), options.out, options.out);
    fmt::print("sha256 of its manifest {}: {}\n", cache::kManifestFile, manifest);
  }
  warn_of_failures(items, outcomes);
  if (skipped > 0) {
    warn("interrupted; the same command goes on where it stopped");
    return kInterrupted;
  }
  return failed > 0 ? kFailed : kOk;
}

}  // namespace

void add_pack(CLI::App& app, Context& context) {
  auto options = std::make_shared<PackOptions>();
  CLI::App* command =
      add_subcommand(app, context, "pack", "Compile kernels for shipping; needs NVRTC, but no GPU",
                     "flashjit pack --spec bf16:d128:causal --arch sm_80,sm_90a --out my-pack",
                     [options, &context] { return pack(*options, context.json); });
  command->add_option("--spec", options->specs, fmt::format("A spec, repeatable; {}", kPassesOfSpec))
      ->allow_extra_args(false);
  command
      ->add_option(
          "--model", options->models,
          "What a model's attention is, repeatable: '32/8 heads, d128, pages of 16, bf16' packs decode, "
          "prefill, append and merge for all lengths; 'training' instead of the cache, both passes")
      ->allow_extra_args(false);
  command->add_option("--suite", options->suite, "A file with \"spec [shape]\" a line; # begins a comment");
  command
      ->add_option("--arch", options->architectures, "Architectures: sm_75, sm_80, sm_86, sm_89, sm_90a, ...")
      ->required()
      ->delimiter(',')
      ->allow_extra_args(false);
  command->add_option("--out", options->out, "The pack's folder; what it holds already is not compiled again")
      ->required();
  command
      ->add_option("--shape", options->shapes,
                   "A shape to choose configurations for, repeatable; default " + to_string(default_shape()))
      ->allow_extra_args(false);
  command->add_option("--config", options->config,
                      "Take this configuration instead of tuning records and heuristic");
  command->add_option("--jobs", options->jobs, "Kernels compiled at once; default one a processor")
      ->check(CLI::Range(1, 1024));
}

}  // namespace flashjit::command
