// Compiled kernels by spec, configuration and architecture: memory, then packs, then the disk cache, then
// NVRTC.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cache/embedded.hpp"
#include "cache/store.hpp"
#include "call/settings.hpp"
#include "compile/compiler.hpp"
#include "device/loaded_kernel.hpp"
#include "flashjit/runtime.hpp"
#include "plan/records.hpp"
#include "render/render.hpp"
#include "support/once.hpp"
#include "support/single_flight.hpp"

namespace flashjit {

/// A kernel in the driver, and how it came there.
struct ReadyKernel {
  std::string key;
  std::string compiler;  ///< that made it: "nvrtc13.0.88"
  KernelOrigin origin;   ///< of its first use
  double render_ms = 0, compile_ms = 0, load_ms = 0;
  std::vector<EntryReport> entries;
  std::unique_ptr<const device::LoadedKernel> loaded;
};

/// Keeps every kernel until it is destroyed, because a captured graph may hold it. Safe from many threads:
/// each kernel is made once, others wait for it.
class KernelLibrary {
 public:
  explicit KernelLibrary(const Settings& settings);

  using Result = SingleFlight<std::shared_ptr<const ReadyKernel>>::Result;
  /// Throws Error(compile_failed) also when the kernel was compiled and does not fit the device;
  /// Error(kernel_missing) or Error(no_compiler) when it is nowhere and cannot be compiled.
  Result get(const plan::KernelPlan& kernel, const DeviceInfo& info,
             const std::shared_ptr<const device::Driver>& driver);

  /// Whether get() takes no compile: brings a stored kernel to memory. Does not wait for a compile under way.
  bool brings(const plan::KernelPlan& kernel, const DeviceInfo& info,
              const std::shared_ptr<const device::Driver>& driver);

  /// Whether get() would find it in memory.
  bool holds(const plan::KernelPlan& kernel, const DeviceInfo& info) const;

  /// The tuning records of packs and cache, in that order, and the shipped ones; read once, at the first
  /// call.
  const plan::TuningRecords& records();

 private:
  using Ready = std::shared_ptr<const ReadyKernel>;
  struct Request;
  Request request(const plan::KernelPlan& kernel, const DeviceInfo& info,
                  const std::shared_ptr<const device::Driver>& driver);
  Ready make(Request request);
  Ready from_stores(Request& request);
  Ready from_cache(Request& request, const std::string& compiler_tag);
  Ready compile(Request& request, const compile::Compiler& compiler);
  /// Logs what was compiled. Comes last: a log may be slow.
  void tell_of(const KernelSource& source, const CompiledKernel& kernel) const;
  Ready load(const Request& request, const CompiledKernel& kernel, KernelOrigin origin);
  Ready try_load(Request& request, const CompiledKernel& kernel, KernelOrigin origin);
  const render::TemplateSet& templates();
  /// Opens NVRTC at the first call, which takes milliseconds. Throws Error(no_compiler).
  std::shared_ptr<const compile::Compiler> compiler();

  const Settings& settings_;
  std::vector<cache::EmbeddedStore> embedded_;
  std::deque<cache::Store> packs_;
  std::optional<cache::Store> cache_;
  Once templates_once_, records_once_;
  std::optional<render::TemplateSet> own_templates_;
  plan::TuningRecords records_;
  std::mutex compiler_mutex_;
  std::shared_ptr<const compile::Compiler> compiler_;
  SingleFlight<Ready> kernels_;
};

}  // namespace flashjit
