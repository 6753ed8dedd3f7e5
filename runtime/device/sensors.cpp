#include "device/sensors.hpp"

#include "support/libraries.hpp"

namespace flashjit::device {
namespace {

// As nvml.h declares them, which is not among the headers that CUDA's wheels bring.
using NvmlDevice = struct nvmlDevice_st*;
constexpr int kSuccess = 0, kTemperatureOfGpu = 0, kClockOfSms = 1;

}  // namespace

struct Sensors::Nvml {
  int (*init)() = nullptr;
  int (*shutdown)() = nullptr;
  int (*handle_by_bus_id)(const char*, NvmlDevice*) = nullptr;
  int (*temperature)(NvmlDevice, int, unsigned*) = nullptr;
  int (*clock)(NvmlDevice, int, unsigned*) = nullptr;
  int (*reasons)(NvmlDevice, unsigned long long*) = nullptr;
  NvmlDevice device = nullptr;

  /// Whether the library has all of them.
  bool load(const std::string& library) {
    void* const handle = open_library(library).handle;  // what it holds, shutdown() gives back
    if (!handle) return false;
    const auto resolve = [&]<class Function>(Function& function, const char* name) {
      function = reinterpret_cast<Function>(find_symbol(handle, name));
      return function != nullptr;
    };
    // The last by the name that all drivers have; newer ones call it ...ClocksEventReasons, too.
    return resolve(init, "nvmlInit_v2") && resolve(shutdown, "nvmlShutdown") &&
           resolve(handle_by_bus_id, "nvmlDeviceGetHandleByPciBusId_v2") &&
           resolve(temperature, "nvmlDeviceGetTemperature") && resolve(clock, "nvmlDeviceGetClockInfo") &&
           resolve(reasons, "nvmlDeviceGetCurrentClocksThrottleReasons");
  }

  std::optional<int> ask(int (*function)(NvmlDevice, int, unsigned*), int which) const {
    unsigned value = 0;
    if (function(device, which, &value) != kSuccess) return {};
    return static_cast<int>(value);
  }
};

Sensors::Sensors(const std::string& pci_bus_id, const std::string& library) {
  auto nvml = std::make_unique<Nvml>();
  if (!nvml->load(library.empty() ? library_names().nvml : library) || nvml->init() != kSuccess) return;
  if (nvml->handle_by_bus_id(pci_bus_id.c_str(), &nvml->device) == kSuccess)
    nvml_ = std::move(nvml);
  else
    nvml->shutdown();
}

Sensors::~Sensors() {
  if (nvml_) nvml_->shutdown();
}

GpuState Sensors::read() const {
  if (!nvml_) return {};
  unsigned long long reasons = 0;
  const bool known = nvml_->reasons(nvml_->device, &reasons) == kSuccess;
  return {nvml_->ask(nvml_->clock, kClockOfSms), nvml_->ask(nvml_->temperature, kTemperatureOfGpu),
          known ? reasons : 0};
}

}  // namespace flashjit::device
