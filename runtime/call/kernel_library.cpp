#include "call/kernel_library.hpp"

#include <fmt/format.h>

#include <chrono>

#include "cache/folders.hpp"
#include "plan/shipped.hpp"
#include "support/paths.hpp"
#include "support/text.hpp"

namespace flashjit {
namespace {

/// Registers are given out in units of 8 a thread.
constexpr int kRegisterUnit = 8;

class Stopwatch {
 public:
  double ms() const {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

std::string memory_key(const plan::KernelPlan& kernel, const DeviceInfo& info) {
  return fmt::format("{} {}", name_of(kernel), info.arch);
}

std::string pack_command(const KernelSource& source) {
  return fmt::format("flashjit pack --spec {} --config {} --arch {} --out FOLDER",
                     shell_word(to_string(source.spec)), to_string(source.config), source.arch);
}

EntryReport report_of(const plan::Entry& entry, const CompiledKernel& kernel) {
  EntryReport report{.entry = entry.name, .shared_bytes = entry.shared_bytes, .threads = entry.threads};
  for (const EntryResources& used : kernel.resources) {
    if (used.entry != entry.name) continue;
    report.registers = used.registers;
    report.spill_bytes = used.spill_stores + used.spill_loads;
    report.shared_bytes += used.static_shared;
  }
  return report;
}

std::vector<EntryReport> reports_of(const KernelSource& source, const CompiledKernel& kernel) {
  std::vector<EntryReport> reports;
  for (const plan::Entry& entry : source.entries) reports.push_back(report_of(entry, kernel));
  return reports;
}

/// What the planner foresees by formula, checked against what ptxas made of it.
void check_fits(const KernelSource& source, const std::vector<EntryReport>& entries, const DeviceInfo& info) {
  for (const EntryReport& entry : entries) {
    const std::int64_t unit =
        (std::int64_t{entry.registers} + kRegisterUnit - 1) / kRegisterUnit * kRegisterUnit;
    const bool fits =
        entry.shared_bytes <= info.shared_per_block && unit * entry.threads <= info.registers_per_sm;
    if (fits) continue;
    throw Error(
        ErrorCode::compile_failed,
        fmt::format(
            "{} with {} does not fit {}: {} needs {} bytes of shared memory of {} and {} threads of {} "
            "registers of {} in all. Give a smaller tile.",
            to_string(source.spec), to_string(source.config), info.arch, entry.entry, entry.shared_bytes,
            info.shared_per_block, entry.threads, entry.registers, info.registers_per_sm));
  }
}

}  // namespace

struct KernelLibrary::Request {
  const DeviceInfo& info;
  const std::shared_ptr<const device::Driver>& driver;
  KernelSource source;
  std::string digest;
  double render_ms;
  std::string refusal = {};  ///< why the driver did not take what a pack or the cache holds
};

KernelLibrary::KernelLibrary(const Settings& settings) : settings_(settings) {
  for (const EmbeddedPack& pack : settings.embedded_packs) embedded_.emplace_back(pack, settings.log);
  for (const std::string& pack : settings.packs)
    packs_.emplace_back(path_of(pack), cache::Store::Access::read_only, settings.log);
  if (!settings.cache_dir.empty())
    cache_.emplace(path_of(settings.cache_dir), cache::Store::Access::cache, settings.log,
                   settings.cache_limit);
}

KernelLibrary::Result KernelLibrary::get(const plan::KernelPlan& kernel, const DeviceInfo& info,
                                         const std::shared_ptr<const device::Driver>& driver) {
  return kernels_.get(memory_key(kernel, info), [&] { return make(request(kernel, info, driver)); });
}

KernelLibrary::Request KernelLibrary::request(const plan::KernelPlan& kernel, const DeviceInfo& info,
                                              const std::shared_ptr<const device::Driver>& driver) {
  const Stopwatch stopwatch;
  Request request{info, driver, render::render(kernel, info, templates()), {}, 0};
  request.digest = cache::source_digest(request.source, compile::compile_options(info.arch));
  request.render_ms = stopwatch.ms();
  return request;
}

bool KernelLibrary::brings(const plan::KernelPlan& kernel, const DeviceInfo& info,
                           const std::shared_ptr<const device::Driver>& driver) {
  const std::string key = memory_key(kernel, info);
  if (kernels_.holds(key)) return true;
  if (kernels_.is_in_flight(key)) return false;
  try {
    kernels_.get(key, [&] {
      Request wanted = request(kernel, info, driver);
      if (Ready ready = from_stores(wanted)) return ready;
      throw Error(ErrorCode::kernel_missing, "no pack and no cache holds it");
    });
    return true;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kernel_missing) throw;
    return false;
  }
}

bool KernelLibrary::holds(const plan::KernelPlan& kernel, const DeviceInfo& info) const {
  return kernels_.holds(memory_key(kernel, info));
}

// NOLINTNEXTLINE(performance-unnecessary-value-param): moved from get()'s lambda
KernelLibrary::Ready KernelLibrary::make(Request request) {
  if (Ready ready = from_stores(request)) return ready;
  const std::string kernel = fmt::format("the kernel {} with {} for {}", to_string(request.source.spec),
                                         to_string(request.source.config), request.source.arch);
  const std::string missing = request.refusal.empty()
                                  ? "No pack and no cache holds " + kernel
                                  : fmt::format("The driver refuses {}, {}", kernel, request.refusal);
  const std::string remedy =
      fmt::format("make it with `{}` and name that folder in FLASHJIT_PACKS", pack_command(request.source));
  if (!settings_.jit)
    throw Error(
        ErrorCode::kernel_missing,
        fmt::format("{}, and compiling is switched off: {}, or set FLASHJIT_JIT=on.", missing, remedy));
  try {
    return compile(request, *compiler());
  } catch (const Error& error) {
    if (error.code() != ErrorCode::no_compiler) throw;
    throw Error(ErrorCode::no_compiler, fmt::format("{}, and it cannot be compiled here: {} Or {}.", missing,
                                                    error.message(), remedy));
  }
}

KernelLibrary::Ready KernelLibrary::from_stores(Request& request) {
  // By any compiler: the digest identifies the source, and asking NVRTC for its version would take longer
  // than all the rest.
  for (const cache::EmbeddedStore& pack : embedded_) {
    if (const auto kernel = pack.load(request.source, request.digest))
      if (Ready ready = try_load(request, *kernel, KernelOrigin::pack)) return ready;
  }
  for (const cache::Store& pack : packs_) {
    if (const auto kernel = pack.load(request.source, request.digest, ""))
      if (Ready ready = try_load(request, *kernel, KernelOrigin::pack)) return ready;
  }
  return from_cache(request, "");
}

KernelLibrary::Ready KernelLibrary::from_cache(Request& request, const std::string& compiler_tag) {
  if (!cache_) return nullptr;
  // By one compiler it is looked for a second time, after what was ignored has been told of.
  const bool quiet = !compiler_tag.empty();
  const auto kernel = cache_->load(request.source, request.digest, compiler_tag, quiet);
  return kernel ? try_load(request, *kernel, KernelOrigin::disk) : nullptr;
}

KernelLibrary::Ready KernelLibrary::compile(Request& request, const compile::Compiler& compiler) {
  cache::Store::Lock lock;
  if (cache_) {
    lock = cache_->lock(request.source.arch, cache::entry_key(request.digest, compiler.tag()),
                        settings_.lock_seconds);
    // Another process may have compiled it meanwhile; or another compiler's was found and the driver refused
    // it.
    if (Ready ready = from_cache(request, compiler.tag())) return ready;
  }
  const CompiledKernel kernel = compiler.compile(request.source);
  if (cache_) cache_->store(request.source, request.digest, kernel);
  Ready ready = load(request, kernel, KernelOrigin::compiled);
  tell_of(request.source, kernel);
  return ready;
}

void KernelLibrary::tell_of(const KernelSource& source, const CompiledKernel& kernel) const {
  settings_.log(fmt::format("compiled {} for {} in {:.0f} ms; `flashjit pack` or a kept cache avoids this",
                            to_string(source.spec), source.arch, kernel.compile_ms));
  if (spills_in_main_loop(kernel, source.entries))
    settings_.log(
        fmt::format("{} with {} spills registers on {}; `flashjit tune` finds a configuration that does not",
                    to_string(source.spec), to_string(source.config), source.arch));
}

KernelLibrary::Ready KernelLibrary::load(const Request& request, const CompiledKernel& kernel,
                                         KernelOrigin origin) {
  auto ready = std::make_shared<ReadyKernel>();
  ready->key = cache::entry_key(request.digest, kernel.compiler);
  ready->compiler = kernel.compiler;
  ready->origin = origin;
  ready->render_ms = request.render_ms;
  ready->compile_ms = origin == KernelOrigin::compiled ? kernel.compile_ms : 0;
  ready->entries = reports_of(request.source, kernel);
  check_fits(request.source, ready->entries, request.info);
  const Stopwatch stopwatch;
  ready->loaded =
      std::make_unique<device::LoadedKernel>(request.driver, kernel.cubin, request.source.entries);
  ready->load_ms = stopwatch.ms();
  if (settings_.verbose)
    settings_.log(fmt::format("loaded {} with {} for {} ({}) in {:.2f} ms", to_string(request.source.spec),
                              to_string(request.source.config), request.source.arch, to_string(origin),
                              ready->load_ms));
  return ready;
}

/// A stored kernel that the driver refuses, such as one of a newer CUDA, is no reason to give up.
KernelLibrary::Ready KernelLibrary::try_load(Request& request, const CompiledKernel& kernel,
                                             KernelOrigin origin) {
  try {
    return load(request, kernel, origin);
  } catch (const device::CodeRefused& error) {
    const std::string key = cache::entry_key(request.digest, kernel.compiler);
    const char* const store = origin == KernelOrigin::pack ? "pack" : "disk cache";
    settings_.log(fmt::format("ignoring the kernel {} from the {}: {}", key, store, error.message()));
    request.refusal = fmt::format("which the {} has as {} ({})", store, key, error.message());
    return nullptr;
  }
}

const render::TemplateSet& KernelLibrary::templates() {
  if (settings_.template_dir.empty()) return render::TemplateSet::embedded();
  templates_once_.run(
      [&] { own_templates_ = render::TemplateSet::from_folder(path_of(settings_.template_dir)); });
  return *own_templates_;
}

const plan::TuningRecords& KernelLibrary::records() {
  // Lines are logged outside of the lock: a log may call the library, which asks for the records.
  const bool cache_has_some = cache_ && cache_->is_usable(cache::kTuningFolder);
  std::vector<std::string> warnings;
  records_once_.run([&] {
    plan::TuningRecords found;
    for (const cache::EmbeddedStore& pack : embedded_) found.load(pack.records(), &warnings);
    for (const cache::Store& pack : packs_) found.load(pack.records_folder(), &warnings);
    if (cache_has_some) found.load(cache_->records_folder(), &warnings);
    // Without a compiler they would name kernels that no pack has.
    if (settings_.jit)
      for (const plan::TuningRecord& record : plan::shipped_records())
        found.add(record, plan::TuningRecords::Origin::shipped);
    records_ = std::move(found);
  });
  for (const std::string& warning : warnings) settings_.log(warning);
  return records_;
}

std::shared_ptr<const compile::Compiler> KernelLibrary::compiler() {
  const std::lock_guard lock(compiler_mutex_);
  if (!compiler_) compiler_ = compile::Compiler::open(settings_.nvrtc);
  return compiler_;
}

}  // namespace flashjit
