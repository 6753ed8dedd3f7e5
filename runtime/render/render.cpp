#include "render/render.hpp"

#include <algorithm>
#include <string_view>

#include <fmt/format.h>

#include "expr/emit.hpp"
#include "plan/decoded_cache.hpp"
#include "plan/family.hpp"
#include "plan/params_layout.hpp"
#include "render/kv_format_text.hpp"
#include "support/dtypes.hpp"

namespace flashjit::render {
namespace {

std::string includes(const std::vector<plan::Entry>& entries) {
  std::vector<std::string> names;
  for (const plan::Entry& entry : entries) {
    if (std::find(names.begin(), names.end(), entry.header) == names.end()) names.push_back(entry.header);
  }
  std::string text;
  for (const std::string& name : names) text += fmt::format("#include \"{}\"\n", name);
  return text;
}

/// What templates/common/params.cuh asks of a rendered source.
std::string params_text(const plan::KernelPlan& kernel) {
  std::string text;
  for (const auto& [name, value] : plan::params_layout(kernel).macros)
    text += fmt::format("#define {}{}{}\n", name, value.empty() ? "" : " ", value);
  return text;
}

/// The text of one of `entries`.
std::string entry_text(const plan::Entry& entry, const std::vector<plan::Entry>& entries) {
  const std::string maps = entry.tensor_maps
                               ? fmt::format(", const __grid_constant__ flashjit::{} maps",
                                             entry.params == "JvpParams" ? "JvpTensorMaps" : "TensorMaps")
                               : std::string();
  const std::string cluster =
      entry.cluster > 1 ? fmt::format(" __cluster_dims__({}, 1, 1)", entry.cluster) : "";
  const std::string text = fmt::format(
      "extern \"C\" __global__ void{} __launch_bounds__({}, {})\n"
      "flashjit_{}(const __grid_constant__ flashjit::{} p{}) {{\n"
      "  {}<flashjit::{}>(p{});\n"
      "}}\n",
      cluster, entry.threads, entry.min_blocks, entry.name, entry.params, maps, entry.function, entry.problem,
      entry.tensor_maps ? ", maps" : "");
  if (program_count(entries) == 1) return "\n" + text;
  const int other = program_of(entry, entries) == 1 ? 2 : 1;
  return fmt::format("\n#if {} != {}\n{}#endif\n", kProgramMacro, other, text);
}

/// What an entry that decodes the cache is a template over: K and V as the call has them.
std::string stored_problem(const plan::KernelPlan& kernel) {
  if (!kernel.config.decode_cache) return {};
  return fmt::format("\nstruct StoredProblem : Problem {{\n{}{}}};\n",
                     to_string(expr::Constant{"kPageRows", kernel.spec.kv.page_size}),
                     kernel.spec.kv.quantized() && !kernel.spec.prologue.q_codes
                         ? stored_formats_text(kernel.spec)
                         : std::string());
}

// The templates that a text includes, by their names; other includes are NVRTC's to refuse.
std::vector<std::string> included_templates(std::string_view text) {
  constexpr std::string_view kPrefix = "#include \"flashjit/";
  constexpr std::size_t kQuote = std::string_view("#include \"").size();
  std::vector<std::string> names;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    std::string_view line = text.substr(begin, end - begin);
    line.remove_prefix(std::min(line.find_first_not_of(" \t"), line.size()));
    const std::size_t close = line.starts_with(kPrefix) ? line.find('"', kPrefix.size()) : line.npos;
    if (close != line.npos) names.emplace_back(line.substr(kQuote, close - kQuote));
    begin = end + 1;
  }
  return names;
}

void add_headers(std::string_view text, const TemplateSet& templates,
                 std::map<std::string, std::string>& found) {
  for (const std::string& name : included_templates(text)) {
    const std::string& header = templates.get(name);
    if (found.emplace(name, header).second) add_headers(header, templates, found);
  }
}

}  // namespace

KernelSource render(const plan::KernelPlan& kernel, const DeviceInfo& device, const TemplateSet& templates) {
  const plan::AnalysedSpec& spec = kernel.spec;
  KernelSource source;
  source.spec = spec;
  source.config = kernel.config;
  source.arch = device.arch;
  source.entries = kernel.entries;
  std::string constants = to_string(expr::Constant{"kArch", device.compute_capability});
  for (const expr::Constant& constant : kernel.constants) constants += to_string(constant);
  const KernelSpec of_main = plan::spec_of_main(kernel);
  const std::string functions = plan::traits(kernel.config.family).functions(spec, kernel.config);
  source.text = fmt::format(
      "// {} {}\n{}{}\nnamespace flashjit {{\n\nstruct Problem {{\n  using Element = {};\n"
      "  using KvElement = {};\n{}\n{}{}{}}};\n{}\n"
      "}}  // namespace flashjit\n",
      to_string(source.spec), to_string(source.config), params_text(kernel), includes(source.entries),
      dtype_info(spec.dtype).cuda_name, dtype_info(of_main.kv_type()).cuda_name,
      (plan::leaves_scales(kernel) ? "  using ScaledElements = void;\n" : "") + constants +
          kv_formats_text(of_main),
      expr::emit_functions(
          expr::trees_of(spec.score, spec.mask, spec.epilogue.out_mod, spec.prologue),
          {.check_indices = spec.checks.check_indices, .gradient_tangents = spec.pass == Pass::backward_jvp}),
      functions.empty() ? "" : "\n", functions, stored_problem(kernel));
  for (const plan::Entry& entry : source.entries) source.text += entry_text(entry, source.entries);

  std::map<std::string, std::string> headers;
  add_headers(source.text, templates, headers);
  for (auto& [name, text] : headers) source.headers.push_back({name, std::move(text)});
  return source;
}

KernelSource render(const KernelSpec& spec, const TileConfig& config, const DeviceInfo& device,
                    const TemplateSet& templates, const plan::Checks& checks) {
  return render(plan::traits(config.family).kernel({spec, checks}, config), device, templates);
}

}  // namespace flashjit::render

namespace flashjit {

int program_count(const std::vector<plan::Entry>& entries) {
  const auto with_main_loop = std::ranges::count_if(entries, &plan::Entry::hot);
  return with_main_loop == 0 || with_main_loop == std::ssize(entries) ? 1 : 2;
}

int program_of(const plan::Entry& entry, const std::vector<plan::Entry>& entries) {
  return program_count(entries) == 1 || entry.hot ? 1 : 2;
}

bool spills_in_main_loop(const CompiledKernel& kernel, const std::vector<plan::Entry>& entries) {
  return std::any_of(kernel.resources.begin(), kernel.resources.end(), [&](const EntryResources& used) {
    const bool spills = used.spill_stores > 0 || used.spill_loads > 0;
    return spills && std::any_of(entries.begin(), entries.end(), [&](const plan::Entry& entry) {
             return entry.hot && entry.name == used.entry;
           });
  });
}

}  // namespace flashjit
