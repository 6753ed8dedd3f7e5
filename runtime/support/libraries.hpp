// Libraries opened at run time, and what the system at hand calls them.
#pragma once

#include <span>
#include <string>

namespace flashjit {

/// Names as the loader takes them.
struct LibraryNames {
  const char* driver;
  const char* nvml;
  const char* nccl;                    ///< "": the system has none
  std::span<const char* const> nvrtc;  ///< newest first
  /// Where a toolkit and PyPI's wheels keep NVRTC below their folders, and where toolkits are.
  std::span<const char*const> nvrtc_places, toolkits;
  const char* nvrtc_advice;  ///< "libnvrtc.so", as people are told to look for it
};
const LibraryNames& library_names();

/// The name of the file with NVRTC's built-in functions, beside the library of this version.
std::string nvrtc_builtins_name(int major, int minor);

struct OpenedLibrary {
  void* handle = nullptr;
  std::string problem;  ///< why it could not be opened
};
/// By a path, or by a bare name along the loader's own path, which is never the current folder. Its symbols
/// stay its own. Never closed: such libraries have threads and exit handlers.
OpenedLibrary open_library(const std::string& name);

/// Null where the library has no such function.
void* find_symbol(void* library, const char* name);

/// The path of the library that has the function; empty where it is unknown.
std::string file_with(const void* symbol);

}  // namespace flashjit
