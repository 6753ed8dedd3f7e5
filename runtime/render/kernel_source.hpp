// A rendered kernel before and after compiling: plain values that cache, compiler and device pass along.
#pragma once

#include <string>
#include <vector>

#include "flashjit/spec.hpp"
#include "plan/family.hpp"

namespace flashjit {

struct Header {
  std::string name;  ///< as included: "flashjit/sm80/forward.cuh"
  std::string text;

  bool operator==(const Header&) const = default;
};

/// Everything NVRTC needs: nothing is read from a toolkit or a folder.
struct KernelSource {
  AttentionSpec spec;
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
  std::string cubin;
  std::string log;       ///< NVRTC's and ptxas's, as printed
  std::string compiler;  ///< "nvrtc13.0.88"
  std::vector<EntryResources> resources = {};
  double compile_ms = 0;
};

/// Whether ptxas spilled in an entry that holds a main loop; such a configuration is not worth running.
bool spills_in_main_loop(const CompiledKernel& kernel, const std::vector<plan::Entry>& entries);

}  // namespace flashjit
