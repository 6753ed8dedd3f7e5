#include "support/environment.hpp"

#include <fmt/format.h>

#include <array>
#include <filesystem>
#include <limits>
#include <map>

#include "flashjit/error.hpp"
#include "support/paths.hpp"
#include "support/text.hpp"

namespace flashjit {
namespace {

constexpr std::array<EnvironmentVariable, 13> kVariables{{
    {"FLASHJIT_CACHE_DIR",
     "Folder of compiled kernels and tuning records. Default: $XDG_CACHE_HOME/flashjit, else "
     "~/.cache/flashjit; on Windows %LOCALAPPDATA%/flashjit."},
    {"FLASHJIT_CACHE_LIMIT",
     "Size of the cache, such as 512M or 4G, above which the least recently used kernels are removed. "
     "Default: 2G; off: none."},
    {"FLASHJIT_PACKS",
     "Folders of packed kernels, separated by ':' (on Windows by ';'), searched in this order before the "
     "cache."},
    {"FLASHJIT_JIT",
     "on (default): compile kernels that are in no pack and not in the cache; off: never compile."},
    {"FLASHJIT_TEMPLATE_DIR", "Folder of kernel templates to use instead of the embedded ones."},
    {"FLASHJIT_NVRTC",
     "Path of libnvrtc, 12.1 or newer, or of its folder. Default: the loader's path, then the toolkit's "
     "usual places."},
    {"FLASHJIT_LIBCUDA", "Path of libcuda, the driver's library. Default: the loader's path."},
    {"FLASHJIT_NCCL", "Path of libnccl, for sequences that GPUs share. Default: the loader's path."},
    {"FLASHJIT_CHECK_INDICES",
     "on: slow kernels that print each out-of-range index of a captured tensor, each entry of `indices` that "
     "is no key but -1, and in a cache each wrong page number, length and `prefix_length`, and where; off "
     "(default)."},
    {"FLASHJIT_CHECK_WAITS",
     "on: kernels whose waits end with a launch error after 10 seconds, instead of a hang; off (default)."},
    {"FLASHJIT_TUNE_IN_BACKGROUND",
     "on: tune each shape at its first use, in a background thread; off (default). Needs NVRTC."},
    {"FLASHJIT_COMPILE_IN_BACKGROUND",
     "on: a call whose kernel must be compiled uses another one of its spec that is in memory, or on Hopper "
     "one that is compiled sooner, and a background thread compiles; off (default). Needs NVRTC."},
    {"FLASHJIT_LOG", "quiet, info (default) or debug: how much to log."},
}};

using Get = std::function<const char*(const char*)>;

/// A variable that is set to nothing counts as not set.
std::string value_of(const Get& get, const char* name) {
  const char* value = get(name);
  return value ? value : "";
}

std::string cache_dir(const Get& get) {
  if (std::string given = value_of(get, "FLASHJIT_CACHE_DIR"); !given.empty()) return given;
  for (const CachePlace& place : cache_places()) {
    // Only absolute paths count, as the XDG specification asks.
    const std::filesystem::path folder = path_of(value_of(get, place.variable));
    if (folder.is_absolute()) return (folder / place.name).string();
  }
  return {};
}

[[noreturn]] void refuse_variable(std::string_view name, std::string_view value, std::string_view allowed) {
  throw Error(ErrorCode::invalid_argument,
              fmt::format("the environment variable {} is {}; set it to {}, or unset it", name, quoted(value),
                          allowed));
}

std::uint64_t cache_limit(const Get& get) {
  constexpr const char* kName = "FLASHJIT_CACHE_LIMIT";
  const std::string value = value_of(get, kName);
  if (value.empty()) return std::uint64_t{2} << 30;
  if (value == "off") return std::numeric_limits<std::uint64_t>::max();
  try {
    return parse_bytes(value);
  } catch (const Error&) {
    refuse_variable(kName, value, "a size such as 512M or 4G, or off");
  }
}

std::vector<std::string> paths(std::string_view text) {
  std::vector<std::string> out;
  for (const std::string_view path : split(text, kPathSeparator)) {
    if (!path.empty()) out.emplace_back(path);
  }
  return out;
}

bool on_or_off(const Get& get, const char* name, bool otherwise) {
  const std::string value = value_of(get, name);
  if (value.empty()) return otherwise;
  if (value == "on" || value == "off") return value == "on";
  refuse_variable(name, value, "on or off");
}

}  // namespace

std::span<const EnvironmentVariable> environment_variables() { return kVariables; }

Environment read_environment() {
  std::map<std::string, std::string> values;  // the texts, as long as they are looked at
  return read_environment([&](const char* name) -> const char* {
    return values.insert_or_assign(name, environment_value(name)).first->second.c_str();
  });
}

Environment read_environment(const Get& get) {
  Environment out;
  out.cache_dir = cache_dir(get);
  out.cache_limit = cache_limit(get);
  out.packs = paths(value_of(get, "FLASHJIT_PACKS"));
  out.jit = on_or_off(get, "FLASHJIT_JIT", true);
  out.template_dir = value_of(get, "FLASHJIT_TEMPLATE_DIR");
  out.nvrtc = value_of(get, "FLASHJIT_NVRTC");
  out.libcuda = value_of(get, "FLASHJIT_LIBCUDA");
  out.nccl = value_of(get, "FLASHJIT_NCCL");
  out.check_indices = on_or_off(get, "FLASHJIT_CHECK_INDICES", false);
  out.check_waits = on_or_off(get, "FLASHJIT_CHECK_WAITS", false);
  out.tune_in_background = on_or_off(get, "FLASHJIT_TUNE_IN_BACKGROUND", false);
  out.compile_in_background = on_or_off(get, "FLASHJIT_COMPILE_IN_BACKGROUND", false);
  const std::string log = value_of(get, "FLASHJIT_LOG");
  if (!log.empty() && log != "quiet" && log != "info" && log != "debug") {
    refuse_variable("FLASHJIT_LOG", log, "quiet, info or debug");
  }
  out.verbose = log == "debug";
  out.quiet = log == "quiet";
  return out;
}

}  // namespace flashjit
