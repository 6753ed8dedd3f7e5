// The GPUs that are known without one: DeviceInfo::parse().
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <vector>

#include "flashjit/error.hpp"
#include "flashjit/spec.hpp"
#include "support/text.hpp"

namespace flashjit {
namespace {

struct KnownDevice {
  std::string_view arch;
  int compute_capability, multiprocessors, shared_per_block, shared_per_sm, l2_mebibytes;
};

constexpr int kRegistersPerSm = 65536;

// One common product per architecture: T4, A100, A40, RTX 4090, H100, B200, RTX 5090, GB10 (DGX Spark).
constexpr KnownDevice kKnownDevices[] = {
    {"sm_75", 75, 40, 65536, 65536, 4},        {"sm_80", 80, 108, 166912, 167936, 40},
    {"sm_86", 86, 84, 101376, 102400, 6},      {"sm_89", 89, 128, 101376, 102400, 72},
    {"sm_90", 90, 132, 232448, 233472, 50},    {"sm_90a", 90, 132, 232448, 233472, 50},
    {"sm_100", 100, 148, 232448, 233472, 126}, {"sm_100a", 100, 148, 232448, 233472, 126},
    {"sm_120", 120, 170, 101376, 102400, 96},  {"sm_120a", 120, 170, 101376, 102400, 96},
    {"sm_121", 121, 48, 101376, 102400, 24},
};

}  // namespace

std::string to_string(const DeviceInfo& device) { return device.arch; }

DeviceInfo DeviceInfo::parse(std::string_view arch) {
  std::vector<std::string_view> names;
  for (const KnownDevice& known : kKnownDevices) {
    names.push_back(known.arch);
    if (known.arch != arch) continue;
    DeviceInfo out;
    out.name = out.arch = arch;
    out.compute_capability = known.compute_capability;
    out.multiprocessors = known.multiprocessors;
    out.shared_per_block = known.shared_per_block;
    out.shared_per_sm = known.shared_per_sm;
    out.registers_per_sm = kRegistersPerSm;
    out.l2_bytes = std::int64_t{known.l2_mebibytes} << 20;
    return out;
  }
  throw Error(ErrorCode::invalid_argument, fmt::format("the architecture is {}; it must be one of: {}",
                                                       quoted(arch), fmt::join(names, ", ")));
}

}  // namespace flashjit
