#include "device/device_info.hpp"

#include <fmt/format.h>

#include "support/text.hpp"

namespace flashjit::device {
namespace {

[[noreturn]] void no_context() {
  throw Error(ErrorCode::no_device,
              "No CUDA context is current on this thread, and flashjit creates none. Make one current first: "
              "cuCtxSetCurrent, or any call of the CUDA runtime such as cudaSetDevice.");
}

}  // namespace

std::string arch_of(int compute_capability) {
  return fmt::format("sm_{}{}", compute_capability, compute_capability == 90 ? "a" : "");
}

DeviceInfo query_device(const Driver& driver, CUdevice device) {
  const auto attribute = [&](CUdevice_attribute which) {
    int value = 0;
    driver.check(driver.device_get_attribute(&value, which, device), "cuDeviceGetAttribute");
    return value;
  };
  char name[256] = {};
  driver.check(driver.device_get_name(name, sizeof name - 1, device), "cuDeviceGetName");

  DeviceInfo info;
  info.name = name;
  info.compute_capability = 10 * attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) +
                            attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  info.arch = arch_of(info.compute_capability);
  info.multiprocessors = attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  info.shared_per_block = attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
  info.shared_per_sm = attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);
  info.registers_per_sm = attribute(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR);
  info.l2_bytes = attribute(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
  info.driver = cuda_version_text(driver.version);
  return info;
}

int device_count(const Driver& driver) {
  int count = 0;
  driver.check(driver.device_get_count(&count), "cuDeviceGetCount");
  return count;
}

std::string pci_bus_id(const Driver& driver, CUdevice device) {
  char id[32] = {};
  driver.check(driver.device_get_pci_bus_id(id, sizeof id, device), "cuDeviceGetPCIBusId");
  return id;
}

CUdevice current_device(const Driver& driver) {
  CUdevice device = 0;
  const CUresult result = driver.ctx_get_device(&device);
  if (result == CUDA_ERROR_INVALID_CONTEXT) no_context();
  driver.check(result, "cuCtxGetDevice");
  return device;
}

const DeviceInfo& DeviceTable::info(const Driver& driver, CUdevice device) {
  const std::lock_guard lock(mutex_);
  const auto found = known_.find(device);
  if (found != known_.end()) return found->second;
  return known_.emplace(device, query_device(driver, device)).first->second;
}

}  // namespace flashjit::device
