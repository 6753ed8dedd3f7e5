// What a Runtime goes by: its options, and the environment where an option says nothing.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "flashjit/runtime.hpp"
#include "support/environment.hpp"

namespace flashjit {

using Log = std::function<void(std::string_view)>;

struct Settings {
  std::string cache_dir;                     ///< "": nothing is kept on disk
  std::uint64_t cache_limit = 0;             ///< bytes of kernels in cache_dir
  double lock_seconds = 60;                  ///< for another process that compiles the same kernel
  std::vector<EmbeddedPack> embedded_packs;  ///< searched first to last, before `packs`
  std::vector<std::string> packs;            ///< searched first to last
  bool jit = true;
  std::string template_dir;            ///< "": the embedded templates
  std::string nvrtc, libcuda;          ///< "": the usual places
  bool check_indices = false;          ///< kernels print each index of a captured tensor that is clamped
  bool check_waits = false;            ///< kernels trap where they would hang
  bool tune_in_background = false;     ///< as RuntimeOptions::tune_in_background says
  bool compile_in_background = false;  ///< as RuntimeOptions::compile_in_background says
  bool verbose = false;                ///< also log what came from packs and caches
  Log log;                             ///< never empty; one line at a time, from one thread at a time
};

Settings resolve_settings(const RuntimeOptions& options, const Environment& environment);

}  // namespace flashjit
