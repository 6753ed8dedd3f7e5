// An NVML that can be opened: it knows the GPUs of the fake driver and lets them heat.
#include "tests/fake/nvml.hpp"

#include <algorithm>
#include <string_view>

namespace {

using flashjit::test::FakeNvml;

constexpr int kSuccess = 0, kUninitialized = 1, kNotSupported = 3, kNotFound = 6;
constexpr int kStepMhz = 15, kStepCelsius = 2;

FakeNvml& state() {
  static FakeNvml fake;
  return fake;
}

}  // namespace

#define FAKE_NVML extern "C" __attribute__((visibility("default")))

FAKE_NVML FakeNvml* flashjit_fake_nvml() { return &state(); }

FAKE_NVML int nvmlInit_v2() {
  if (!state().starts) return kUninitialized;
  ++state().in_use;
  return kSuccess;
}

FAKE_NVML int nvmlShutdown() {
  --state().in_use;
  return kSuccess;
}

FAKE_NVML int nvmlDeviceGetHandleByPciBusId_v2(const char* bus_id, void** device) {
  const std::string_view id = bus_id;
  if (id != "FA4E:01:00.0" && id != "FA4E:02:00.0") return kNotFound;
  *device = &state();
  return kSuccess;
}

FAKE_NVML int nvmlDeviceGetTemperature(void* device, int sensor, unsigned* celsius) {
  FakeNvml& fake = *static_cast<FakeNvml*>(device);
  if (!fake.knows_temperature || sensor != 0) return kNotSupported;
  *celsius = static_cast<unsigned>(fake.celsius);
  fake.celsius = std::min(fake.celsius + kStepCelsius, fake.last_celsius);
  return kSuccess;
}

FAKE_NVML int nvmlDeviceGetClockInfo(void* device, int clock, unsigned* mhz) {
  FakeNvml& fake = *static_cast<FakeNvml*>(device);
  if (!fake.knows_clock || clock != 1) return kNotSupported;
  *mhz = static_cast<unsigned>(fake.clock_mhz);
  fake.clock_mhz = std::max(fake.clock_mhz - kStepMhz, fake.last_clock_mhz);
  return kSuccess;
}

FAKE_NVML int nvmlDeviceGetCurrentClocksThrottleReasons(void* device, unsigned long long* reasons) {
  const FakeNvml& fake = *static_cast<FakeNvml*>(device);
  if (!fake.knows_reasons) return kNotSupported;
  *reasons = fake.reasons;
  return kSuccess;
}
