// NVRTC, opened at run time: from source to cubin, with ptxas's report. The one place that sees nvrtc.h.
#pragma once

#include <memory>
#include <string>

#include "flashjit/error.hpp"
#include "render/kernel_source.hpp"

namespace flashjit::compile {

/// One loaded NVRTC. Thread-safe; programs are compiled in parallel by calling from several threads.
class Compiler {
 public:
  /// Opens libnvrtc.so.13 or .12: FLASHJIT_NVRTC, then the loader's path, then the toolkit's and PyPI's usual
  /// places. Throws Error(no_compiler) that lists where it looked and what to install.
  static std::shared_ptr<const Compiler> open(const std::string& library = {});

  /// "nvrtc13.0.88"-like: what the key holds of the compiler (major, minor, and the build where NVRTC reports
  /// it it).
  const std::string& tag() const;
  const std::string& path() const;
  /// The architectures this NVRTC can compile for: {"sm_75", ...}.
  std::vector<std::string> architectures() const;

  /// A source's programs side by side. Throws Error(compile_failed) with NVRTC's log as detail.
  CompiledKernel compile(const KernelSource& source) const;
  /// The PTX of all entries, for inspection.
  std::string ptx(const KernelSource& source) const;
  /// Throws where compile() would find an error in the source; from NVRTC 12.9 on in a tenth of the time.
  void check(const KernelSource& source) const;

  ~Compiler();

 private:
  Compiler();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// The options passed to NVRTC for an architecture, in order: part of the key.
std::vector<std::string> compile_options(const std::string& arch);

/// Registers, spills, stack and static shared memory by entry, from the log of --ptxas-options=-v.
std::vector<EntryResources> parse_ptxas_log(const std::string& log);

}  // namespace flashjit::compile
