#include "build.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>

#include "cache/folders.hpp"
#include "plan/shipped.hpp"
#include "support/environment.hpp"
#include "support/paths.hpp"
#include "support/text.hpp"

namespace flashjit::command {

render::TemplateSet chosen_templates() {
  const std::string folder = read_environment().template_dir;
  return folder.empty() ? render::TemplateSet::embedded() : render::TemplateSet::from_folder(path_of(folder));
}

std::shared_ptr<const compile::Compiler> chosen_compiler() {
  return compile::Compiler::open(read_environment().nvrtc);
}

std::vector<std::filesystem::path> kernel_folders() {
  const Environment environment = read_environment();
  std::vector<std::filesystem::path> folders;
  for (const std::string& pack : environment.packs) folders.push_back(path_of(pack));
  if (!environment.cache_dir.empty()) folders.push_back(path_of(environment.cache_dir));
  return folders;
}

StoredKernel find_stored(const std::vector<std::filesystem::path>& folders, const std::string& key) {
  std::map<std::string, StoredKernel> found;
  for (const std::filesystem::path& folder : folders)
    for (const cache::EntryInfo& info : cache::Store(folder, cache::Store::Access::read_only).list())
      if (info.key.starts_with(key))
        found.try_emplace(info.key,
                          StoredKernel{info, folder / cache::kVersionFolder / info.arch / info.key});
  if (found.size() == 1) return found.begin()->second;
  std::vector<std::string> names;
  for (const std::filesystem::path& folder : folders) names.push_back(flashjit::quoted(folder.string()));
  throw Error(
      ErrorCode::invalid_argument,
      fmt::format("{} begins with {} in {}; `flashjit cache list` shows the keys",
                  found.empty() ? "no key" : fmt::format("more than one key ({})", found.size()),
                  flashjit::quoted(key),
                  names.empty() ? "any folder (none is set)" : fmt::format("{}", fmt::join(names, ", "))));
}

plan::TuningRecords chosen_records() {
  plan::TuningRecords records;
  std::vector<std::string> warnings;
  for (const std::filesystem::path& folder : kernel_folders())
    records.load(cache::Store(folder, cache::Store::Access::read_only).records_folder(), &warnings);
  for (const std::string& warning : warnings) warn(warning);
  for (const plan::TuningRecord& record : plan::shipped_records())
    records.add(record, plan::TuningRecords::Origin::shipped);
  return records;
}

AttentionShape default_shape() { return {1, 16, 16, 4096, 4096}; }

BuiltKernel build_kernel(const plan::ExecutionPlan& plan, const DeviceInfo& device,
                         const render::TemplateSet& templates, const compile::Compiler& compiler,
                         cache::Store* store) {
  BuiltKernel built;
  const double start = seconds_now();
  built.source = render::render(plan.spec, plan.config, device, templates);
  const std::string digest = cache::source_digest(built.source, compile::compile_options(built.source.arch));
  const double rendered = seconds_now();

  built.report = {plan.spec,
                  plan.config,
                  plan.config_source,
                  cache::entry_key(digest, compiler.tag()),
                  KernelOrigin::disk,
                  (rendered - start) * 1e3,
                  0,
                  0,
                  {}};
  const auto stored = [&]() -> std::optional<CompiledKernel> {
    return store ? store->load(built.source, digest, compiler.tag()) : std::nullopt;
  };
  const double looked = seconds_now();
  std::optional<CompiledKernel> kept = stored();
  built.report.load_ms = kept ? (seconds_now() - looked) * 1e3 : 0;
  cache::Store::Lock lock;
  if (!kept && store) {
    lock = store->lock(built.source.arch, built.report.key);  // another thread or process may be at it
    kept = stored();
  }
  if (kept) {
    built.kernel = std::move(*kept);
  } else {
    const double begin = seconds_now();
    built.kernel = compiler.compile(built.source);
    built.report.origin = KernelOrigin::compiled;
    built.report.compile_ms = (seconds_now() - begin) * 1e3;
    if (store && !store->store(built.source, digest, built.kernel))
      throw Error(ErrorCode::io, fmt::format("cannot write '{}'; give a folder that can be written",
                                             store->folder().string()));
  }
  built.report.entries = entry_reports(built.source.entries, built.kernel.resources);
  return built;
}

std::vector<EntryReport> entry_reports(const std::vector<plan::Entry>& entries,
                                       const std::vector<EntryResources>& used) {
  std::vector<EntryReport> reports;
  for (const plan::Entry& entry : entries) {
    EntryReport report{entry.name, 0, 0, entry.shared_bytes, entry.threads};
    for (const EntryResources& resources : used) {
      if (resources.entry != entry.name) continue;
      report.registers = resources.registers;
      report.spill_bytes = resources.spill_stores + resources.spill_loads;
      report.shared_bytes += resources.static_shared;
    }
    reports.push_back(report);
  }
  return reports;
}

namespace {

int threads_per_multiprocessor(int compute_capability) {
  switch (compute_capability) {
    case 75:
      return 1024;
    case 86:
    case 87:
    case 89:
    case 120:
    case 121:
      return 1536;
    default:
      return 2048;
  }
}

int blocks_limit(int compute_capability) {
  switch (compute_capability) {
    case 75:
    case 86:
    case 87:
      return 16;
    case 89:
    case 120:
    case 121:
      return 24;
    default:
      return 32;
  }
}

int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace

int blocks_per_multiprocessor(const EntryReport& entry, const DeviceInfo& device) {
  constexpr int kWarp = 32;
  constexpr int kRegisterUnit = 256;     // registers of a warp are given out in these
  constexpr int kReservedShared = 1024;  // a block, from sm_80 on
  if (entry.threads <= 0) return 0;
  const int warps = round_up(entry.threads, kWarp) / kWarp;
  const int shared = entry.shared_bytes + (device.compute_capability >= 80 ? kReservedShared : 0);
  int blocks = std::min(blocks_limit(device.compute_capability),
                        threads_per_multiprocessor(device.compute_capability) / (warps * kWarp));
  if (entry.registers > 0)
    blocks = std::min(blocks,
                      device.registers_per_sm / (warps * round_up(entry.registers * kWarp, kRegisterUnit)));
  if (shared > 0) blocks = std::min(blocks, device.shared_per_sm / shared);
  return blocks;
}

Json to_json(const EntryReport& entry) {
  return {{"entry", entry.entry},
          {"registers", entry.registers},
          {"spill_bytes", entry.spill_bytes},
          {"shared_bytes", entry.shared_bytes},
          {"threads", entry.threads}};
}

Json to_json(const KernelReport& report) {
  Json entries = Json::array();
  for (const EntryReport& entry : report.entries) entries.push_back(to_json(entry));
  return {{"spec", to_string(report.spec)},
          {"config", to_string(report.config)},
          {"config_source", to_string(report.config_source)},
          {"key", report.key},
          {"origin", to_string(report.origin)},
          {"render_ms", report.render_ms},
          {"compile_ms", report.compile_ms},
          {"load_ms", report.load_ms},
          {"entries", std::move(entries)}};
}

}  // namespace flashjit::command
