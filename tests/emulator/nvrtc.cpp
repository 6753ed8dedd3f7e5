// An NVRTC that compiles kernels for the emulator, with the host's compiler. FLASHJIT_NVRTC names it.
//   FLASHJIT_EMULATOR_KEEP=FOLDER  sources and libraries stay there, with symbols for a debugger
#include <dlfcn.h>
#include <fmt/format.h>
#include <nvrtc.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "support/file.hpp"
#include "tests/emulator/translate.hpp"

namespace fs = std::filesystem;

struct _nvrtcProgram {
  std::string source;
  std::vector<std::pair<std::string, std::string>> headers;  ///< names and texts
  std::string log, library;
};

namespace {

nvrtcResult copy(const std::string& text, char* out) {
  std::memcpy(out, text.c_str(), text.size() + 1);
  return NVRTC_SUCCESS;
}

std::string read(const fs::path& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}
void write(const fs::path& path, const std::string& text) {
  fs::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << text;
}

/// What NVRTC's options become: "--gpu-architecture=sm_90a", and macros.
std::string compiler_options(int count, const char* const* options) {
  std::string result;
  for (int i = 0; i < count; ++i) {
    const std::string_view option = options[i];
    constexpr std::string_view kArchitecture = "--gpu-architecture=sm_", kMacro = "--define-macro=";
    if (option.starts_with(kArchitecture))
      result += fmt::format(" -D__CUDA_ARCH__={}0", option.substr(kArchitecture.size(), 2));
    if (option.starts_with(kMacro)) result += fmt::format(" -D{}", option.substr(kMacro.size()));
  }
  return result;
}

/// Runs a command; its output is added to `log`.
bool runs(const std::string& command, std::string& log) {
  FILE* pipe = ::popen((command + " 2>&1").c_str(), "r");
  if (!pipe) return false;
  char buffer[4096];
  for (std::size_t size; (size = std::fread(buffer, 1, sizeof buffer, pipe)) > 0;) log.append(buffer, size);
  return ::pclose(pipe) == 0;
}

nvrtcResult compile(_nvrtcProgram& program, const std::string& options) {
  const char* kept = std::getenv("FLASHJIT_EMULATOR_KEEP");
  const fs::path parent = kept ? fs::path(kept) : fs::temp_directory_path();
  const fs::path folder = parent / ("flashjit-emulated-" + flashjit::unique_suffix());
  write(folder / "flashjit.cpp", flashjit_emulator::translate(program.source));
  for (const auto& [name, text] : program.headers) write(folder / name, flashjit_emulator::translate(text));
  const std::string object = (folder / "kernel.o").string(), library = (folder / "kernel.so").string();
  const std::string compile = fmt::format(
      "'{}' -c " FLASHJIT_EMULATOR_OPTIONS "{}{} '-ffile-prefix-map={}/=' -include '{}' '-I{}' '{}' -o '{}'",
      FLASHJIT_EMULATOR_COMPILER, kept ? " -g" : "", options, folder.string(),
      FLASHJIT_EMULATOR_DEVICE_HEADER, folder.string(), (folder / "flashjit.cpp").string(), object);
  // The emulator takes the place of ThreadSanitizer's library.
  const std::string link =
      fmt::format("'{}' -shared '{}' -o '{}'", FLASHJIT_EMULATOR_COMPILER, object, library);
  const bool compiled = runs(compile, program.log) && runs(link, program.log);
  if (compiled) program.library = read(library);
  if (!kept) fs::remove_all(folder);
  return compiled ? NVRTC_SUCCESS : NVRTC_ERROR_COMPILATION;
}

}  // namespace

#define EMULATED_NVRTC extern "C" __attribute__((visibility("default")))

EMULATED_NVRTC const char* nvrtcGetErrorString(nvrtcResult) { return "the emulator's compiler failed"; }

/// One that NVIDIA's do not have.
EMULATED_NVRTC nvrtcResult nvrtcVersion(int* major, int* minor) {
  *major = 99;
  *minor = 0;
  return NVRTC_SUCCESS;
}

constexpr int kArchs[] = {75, 80, 86, 89, 90, 120};

EMULATED_NVRTC nvrtcResult nvrtcGetNumSupportedArchs(int* count) {
  *count = std::size(kArchs);
  return NVRTC_SUCCESS;
}

EMULATED_NVRTC nvrtcResult nvrtcGetSupportedArchs(int* archs) {
  std::memcpy(archs, kArchs, sizeof kArchs);
  return NVRTC_SUCCESS;
}

EMULATED_NVRTC nvrtcResult nvrtcCreateProgram(nvrtcProgram* program, const char* source, const char*,
                                              int count, const char* const* texts, const char* const* names) {
  *program = new _nvrtcProgram{source, {}, {}, {}};
  for (int i = 0; i < count; ++i) (*program)->headers.emplace_back(names[i], texts[i]);
  return NVRTC_SUCCESS;
}

EMULATED_NVRTC nvrtcResult nvrtcDestroyProgram(nvrtcProgram* program) {
  delete *program;
  *program = nullptr;
  return NVRTC_SUCCESS;
}

EMULATED_NVRTC nvrtcResult nvrtcCompileProgram(nvrtcProgram program, int count, const char* const* options) {
  if (program->source.empty()) return NVRTC_SUCCESS;  // flashjit asks for the version so
  try {
    return compile(*program, compiler_options(count, options));
  } catch (const std::exception& error) {
    program->log += fmt::format("error: {}\n", error.what());
    return NVRTC_ERROR_COMPILATION;
  }
}

EMULATED_NVRTC nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram program, std::size_t* size) {
  *size = program->log.size() + 1;
  return NVRTC_SUCCESS;
}
EMULATED_NVRTC nvrtcResult nvrtcGetProgramLog(nvrtcProgram program, char* log) {
  return copy(program->log, log);
}

EMULATED_NVRTC nvrtcResult nvrtcGetCUBINSize(nvrtcProgram program, std::size_t* size) {
  *size = program->library.size();
  return NVRTC_SUCCESS;
}
EMULATED_NVRTC nvrtcResult nvrtcGetCUBIN(nvrtcProgram program, char* cubin) {
  std::memcpy(cubin, program->library.data(), program->library.size());
  return NVRTC_SUCCESS;
}

namespace {
/// From which flashjit takes the compiler's whole version: a hash of this library and of device.hpp, so that
/// no kernel is kept that another emulator made.
const std::string& version_comment() {
  static const std::string comment = [] {
    Dl_info own{};
    ::dladdr(reinterpret_cast<void*>(&version_comment), &own);
    const std::size_t hash =
        std::hash<std::string>{}(read(own.dli_fname) + read(FLASHJIT_EMULATOR_DEVICE_HEADER));
    return fmt::format("// Cuda compilation tools, release 99.0, V99.0.{}\n", hash % 1'000'000'000);
  }();
  return comment;
}
}  // namespace

EMULATED_NVRTC nvrtcResult nvrtcGetPTXSize(nvrtcProgram, std::size_t* size) {
  *size = version_comment().size() + 1;
  return NVRTC_SUCCESS;
}
EMULATED_NVRTC nvrtcResult nvrtcGetPTX(nvrtcProgram, char* ptx) { return copy(version_comment(), ptx); }
