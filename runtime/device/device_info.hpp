// Facts about the GPUs of this machine.
#pragma once

#include <map>
#include <mutex>

#include "device/driver.hpp"
#include "flashjit/spec.hpp"

namespace flashjit::device {

/// What NVRTC should compile for: "sm_90a" for 9.0, whose own instructions need the suffix, else "sm_<cc>".
std::string arch_of(int compute_capability);

/// Asks the driver; costs microseconds.
DeviceInfo query_device(const Driver& driver, CUdevice device);

int device_count(const Driver& driver);

/// Where the device sits, as NVML and nvidia-smi name it: "0000:1B:00.0".
std::string pci_bus_id(const Driver& driver, CUdevice device);

/// The device of the current context. Throws Error(no_device) when no context is current.
CUdevice current_device(const Driver& driver);

/// Device facts, each asked for once. Safe from many threads.
class DeviceTable {
 public:
  /// The reference stays valid as long as the table.
  const DeviceInfo& info(const Driver& driver, CUdevice device);

 private:
  std::mutex mutex_;
  std::map<CUdevice, DeviceInfo> known_;
};

}  // namespace flashjit::device
