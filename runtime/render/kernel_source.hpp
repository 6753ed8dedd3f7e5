// A rendered kernel before and after compiling: plain values that cache, compiler and device pass along.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "flashjit/spec.hpp"
#include "plan/kernel_plan.hpp"

namespace flashjit {

struct Header {
  std::string name;  ///< as included: "flashjit/sm80/forward.cuh"
  std::string text;

  bool operator==(const Header&) const = default;
};

/// Everything NVRTC needs: nothing is read from a toolkit or a folder.
struct KernelSource {
  KernelSpec spec;
  TileConfig config;
  std::string arch;             ///< "sm_90a"
  std::string text;             ///< thin: includes, the Problem struct, the entries
  std::vector<Header> headers;  ///< those the text includes, directly or not, sorted by name
  std::vector<plan::Entry> entries;
};

/// ptxas's report on one entry.
struct EntryResources {
  std::string entry;  ///< "forward"
  int registers = 0;
  int spill_stores = 0, spill_loads = 0, stack = 0;  ///< bytes
  int static_shared = 0;                             ///< bytes

  bool operator==(const EntryResources&) const = default;
};

struct CompiledKernel {
  std::string cubin;     ///< one image a program (program_count()), one after the other
  std::string log;       ///< NVRTC's and ptxas's, as printed
  std::string compiler;  ///< "nvrtc13.0.88"
  std::vector<EntryResources> resources = {};
  double compile_ms = 0;
};

/// If some entries have a main loop, those without one are a second program, since two compile side by side
/// sooner than one that has all. A program is the source's text with kProgramMacro defined as its number,
/// from 1 on, which leaves the other's entries out; without the macro the text has them all.
int program_count(const std::vector<plan::Entry>& entries);
/// The number of the program that has `entry`, which is one of `entries`.
int program_of(const plan::Entry& entry, const std::vector<plan::Entry>& entries);
inline constexpr std::string_view kProgramMacro = "FLASHJIT_PROGRAM";

/// Whether ptxas spilled in an entry that holds a main loop; such a configuration is not worth running.
bool spills_in_main_loop(const CompiledKernel& kernel, const std::vector<plan::Entry>& entries);

}  // namespace flashjit
