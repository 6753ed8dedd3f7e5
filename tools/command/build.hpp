// Kernels built without a GPU, the way the runtime builds them: shared by pack and inspect.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cache/store.hpp"
#include "command.hpp"
#include "compile/compiler.hpp"
#include "flashjit/runtime.hpp"
#include "plan/plan.hpp"
#include "render/render.hpp"

namespace flashjit::command {

/// The templates that the environment chooses: embedded, or FLASHJIT_TEMPLATE_DIR's.
render::TemplateSet chosen_templates();
/// The NVRTC that the environment chooses. Throws Error(no_compiler).
std::shared_ptr<const compile::Compiler> chosen_compiler();
/// Where the environment says kernels lie: the packs, then the cache.
std::vector<std::filesystem::path> kernel_folders();

/// A kernel in a store.
struct StoredKernel {
  cache::EntryInfo info;
  std::filesystem::path folder;  ///< of kernel.cu, kernel.cubin and meta.json
};
/// The one kernel below `folders` whose key begins with `key`; the same key twice: the first folder's.
/// Throws Error(invalid_argument) when there is none or more than one.
StoredKernel find_stored(const std::vector<std::filesystem::path>& folders, const std::string& key);

/// The tuning records that a runtime would choose from: the packs', then the cache's.
plan::TuningRecords chosen_records();

/// The shape of a spec when none is given: 4096 tokens, 16 heads.
AttentionShape default_shape();

struct BuiltKernel {
  KernelSource source;
  CompiledKernel kernel;
  KernelReport report;
};

/// Renders the plan, takes the kernel from `store`, else compiles it and stores it there. `store` may be
/// null. Throws Error(compile_failed), or Error(io) when the store refuses the kernel.
BuiltKernel build_kernel(const plan::ExecutionPlan& plan, const DeviceInfo& device,
                         const render::TemplateSet& templates, const compile::Compiler& compiler,
                         cache::Store* store);

/// Registers, spills, shared memory and threads of each entry.
std::vector<EntryReport> entry_reports(const std::vector<plan::Entry>& entries,
                                       const std::vector<EntryResources>& used);

/// Thread blocks of the entry that one multiprocessor can hold: by threads, registers and shared memory.
int blocks_per_multiprocessor(const EntryReport& entry, const DeviceInfo& device);

Json to_json(const EntryReport& entry);
Json to_json(const KernelReport& report);

}  // namespace flashjit::command
