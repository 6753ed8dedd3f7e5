// The environment, read in this one place. Explicit options win over it.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace flashjit {

struct EnvironmentVariable {
  std::string_view name;         ///< "FLASHJIT_CACHE_DIR"
  std::string_view description;  ///< the row of the table in tools/docs/environment.md
};

/// Every variable flashjit reads, in the order of that table.
std::span<const EnvironmentVariable> environment_variables();

struct Environment {
  std::string
      cache_dir;  ///< FLASHJIT_CACHE_DIR, else below the first of cache_places(); "" when it is unknown
  std::uint64_t cache_limit;           ///< FLASHJIT_CACHE_LIMIT in bytes; the largest number: none
  std::vector<std::string> packs;      ///< FLASHJIT_PACKS, separated by kPathSeparator
  bool jit = true;                     ///< FLASHJIT_JIT: on or off
  std::string template_dir;            ///< FLASHJIT_TEMPLATE_DIR
  std::string nvrtc;                   ///< FLASHJIT_NVRTC: path of libnvrtc
  std::string libcuda;                 ///< FLASHJIT_LIBCUDA: path of libcuda
  std::string nccl;                    ///< FLASHJIT_NCCL: path of libnccl
  bool check_indices = false;          ///< FLASHJIT_CHECK_INDICES: on or off
  bool check_waits = false;            ///< FLASHJIT_CHECK_WAITS: on or off
  bool tune_in_background = false;     ///< FLASHJIT_TUNE_IN_BACKGROUND: on or off
  bool compile_in_background = false;  ///< FLASHJIT_COMPILE_IN_BACKGROUND: on or off
  bool verbose = false;                ///< FLASHJIT_LOG: quiet, info (default) or debug
  bool quiet = false;
};

/// The variable's value in UTF-8; "" where it is not set. Of a program that is setuid always "": its user
/// must not choose the code that runs in it.
std::string environment_value(const char* name);

/// Between the folders of a list: ':', on Windows ';'.
extern const char kPathSeparator;

/// Where the cache is by default: `name` below the folder of the first variable that has an absolute path.
struct CachePlace {
  const char* variable;
  const char* name;
};
std::span<const CachePlace> cache_places();

/// Throws Error(invalid_argument) for a value that is not allowed. Of a program that is
/// setuid, or otherwise runs with more rights than its caller, nothing is read. `get` replaces getenv in
/// tests.
Environment read_environment();
Environment read_environment(const std::function<const char*(const char*)>& get);

}  // namespace flashjit
