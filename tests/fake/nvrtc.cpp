// An NVRTC for tests: "compiles" any source to a few bytes, slowly if asked, and writes down that it did.
// Only the first of a kernel's programs counts, and waits.
//   FAKE_NVRTC_LOG=FILE  a line is added for each compilation: its process
//   FAKE_NVRTC_MS=N      each takes that long
//   FAKE_NVRTC_FAIL=1    each fails
//   FAKE_NVRTC_OLD=1     says that it is 12.0
//   FAKE_NVRTC_MEET=N    each waits till N of this process are under way at once; after a minute it fails
#include <nvrtc.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

struct _nvrtcProgram {
  std::string source, log, cubin;
};

namespace {

constexpr const char* kPtx = "// Cuda compilation tools, release 13.0, V13.0.88\n";

nvrtcResult copy(const std::string& text, char* out) {
  std::memcpy(out, text.c_str(), text.size() + 1);
  return NVRTC_SUCCESS;
}

// One write of a short line to the end of a file: lines of many processes do not mix.
void note_compilation() {
  const char* file = std::getenv("FAKE_NVRTC_LOG");
  if (!file) return;
  std::FILE* const log = std::fopen(file, "a");
  if (!log || std::fprintf(log, "%d\n", static_cast<int>(::getpid())) < 0 || std::fclose(log) != 0)
    std::abort();
}

bool is_second_program(int count, const char* const* options) {
  return std::any_of(options, options + count,
                     [](std::string_view option) { return option == "--define-macro=FLASHJIT_PROGRAM=2"; });
}

/// Whether `wanted` compilations came to be under way at once.
bool meet(int wanted) {
  static std::mutex mutex;
  static std::condition_variable arrived;
  static int under_way = 0;
  std::unique_lock lock(mutex);
  ++under_way;
  arrived.notify_all();
  return arrived.wait_for(lock, std::chrono::minutes(1), [&] { return under_way >= wanted; });
}

}  // namespace

extern "C" {

const char* nvrtcGetErrorString(nvrtcResult) { return "NVRTC_ERROR_FAKE"; }

nvrtcResult nvrtcVersion(int* major, int* minor) {
  *major = std::getenv("FAKE_NVRTC_OLD") ? 12 : 13;
  *minor = 0;
  return NVRTC_SUCCESS;
}

nvrtcResult nvrtcGetNumSupportedArchs(int* count) {
  *count = 3;
  return NVRTC_SUCCESS;
}

nvrtcResult nvrtcGetSupportedArchs(int* archs) {
  archs[0] = 80;
  archs[1] = 86;
  archs[2] = 90;
  return NVRTC_SUCCESS;
}

nvrtcResult nvrtcCreateProgram(nvrtcProgram* program, const char* source, const char*, int,
                               const char* const*, const char* const*) {
  *program = new _nvrtcProgram{source, {}, {}};
  return NVRTC_SUCCESS;
}

nvrtcResult nvrtcDestroyProgram(nvrtcProgram* program) {
  delete *program;
  *program = nullptr;
  return NVRTC_SUCCESS;
}

nvrtcResult nvrtcCompileProgram(nvrtcProgram program, int count, const char* const* options) {
  if (program->source.empty()) return NVRTC_SUCCESS;  // flashjit asks for the version so
  if (const char* ms = std::getenv("FAKE_NVRTC_MS"))
    std::this_thread::sleep_for(std::chrono::milliseconds(std::atoi(ms)));
  const bool counts = !is_second_program(count, options);
  if (counts) note_compilation();
  const char* meeting = counts ? std::getenv("FAKE_NVRTC_MEET") : nullptr;
  if (std::getenv("FAKE_NVRTC_FAIL") || (meeting && !meet(std::atoi(meeting)))) {
    program->log = "flashjit.cu(1): error: as the test asked";
    return NVRTC_ERROR_COMPILATION;
  }
  program->cubin =
      "\x7f"
      "ELF of " +
      std::to_string(std::hash<std::string>{}(program->source));
  return NVRTC_SUCCESS;
}

nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram program, std::size_t* size) {
  *size = program->log.size() + 1;
  return NVRTC_SUCCESS;
}
nvrtcResult nvrtcGetProgramLog(nvrtcProgram program, char* log) { return copy(program->log, log); }

nvrtcResult nvrtcGetCUBINSize(nvrtcProgram program, std::size_t* size) {
  *size = program->cubin.size();
  return NVRTC_SUCCESS;
}
nvrtcResult nvrtcGetCUBIN(nvrtcProgram program, char* cubin) {
  std::memcpy(cubin, program->cubin.data(), program->cubin.size());
  return NVRTC_SUCCESS;
}

nvrtcResult nvrtcGetPTXSize(nvrtcProgram, std::size_t* size) {
  *size = std::strlen(kPtx) + 1;
  return NVRTC_SUCCESS;
}
nvrtcResult nvrtcGetPTX(nvrtcProgram, char* ptx) { return copy(kPtx, ptx); }
}
