// flashjit inspect: what a spec, or a kernel in the cache, becomes: source, PTX, SASS, resources, and why
// which family.
#include <fmt/format.h>

#include <memory>

#include "build.hpp"
#include "cache/folders.hpp"
#include "cache/meta.hpp"
#include "disassembler.hpp"
#include "gpu.hpp"
#include "support/file.hpp"
#include "support/json.hpp"
#include "support/paths.hpp"
#include "tools/parts/explain.hpp"

namespace flashjit::command {
namespace {

struct InspectOptions {
  std::string spec, shape, config, arch, key, dir, html;
  bool source = false, ptx = false, sass = false;
};

/// One kernel and what is known of it; what needs NVRTC is made when it is asked for.
struct Subject {
  KernelSpec spec;
  TileConfig config;
  DeviceInfo device;
  std::string config_source;         ///< a ConfigSource, or "stored"
  std::string key;                   ///< of a stored kernel
  KernelSource source;               ///< of a stored kernel without headers: its text alone was kept
  std::string cubin;                 ///< empty until compiled
  std::vector<EntryReport> entries;  ///< registers and spills are 0 until compiled
  std::optional<plan::ExecutionPlan> plan = {};  ///< of a spec
};

/// The GPU of this machine, else sm_80: what most kernels are first looked at for.
DeviceInfo default_device() {
  try {
    const device::PrimaryContext gpu(chosen_driver());
    return device::query_device(*gpu.driver(), gpu.device());
  } catch (const Error&) {
    return DeviceInfo::parse("sm_80");
  }
}

Subject subject_of_spec(const KernelSpec& spec, const InspectOptions& options, const DeviceInfo& device) {
  const AttentionShape shape = options.shape.empty() ? default_shape() : parse_shape(options.shape);
  std::optional<TileConfig> config;
  if (!options.config.empty()) config = parse_config(options.config);
  const plan::ExecutionPlan plan = plan::make_plan(spec, shape, device, chosen_records(), config);
  Subject subject{plan.spec, plan.config, device, to_string(plan.config_source), {}, {}, {}, {}, plan};
  subject.source = render::render(plan.spec, plan.config, device, chosen_templates());
  subject.entries = entry_reports(subject.source.entries, {});
  return subject;
}

void compile(Subject& subject) {
  if (!subject.cubin.empty()) return;
  CompiledKernel kernel = chosen_compiler()->compile(subject.source);
  subject.cubin = std::move(kernel.cubin);
  subject.entries = entry_reports(subject.source.entries, kernel.resources);
}

Subject subject_of_key(const InspectOptions& options) {
  const std::vector<std::filesystem::path> folders =
      options.dir.empty() ? kernel_folders() : std::vector<std::filesystem::path>{path_of(options.dir)};
  const StoredKernel stored = find_stored(folders, options.key);
  if (!stored.info.damage.empty())
    throw Error(ErrorCode::io,
                fmt::format("the kernel in '{}' is damaged: {}; `flashjit cache verify --repair` "
                            "removes it",
                            stored.folder.string(), stored.info.damage));
  const cache::Meta meta = cache::parse_meta(read_file(stored.folder / cache::kMetaFile, kMaxJsonBytes));
  Subject subject{parse_spec(meta.spec),
                  parse_config(meta.config),
                  DeviceInfo::parse(meta.arch),
                  "stored",
                  stored.info.key,
                  {},
                  {},
                  {},
                  {}};
  subject.source.text = read_file(stored.folder / cache::kSourceFile, kStoredFileLimit);
  subject.cubin = read_file(stored.folder / cache::kCubinFile, kStoredFileLimit);
  subject.entries = entry_reports(meta.entries, meta.resources);
  return subject;
}

/// A stored kernel has no headers of its own: its PTX is that of what this flashjit renders for it, if that
/// is the same.
std::string ptx_of(const Subject& subject) {
  if (subject.key.empty()) return chosen_compiler()->ptx(subject.source);
  const KernelSource source =
      render::render(subject.spec, subject.config, subject.device, chosen_templates());
  const std::string digest = cache::source_digest(source, compile::compile_options(source.arch));
  if (!subject.key.starts_with(digest))
    throw Error(
        ErrorCode::invalid_argument,
        fmt::format(
            "the kernel {} was made from other templates than this flashjit's, so its PTX cannot be made "
            "again; --source and --sass show what was stored",
            subject.key));
  return chosen_compiler()->ptx(source);
}

/// A family's answer to the spec: "sm80: yes", or why not.
Json families_json(const KernelSpec& spec, const DeviceInfo& device) {
  Json families = Json::array();
  for (const plan::FamilyTraits& family : plan::families()) {
    const Support support = family.supports(spec, device);
    families.push_back(
        {{"family", to_string(family.family)}, {"supported", support.ok}, {"reason", support.reason}});
  }
  return families;
}

Json subject_json(const Subject& subject) {
  Json entries = Json::array();
  for (const EntryReport& entry : subject.entries) {
    Json line = to_json(entry);
    line["blocks_per_multiprocessor"] = blocks_per_multiprocessor(entry, subject.device);
    entries.push_back(std::move(line));
  }
  return {{"spec", to_string(subject.spec)},
          {"config", to_string(subject.config)},
          {"config_source", subject.config_source},
          {"arch", subject.device.arch},
          {"key", subject.key},
          {"families", families_json(subject.spec, subject.device)},
          {"entries", std::move(entries)}};
}

void print_subject(const Subject& subject) {
  fmt::print("{} on {}: {} ({})\n", to_string(subject.spec), subject.device.arch, to_string(subject.config),
             subject.config_source);
  for (const Json& family : families_json(subject.spec, subject.device))
    fmt::print("  family {}: {}\n", family["family"].get<std::string>(),
               family["supported"].get<bool>() ? "can do it" : family["reason"].get<std::string>());
  const bool compiled = !subject.cubin.empty();
  const auto known = [&](int value) { return compiled ? std::to_string(value) : std::string("-"); };
  Table table({"entry", "threads", "registers", "spill bytes", "shared bytes", "blocks per SM"});
  for (const EntryReport& entry : subject.entries)
    table.add({entry.entry, std::to_string(entry.threads), known(entry.registers), known(entry.spill_bytes),
               std::to_string(entry.shared_bytes), known(blocks_per_multiprocessor(entry, subject.device))});
  table.print();
}

/// The one text asked for; empty: the table.
std::string text_of(Subject& subject, const InspectOptions& options) {
  if (options.source) return subject.source.text;
  if (options.ptx) return ptx_of(subject);
  if (!options.sass) return {};
  compile(subject);
  return disassemble(subject.cubin);
}

/// Without NVRTC the table lacks the registers and says so; everything else is there.
void compile_if_possible(Subject& subject) {
  try {
    compile(subject);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::no_compiler) throw;
    warn(error.message());
  }
}

std::vector<Subject> subjects_of(const InspectOptions& options) {
  if (!options.key.empty()) return {subject_of_key(options)};
  const DeviceInfo device = options.arch.empty() ? default_device() : DeviceInfo::parse(options.arch);
  std::vector<Subject> subjects;
  for (const KernelSpec& spec : parse_passes(options.spec))
    subjects.push_back(subject_of_spec(spec, options, device));
  return subjects;
}

/// Without NVRTC the page has no registers, and says so.
Explained explained(Subject& subject) {
  Explained kernel{*subject.plan, subject.device, subject.source.text, {}, {}, false, {}};
  try {
    compile(subject);
    kernel.compiled = true;
    kernel.compiler = chosen_compiler()->tag();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::no_compiler) throw;
    kernel.compiler = error.message();
  }
  kernel.entries = subject.entries;
  for (const EntryReport& entry : subject.entries)
    kernel.resident.push_back(blocks_per_multiprocessor(entry, subject.device));
  return kernel;
}

int write_page(const InspectOptions& options, bool json) {
  if (options.spec.empty())
    throw Error(ErrorCode::invalid_argument,
                "--html explains a plan; give --spec bf16:d128 instead of --key");
  std::vector<Explained> kernels;
  for (Subject& subject : subjects_of(options)) kernels.push_back(explained(subject));
  write_output(options.html, explain_html(kernels));
  if (json)
    print_json({{"html", options.html}, {"kernels", kernels.size()}});
  else
    fmt::print("{} explains {} kernels\n", options.html, kernels.size());
  return kOk;
}

int inspect(const InspectOptions& options, bool json) {
  if (options.spec.empty() == options.key.empty())
    throw Error(ErrorCode::invalid_argument,
                "inspect looks at one thing; give --spec bf16:d128 or --key KEY");
  if (!options.html.empty()) return write_page(options, json);
  const char* kind = options.source ? "source" : options.ptx ? "ptx" : options.sass ? "sass" : nullptr;
  Json kernels = Json::array();
  for (Subject& subject : subjects_of(options)) {
    const std::string text = text_of(subject, options);
    if (!kind) compile_if_possible(subject);
    Json line = subject_json(subject);
    if (kind) line[kind] = text;
    kernels.push_back(std::move(line));
    if (json) continue;
    if (kind)
      fmt::print("{}{}", text, text.ends_with('\n') ? "" : "\n");
    else
      print_subject(subject);
  }
  if (json) print_json({{"kernels", std::move(kernels)}});
  return kOk;
}

}  // namespace

void add_inspect(CLI::App& app, Context& context) {
  auto options = std::make_shared<InspectOptions>();
  CLI::App* command = add_subcommand(
      app, context, "inspect", "Show the source, PTX, SASS or resources of a kernel, and why it was chosen",
      "flashjit inspect --spec fwd:bf16:d128:causal --arch sm_90a --ptx",
      [options, &context] { return inspect(*options, context.json); });
  command->add_option("--spec", options->spec, fmt::format("What is computed; {}", kPassesOfSpec));
  command->add_option("--shape", options->shape,
                      "Shape to choose the configuration for; default " + to_string(default_shape()));
  command->add_option("--config", options->config, "Tile configuration instead of the chosen one");
  command->add_option("--arch", options->arch, "Architecture; default this machine's GPU, else sm_80");
  command->add_option("--key", options->key, "A kernel in packs and cache, by its key or how that begins");
  command->add_option("--dir", options->dir, "Where --key looks, instead of the packs and the cache");
  CLI::Option* source = command->add_flag("--source", options->source, "Print the rendered CUDA source");
  CLI::Option* ptx = command->add_flag("--ptx", options->ptx, "Print the PTX")->excludes(source);
  CLI::Option* sass =
      command->add_flag("--sass", options->sass, "Print the machine code; needs cuobjdump or nvdisasm")
          ->excludes(source)
          ->excludes(ptx);
  command
      ->add_option("--html", options->html,
                   "Write a page here: the tiles that are computed, masked and skipped, the plan and why, "
                   "resources, expected time and source")
      ->excludes(source)
      ->excludes(ptx)
      ->excludes(sass);
}

}  // namespace flashjit::command
