// flashjit doctor: what flashjit finds on this machine, what is missing, and what to do about it.
#include "doctor.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <memory>
#include <set>
#include <string_view>

#include "build.hpp"
#include "cache/folders.hpp"
#include "disassembler.hpp"
#include "gpu.hpp"
#include "support/environment.hpp"
#include "support/file.hpp"
#include "support/paths.hpp"
#include "support/text.hpp"
#include "system.hpp"
#include "tools/parts/expectations.hpp"

namespace flashjit::command {
namespace {

enum class Verdict : std::uint8_t { good, note, missing };

std::string to_string(Verdict verdict) {
  return verdict == Verdict::good ? "ok" : verdict == Verdict::note ? "note" : "missing";
}

/// One thing looked at. A text that is no "ok" says what to do.
struct Finding {
  std::string subject;
  Verdict state;
  std::string text;
};

/// What the findings amount to: which architectures can be run and how kernels for them come about.
struct Examination {
  std::vector<Finding> findings;
  std::vector<DeviceInfo> devices;
  std::vector<std::string> compiles;  ///< architectures; empty without NVRTC or with FLASHJIT_JIT=off
  std::set<std::string> stored;       ///< architectures of kernels in packs and cache

  void add(std::string subject, Verdict state, std::string text) {
    findings.push_back({std::move(subject), state, std::move(text)});
  }
};

constexpr int kOldestComputeCapability = 75;

void examine_driver(Examination& found) {
  try {
    const std::shared_ptr<const device::Driver> driver = chosen_driver();
    found.add("driver", Verdict::good,
              fmt::format("{}, CUDA {}", driver->path, cuda_version_text(driver->version)));
    const int count = device::device_count(*driver);
    for (int ordinal = 0; ordinal < count; ++ordinal) {
      CUdevice device = 0;
      std::size_t memory = 0;
      driver->check(driver->device_get(&device, ordinal), "cuDeviceGet");
      driver->check(driver->device_total_mem(&memory, device), "cuDeviceTotalMem");
      const DeviceInfo info = device::query_device(*driver, device);
      const std::string text = fmt::format("{}, {}, {}, {} multiprocessors", info.name, info.arch,
                                           format_bytes(memory), info.multiprocessors);
      const bool able = info.compute_capability >= kOldestComputeCapability;
      found.add(fmt::format("device {}", ordinal), able ? Verdict::good : Verdict::missing,
                able ? text : text + ": too old, kernels need compute capability 7.5 or newer");
      if (able) found.devices.push_back(info);
    }
    if (count == 0)
      found.add("device", Verdict::missing,
                "the driver finds no GPU; see nvidia-smi and CUDA_VISIBLE_DEVICES");
  } catch (const Error& error) {
    found.add(error.code() == ErrorCode::no_device ? "device" : "driver", Verdict::missing, error.message());
  }
}

/// What each GPU gets, by the estimate of the tuner's model.
void examine_expectations(Examination& found) {
  for (std::size_t ordinal = 0; ordinal < found.devices.size(); ++ordinal)
    for (const Expectation& expectation : expectations_of(found.devices[ordinal]))
      found.add(fmt::format("attention {}", ordinal), Verdict::good, to_string(expectation));
}

void examine_compiler(Examination& found) {
  try {
    const std::shared_ptr<const compile::Compiler> compiler = chosen_compiler();
    const std::vector<std::string> architectures = compiler->architectures();
    found.add(
        "NVRTC", Verdict::good,
        fmt::format("{}, {}, for {}", compiler->path(), compiler->tag(), fmt::join(architectures, " ")));
    if (read_environment().jit)
      found.compiles = architectures;
    else
      found.add("JIT", Verdict::note,
                "FLASHJIT_JIT=off: only packs and the cache are used; set it to on to compile");
  } catch (const Error& error) {
    found.add("NVRTC", Verdict::missing, error.message());
  }
}

void examine_templates(Examination& found) {
  const std::string folder = read_environment().template_dir;
  try {
    const std::size_t count = chosen_templates().all().size();
    found.add("templates", folder.empty() ? Verdict::good : Verdict::note,
              folder.empty() ? fmt::format("{}, embedded", count)
                             : fmt::format("{}, from '{}' by FLASHJIT_TEMPLATE_DIR", count, folder));
  } catch (const Error& error) {
    found.add("templates", Verdict::missing, error.message());
  }
}

/// Sound and damaged kernels of a folder, in words; remembers the architectures of the sound ones.
std::string count_kernels(Examination& found, const std::filesystem::path& folder) {
  std::size_t sound = 0, damaged = 0;
  std::uintmax_t bytes = 0;
  std::set<std::string> architectures;
  for (const cache::EntryInfo& entry : cache::Store(folder, cache::Store::Access::read_only).list()) {
    bytes += entry.bytes;
    if (!entry.damage.empty()) {
      ++damaged;
      continue;
    }
    ++sound;
    architectures.insert(entry.arch);
    found.stored.insert(entry.arch);
  }
  std::string text = fmt::format("'{}', {} kernels{}{}, {}", folder.string(), sound, sound > 0 ? " for " : "",
                                 fmt::join(architectures, " "), format_bytes(bytes));
  if (damaged > 0)
    text += fmt::format("; {} damaged ones are not used: `flashjit cache verify --repair --dir '{}'`",
                        damaged, folder.string());
  return text;
}

void examine_folders(Examination& found) {
  const Environment environment = read_environment();
  if (environment.cache_dir.empty())
    found.add("cache", Verdict::note,
              fmt::format("no folder: {} is not set; kernels are compiled in every process until "
                          "FLASHJIT_CACHE_DIR is set",
                          cache_places().back().variable));
  else if (const std::string cause = cache::why_foreign(path_of(environment.cache_dir)); !cause.empty())
    found.add(
        "cache", Verdict::note,
        cause +
            "; it is not used, and kernels are kept in memory only: set FLASHJIT_CACHE_DIR to a folder of "
            "your own that only you can write");
  else if (!can_keep_files(path_of(environment.cache_dir)))
    found.add("cache", Verdict::note,
              count_kernels(found, path_of(environment.cache_dir)) +
                  "; it cannot be written, so new kernels are kept in memory only: set "
                  "FLASHJIT_CACHE_DIR to a folder of yours");
  else
    found.add("cache", Verdict::good,
              count_kernels(found, path_of(environment.cache_dir)) + ", can be written");
  for (const std::string& pack : environment.packs) {
    std::error_code problem;
    const bool there = std::filesystem::is_directory(path_of(pack), problem);
    found.add("pack", there ? Verdict::good : Verdict::missing,
              there ? count_kernels(found, path_of(pack))
                    : fmt::format("'{}' is no folder; correct FLASHJIT_PACKS", pack));
  }
}

/// Variables that the Python package alone reads, which starts this command.
constexpr std::array<std::string_view, 3> kReadByPython = {"FLASHJIT_COMMAND", "FLASHJIT_FRONT",
                                                           "FLASHJIT_LIBRARY"};

void examine_variables(Examination& found) {
  const auto known = environment_variables();
  for (const auto& [name, value] : variables_with_prefix("FLASHJIT_")) {
    std::string text = flashjit::quoted(value);
    if (std::ranges::find(kReadByPython, name) != kReadByPython.end())
      text += ", for the Python package";
    else if (std::ranges::find(known, name, &EnvironmentVariable::name) == known.end())
      text += ", but flashjit reads no such variable";
    found.add(name, Verdict::note, text);
  }
}

/// Empty when kernels can run here, else why not.
std::string why_not(const Examination& found) {
  if (found.devices.empty())
    return "there is no usable GPU; without one flashjit packs, inspects and runs the CPU reference";
  for (const DeviceInfo& device : found.devices)
    if (found.stored.contains(device.arch) ||
        std::ranges::find(found.compiles, device.arch) != found.compiles.end())
      return {};
  return fmt::format(
      "nothing compiles for {} and no pack or cache holds a kernel for it; install NVRTC or set "
      "FLASHJIT_PACKS",
      found.devices.front().arch);
}

Examination examine() {
  Examination found;
  examine_driver(found);
  examine_expectations(found);
  examine_compiler(found);
  examine_templates(found);
  examine_folders(found);
  const std::optional<std::string> disassembler = find_disassembler();
  found.add("disassembler", disassembler ? Verdict::good : Verdict::note,
            disassembler ? *disassembler : "none; `flashjit inspect --sass` needs cuobjdump or nvdisasm");
  examine_variables(found);
  return found;
}

Json json_of_findings(const std::vector<Finding>& all) {
  Json findings = Json::array();
  for (const Finding& finding : all)
    findings.push_back(
        {{"subject", finding.subject}, {"state", to_string(finding.state)}, {"text", finding.text}});
  return findings;
}

int doctor(bool json) {
  const Examination found = examine();
  const std::string reason = why_not(found);
  if (json) {
    print_json({{"version", library_version()},
                {"kernels_can_run", reason.empty()},
                {"reason", reason},
                {"findings", json_of_findings(found.findings)}});
  } else {
    fmt::print("flashjit {}\n", library_version());
    for (const Finding& finding : found.findings)
      fmt::print("  {:<8} {:<14} {}\n", to_string(finding.state), finding.subject, finding.text);
    fmt::print("{}\n", reason.empty() ? "Kernels can run here." : "Kernels cannot run here: " + reason + ".");
  }
  return reason.empty() ? kOk : kLacking;
}

}  // namespace

Json findings_json() { return json_of_findings(examine().findings); }

void add_doctor(CLI::App& app, Context& context) {
  add_subcommand(app, context, "doctor",
                 "Say what is here, what is missing and what to do; exit code 0 when kernels can run, else 3",
                 "flashjit doctor --json", [&context] { return doctor(context.json); });
}

}  // namespace flashjit::command
