#include "compile/compiler.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nvrtc.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <filesystem>
#include <future>
#include <string_view>

#include "support/environment.hpp"
#include "support/libraries.hpp"
#include "support/paths.hpp"
#include "support/text.hpp"

namespace flashjit::compile {
namespace {

namespace fs = std::filesystem;

constexpr int kOldestVersion = 1201;  // its ptxas knows st.async
constexpr int kFullVersion = 1209;    // has a cache of its own, and --fdevice-syntax-only

std::string install_advice() {
  return fmt::format(
      "install NVRTC 12.1 or newer (`pip install nvidia-cuda-nvrtc`, or a CUDA toolkit) and set "
      "FLASHJIT_NVRTC to its {} or the folder that holds it, or run from a pack or a filled cache",
      library_names().nvrtc_advice);
}

/// The functions of NVRTC that flashjit calls.
struct Api {
  decltype(&::nvrtcGetErrorString) get_error_string;
  decltype(&::nvrtcVersion) version;
  decltype(&::nvrtcGetNumSupportedArchs) get_num_supported_archs;
  decltype(&::nvrtcGetSupportedArchs) get_supported_archs;
  decltype(&::nvrtcCreateProgram) create_program;
  decltype(&::nvrtcDestroyProgram) destroy_program;
  decltype(&::nvrtcCompileProgram) compile_program;
  decltype(&::nvrtcGetProgramLogSize) get_log_size;
  decltype(&::nvrtcGetProgramLog) get_log;
  decltype(&::nvrtcGetCUBINSize) get_cubin_size;
  decltype(&::nvrtcGetCUBIN) get_cubin;
  decltype(&::nvrtcGetPTXSize) get_ptx_size;
  decltype(&::nvrtcGetPTX) get_ptx;
};

template <class Function>
void find_symbol(void* library, const std::string& path, const char* name, Function& function) {
  function = reinterpret_cast<Function>(flashjit::find_symbol(library, name));
  if (!function) {
    throw Error(ErrorCode::no_compiler,
                fmt::format("{} has no function {}: it is no NVRTC, or a very old one; {}", quoted(path),
                            name, install_advice()));
  }
}

Api load_api(void* library, const std::string& path) {
  Api api{};
  find_symbol(library, path, "nvrtcGetErrorString", api.get_error_string);
  find_symbol(library, path, "nvrtcVersion", api.version);
  find_symbol(library, path, "nvrtcGetNumSupportedArchs", api.get_num_supported_archs);
  find_symbol(library, path, "nvrtcGetSupportedArchs", api.get_supported_archs);
  find_symbol(library, path, "nvrtcCreateProgram", api.create_program);
  find_symbol(library, path, "nvrtcDestroyProgram", api.destroy_program);
  find_symbol(library, path, "nvrtcCompileProgram", api.compile_program);
  find_symbol(library, path, "nvrtcGetProgramLogSize", api.get_log_size);
  find_symbol(library, path, "nvrtcGetProgramLog", api.get_log);
  find_symbol(library, path, "nvrtcGetCUBINSize", api.get_cubin_size);
  find_symbol(library, path, "nvrtcGetCUBIN", api.get_cubin);
  find_symbol(library, path, "nvrtcGetPTXSize", api.get_ptx_size);
  find_symbol(library, path, "nvrtcGetPTX", api.get_ptx);
  return api;
}

/// Names below a folder: a toolkit's and PyPI's wheels' places, newest first.
std::vector<std::string> libraries_below(const fs::path& folder) {
  std::vector<std::string> names;
  for (const char* place : library_names().nvrtc_places) {
    for (const char* file : library_names().nvrtc) {
      std::error_code error;
      if (fs::path path = folder / place / file; fs::exists(path, error)) names.push_back(path.string());
    }
  }
  return names;
}

/// What to hand to the loader, in order. A given library is the only candidate: another one would surprise.
std::vector<std::string> candidates(const std::string& given) {
  std::error_code error;
  if (fs::is_directory(path_of(given), error)) return libraries_below(path_of(given));
  if (!given.empty()) return {given};
  const LibraryNames& known = library_names();
  std::vector<std::string> names(known.nvrtc.begin(), known.nvrtc.end());
  for (const char* folder : known.toolkits) {
    for (std::string& name : libraries_below(folder)) names.push_back(std::move(name));
  }
  return names;
}

/// Why a library cannot be taken; empty where it can, or is no NVRTC, which load_api() says.
std::string too_old(void* library, const std::string& name) {
  const auto version =
      reinterpret_cast<decltype(&::nvrtcVersion)>(flashjit::find_symbol(library, "nvrtcVersion"));
  int major = 0, minor = 0;
  if (!version || version(&major, &minor) != NVRTC_SUCCESS || major * 100 + minor >= kOldestVersion)
    return {};
  return fmt::format("{} is NVRTC {}.{}, which is too old", quoted(name), major, minor);
}

void* open_compiler(const std::string& given) {
  std::string causes;
  for (const std::string& name : candidates(given)) {
    // Its LLVM must not meet another one in the process.
    const auto [library, problem] = flashjit::open_library(name);
    const std::string cause = library ? too_old(library, name) : problem;
    if (cause.empty()) return library;
    causes += fmt::format("{}{}", causes.empty() ? "" : "; ", cause);
  }
  if (causes.empty())
    causes = fmt::format("no {} in {}", fmt::join(library_names().nvrtc, " or "), quoted(given));
  throw Error(ErrorCode::no_compiler,
              fmt::format("NVRTC cannot be opened ({}); {}", causes, install_advice()));
}

/// NVRTC opens its built-in functions by their bare file name, which the loader does not look for next to it,
/// but finds when they are loaded already. Where they are not next to it, its own search has to find them.
void open_builtins(const std::string& library, int major, int minor) {
  flashjit::open_library((path_of(library).parent_path() / nvrtc_builtins_name(major, minor)).string());
}

/// One NVRTC program; destroyed with this object.
class Program {
 public:
  Program(const Api& api, const std::string& text, const std::vector<Header>& headers) : api_(api) {
    std::vector<const char*> texts, names;
    for (const Header& header : headers) {
      texts.push_back(header.text.c_str());
      names.push_back(header.name.c_str());
    }
    const nvrtcResult result = api_.create_program(
        &program_, text.c_str(), "flashjit.cu", static_cast<int>(headers.size()), texts.data(), names.data());
    if (result != NVRTC_SUCCESS) {
      throw Error(ErrorCode::compile_failed,
                  fmt::format("NVRTC could not create a program: {}; this is usually a lack of memory",
                              api_.get_error_string(result)));
    }
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;
  ~Program() { api_.destroy_program(&program_); }

  nvrtcResult compile(const std::vector<std::string>& options) {
    std::vector<const char*> arguments;
    arguments.reserve(options.size());
    for (const std::string& option : options) arguments.push_back(option.c_str());
    return api_.compile_program(program_, static_cast<int>(arguments.size()), arguments.data());
  }
  /// NVRTC counts the closing zero of texts.
  std::string log() const { return without_zero(fetch(api_.get_log_size, api_.get_log)); }
  std::string ptx() const { return without_zero(fetch(api_.get_ptx_size, api_.get_ptx)); }
  std::string cubin() const { return fetch(api_.get_cubin_size, api_.get_cubin); }

 private:
  template <class GetSize, class Get>
  std::string fetch(GetSize get_size, Get get) const {
    std::size_t size = 0;
    if (get_size(program_, &size) != NVRTC_SUCCESS || size == 0) return {};
    std::string bytes(size, '\0');
    return get(program_, bytes.data()) == NVRTC_SUCCESS ? bytes : std::string();
  }
  static std::string without_zero(std::string text) {
    while (!text.empty() && text.back() == '\0') text.pop_back();
    return text;
  }

  const Api& api_;
  nvrtcProgram program_ = nullptr;
};

std::string first_error_line(const std::string& log) {
  for (const std::string_view line : split(log, '\n')) {
    if (line.find("error") != line.npos) return std::string(line);
  }
  return log.empty() ? "its log is empty" : std::string(split(log, '\n').front());
}

/// A static member of Params that the code reads: one that the kernel lacks, for which NVRTC makes a variable
/// of zeros. Lines that only declare such a variable do not count. Empty: none.
std::string_view read_of_lacking_member(std::string_view ptx) {
  constexpr std::string_view kMembers = "_ZN8flashjit6Params";
  for (std::size_t at = ptx.find(kMembers); at != ptx.npos; at = ptx.find(kMembers, at + 1)) {
    const std::size_t line = ptx.rfind('\n', at) + 1;
    if (!ptx.substr(line).starts_with(".global "))
      return ptx.substr(at, ptx.find_first_of("];+, \n", at) - at);
  }
  return {};
}

/// "13.0.88" from the comment "// Cuda compilation tools, release 13.0, V13.0.88"; nvrtcVersion() has no
/// build.
std::string full_version(const Api& api, int major, int minor) {
  Program empty(api, "", {});
  empty.compile({});
  const std::string ptx = empty.ptx();
  const std::string release = fmt::format("V{}.{}.", major, minor);
  const std::size_t begin = ptx.find(release);
  const std::size_t end =
      ptx.find_first_not_of("0123456789", begin == ptx.npos ? begin : begin + release.size());
  if (begin == ptx.npos || end == ptx.npos) return fmt::format("{}.{}", major, minor);
  return ptx.substr(begin + 1, end - begin - 1);
}

/// 90 of "sm_90a"; 0 when it is no architecture.
int arch_number(std::string_view arch) {
  if (!arch.starts_with("sm_")) return 0;
  arch.remove_prefix(3);
  if (arch.ends_with('a') || arch.ends_with('f')) arch.remove_suffix(1);
  int number = 0;
  const auto result = std::from_chars(arch.data(), arch.data() + arch.size(), number);
  return result.ec == std::errc() && result.ptr == arch.data() + arch.size() ? number : 0;
}

/// For the virtual architecture, which leaves nothing for ptxas to do.
KernelSource without_ptxas(KernelSource source) {
  source.arch.replace(0, std::string_view("sm").size(), "compute");
  return source;
}

}  // namespace

struct Compiler::Impl {
  Api api{};
  std::string path, tag;
  int version = 0;             // 1209 is 12.9
  std::vector<int> supported;  // 75, 80, ...

  void check_arch(const std::string& arch) const {
    if (std::find(supported.begin(), supported.end(), arch_number(arch)) != supported.end()) return;
    throw Error(
        ErrorCode::compile_failed,
        fmt::format("{} cannot compile for {}; it can for sm_{}; use another architecture or another NVRTC "
                    "(FLASHJIT_NVRTC)",
                    tag, quoted(arch), fmt::join(supported, ", sm_")));
  }

  // From 12.9 on NVRTC keeps a cache of its own, and answers from it without ptxas's report.
  std::vector<std::string> with_own_cache_off(std::vector<std::string> options) const {
    if (version >= kFullVersion) options.emplace_back("--no-cache");
    return options;
  }

  /// The source with all its entries, or with the entries of one of its programs. Throws with the log.
  std::unique_ptr<Program> compile(const KernelSource& source, int number = 0,
                                   const std::vector<std::string>& more_options = {}) const {
    auto program = std::make_unique<Program>(api, source.text, source.headers);
    std::vector<std::string> options = with_own_cache_off(compile_options(source.arch));
    options.insert(options.end(), more_options.begin(), more_options.end());
    if (number > 0) options.push_back(fmt::format("--define-macro={}={}", kProgramMacro, number));
    const nvrtcResult result = program->compile(options);
    if (result == NVRTC_SUCCESS) return program;
    const std::string log = program->log();
    throw Error(
        ErrorCode::compile_failed,
        fmt::format("{} could not compile {} with {} for {}: {}: {}; the error's detail has the whole log",
                    tag, to_string(source.spec), to_string(source.config), source.arch,
                    api.get_error_string(result), first_error_line(log)),
        log);
  }
};

Compiler::Compiler() : impl_(std::make_unique<Impl>()) {}
Compiler::~Compiler() = default;

std::shared_ptr<const Compiler> Compiler::open(const std::string& library) {
  const std::string given = library.empty() ? read_environment().nvrtc : library;
  void* handle = open_compiler(given);
  std::shared_ptr<Compiler> compiler(new Compiler);
  Impl& impl = *compiler->impl_;
  impl.path = file_with(flashjit::find_symbol(handle, "nvrtcVersion"));
  impl.api = load_api(handle, impl.path.empty() ? given : impl.path);

  int major = 0, minor = 0, count = 0;
  impl.api.version(&major, &minor);
  open_builtins(impl.path, major, minor);
  impl.version = major * 100 + minor;
  impl.tag = "nvrtc" + full_version(impl.api, major, minor);
  impl.api.get_num_supported_archs(&count);
  impl.supported.resize(static_cast<std::size_t>(count));
  impl.api.get_supported_archs(impl.supported.data());
  return compiler;
}

const std::string& Compiler::tag() const { return impl_->tag; }
const std::string& Compiler::path() const { return impl_->path; }

std::vector<std::string> Compiler::architectures() const {
  std::vector<std::string> names;
  for (const int number : impl_->supported) {
    names.push_back(fmt::format("sm_{}", number));
    if (number >= 90) names.push_back(fmt::format("sm_{}a", number));
  }
  return names;
}

CompiledKernel Compiler::compile(const KernelSource& source) const {
  impl_->check_arch(source.arch);
  const auto begin = std::chrono::steady_clock::now();
  std::vector<std::future<std::unique_ptr<Program>>> others;
  for (int number = 2; number <= program_count(source.entries); ++number)
    others.push_back(std::async([&, number] { return impl_->compile(source, number); }));
  CompiledKernel kernel{.cubin = {}, .log = {}, .compiler = tag()};
  const auto add = [&](const Program& program) {
    const std::string image = program.cubin();
    kernel.cubin += image;
    kernel.log += program.log();
    if (image.empty())
      throw Error(ErrorCode::compile_failed,
                  fmt::format("{} gave no machine code for {}", tag(), source.arch), kernel.log);
    const std::string ptx = program.ptx();
    if (const std::string_view member = read_of_lacking_member(ptx); !member.empty())
      throw Error(
          ErrorCode::internal,
          fmt::format("a kernel of {} with {} reads {}, which runtime/plan/params_layout.cpp does not "
                      "give it",
                      to_string(source.spec), to_string(source.config), member));
  };
  add(*impl_->compile(source, others.empty() ? 0 : 1));
  for (auto& other : others) add(*other.get());
  kernel.resources = parse_ptxas_log(kernel.log);
  kernel.compile_ms =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  return kernel;
}

std::string Compiler::ptx(const KernelSource& source) const {
  impl_->check_arch(source.arch);
  return impl_->compile(without_ptxas(source))->ptx();
}

void Compiler::check(const KernelSource& source) const {
  impl_->check_arch(source.arch);
  // Not --device-debug: once it was given, NVRTC optimises less for the rest of the process.
  std::vector<std::string> front_end;
  if (impl_->version >= kFullVersion) front_end.emplace_back("--fdevice-syntax-only");
  impl_->compile(without_ptxas(source), 0, front_end);
}

std::vector<std::string> compile_options(const std::string& arch) {
  return {
      "--gpu-architecture=" + arch,
      "--std=c++20",
      // For constexpr functions of layouts, which the host includes too.
      "-default-device",
      // Registers, spills and shared memory in the log.
      "--ptxas-options=-v",
      // The default changes the limit of the whole process.
      "--modify-stack-limit=false",
  };
}

}  // namespace flashjit::compile
