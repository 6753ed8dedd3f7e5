#include <fmt/format.h>
// windows.h first.
#include <windows.h>

#include <array>
#include <filesystem>
#include <vector>

#include "support/environment.hpp"
#include "support/libraries.hpp"
#include "support/paths.hpp"
#include "support/text.hpp"
#include "support/utf16.hpp"

namespace flashjit {
namespace {

namespace fs = std::filesystem;

constexpr std::array kNvrtc{"nvrtc64_130_0.dll", "nvrtc64_120_0.dll"};
constexpr std::array kNvrtcPlaces{"", "bin/x64", "bin", "nvidia/cu13/bin/x86_64", "nvidia/cuda_nvrtc/bin"};
constexpr LibraryNames kNames{.driver = "nvcuda.dll",
                              .nvml = "nvml.dll",
                              .nccl = "",
                              .nvrtc = kNvrtc,
                              .nvrtc_places = kNvrtcPlaces,
                              .toolkits = {},  // their installer adds them to PATH
                              .nvrtc_advice = "nvrtc64_130_0.dll"};

/// What it needs is looked for beside it and in the system's folders, not in PATH or the current folder.
void* load(const fs::path& absolute) {
  return ::LoadLibraryExW(absolute.c_str(), nullptr,
                          LOAD_LIBRARY_SEARCH_DLL_LOAD_DIR | LOAD_LIBRARY_SEARCH_DEFAULT_DIRS);
}

void* load_along_path(const fs::path& name) {
  if (void* handle = ::LoadLibraryExW(name.c_str(), nullptr, LOAD_LIBRARY_SEARCH_DEFAULT_DIRS)) return handle;
  const std::string path = environment_value("PATH");
  for (const std::string_view text : split(path, kPathSeparator)) {
    const fs::path folder = path_of(text);
    std::error_code error;
    if (!folder.is_absolute() || !fs::exists(folder / name, error)) continue;
    if (void* handle = load(folder / name)) return handle;
  }
  return nullptr;
}

}  // namespace

const LibraryNames& library_names() { return kNames; }

std::string nvrtc_builtins_name(int major, int minor) {
  return fmt::format("nvrtc-builtins64_{}{}.dll", major, minor);
}

OpenedLibrary open_library(const std::string& name) {
  const fs::path path = path_of(name);
  void* handle = path.has_parent_path() ? load(fs::absolute(path)) : load_along_path(path);
  if (handle) return {.handle = handle, .problem = {}};
  return {.handle = nullptr, .problem = fmt::format("{}: {}", name, last_windows_error())};
}

void* find_symbol(void* library, const char* name) {
  return reinterpret_cast<void*>(::GetProcAddress(static_cast<HMODULE>(library), name));
}

std::string file_with(const void* symbol) {
  HMODULE library = nullptr;
  if (!::GetModuleHandleExW(
          GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT,
          static_cast<const wchar_t*>(symbol), &library))
    return {};
  std::vector<wchar_t> name(32768);
  const DWORD length = ::GetModuleFileNameW(library, name.data(), static_cast<DWORD>(name.size()));
  return utf8_of({name.data(), length});
}

}  // namespace flashjit
