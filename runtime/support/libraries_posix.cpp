#include <dlfcn.h>
#include <fmt/format.h>

#include <array>

#include "support/libraries.hpp"

namespace flashjit {
namespace {

constexpr std::array kNvrtc{"libnvrtc.so.13", "libnvrtc.so.12"};
constexpr std::array kNvrtcPlaces{"", "lib64", "lib", "nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"};
constexpr std::array kToolkits{"/usr/local/cuda", "/opt/cuda", "/usr/lib/cuda", "/usr/local/cuda-13",
                               "/usr/local/cuda-12"};
constexpr LibraryNames kNames{.driver = "libcuda.so.1",
                              .nvml = "libnvidia-ml.so.1",
                              .nccl = "libnccl.so.2",
                              .nvrtc = kNvrtc,
                              .nvrtc_places = kNvrtcPlaces,
                              .toolkits = kToolkits,
                              .nvrtc_advice = "libnvrtc.so"};

}  // namespace

const LibraryNames& library_names() { return kNames; }

std::string nvrtc_builtins_name(int major, int minor) {
  return fmt::format("libnvrtc-builtins.so.{}.{}", major, minor);
}

OpenedLibrary open_library(const std::string& name) {
  if (void* handle = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) return {.handle = handle, .problem = {}};
  const char* problem = ::dlerror();
  return {.handle = nullptr, .problem = problem ? problem : name};
}

void* find_symbol(void* library, const char* name) { return ::dlsym(library, name); }

std::string file_with(const void* symbol) {
  Dl_info info{};
  return ::dladdr(symbol, &info) != 0 && info.dli_fname ? info.dli_fname : "";
}

}  // namespace flashjit
