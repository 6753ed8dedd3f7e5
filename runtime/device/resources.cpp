#include "device/resources.hpp"

#include <fmt/format.h>

namespace flashjit::device {

PrimaryContext::PrimaryContext(std::shared_ptr<const Driver> driver, int ordinal)
    : driver_(std::move(driver)) {
  int count = 0;
  driver_->check(driver_->device_get_count(&count), "cuDeviceGetCount");
  if (ordinal < 0 || ordinal >= count)
    throw Error(
        ErrorCode::no_device,
        fmt::format("There is no CUDA device {}: this machine has {}, counted from 0.", ordinal, count));
  driver_->check(driver_->device_get(&device_, ordinal), "cuDeviceGet");
  driver_->check(driver_->device_primary_ctx_retain(&context_, device_), "cuDevicePrimaryCtxRetain");
  const CUresult result = driver_->ctx_set_current(context_);
  if (result != CUDA_SUCCESS) {
    driver_->device_primary_ctx_release(device_);
    driver_->check(result, "cuCtxSetCurrent");
  }
}

PrimaryContext::~PrimaryContext() { driver_->device_primary_ctx_release(device_); }

DeviceBuffer::DeviceBuffer(std::shared_ptr<const Driver> driver, std::size_t bytes)
    : driver_(std::move(driver)), bytes_(bytes) {
  if (bytes_)
    driver_->check(driver_->mem_alloc(&address_, bytes_), fmt::format("Allocating {} bytes", bytes_));
}

DeviceBuffer::~DeviceBuffer() {
  if (address_) driver_->mem_free(address_);
}

void DeviceBuffer::swap(DeviceBuffer& other) noexcept {
  std::swap(driver_, other.driver_);
  std::swap(address_, other.address_);
  std::swap(bytes_, other.bytes_);
}

void DeviceBuffer::check_size(std::size_t bytes) const {
  if (bytes > bytes_)
    throw Error(ErrorCode::invalid_argument,
                fmt::format("A copy of {} bytes does not fit a device buffer of {}.", bytes, bytes_));
}

void DeviceBuffer::upload(const void* source, std::size_t bytes) {
  check_size(bytes);
  if (bytes) driver_->check(driver_->memcpy_htod(address_, source, bytes), "cuMemcpyHtoD");
}

void DeviceBuffer::download(void* target, std::size_t bytes) const {
  check_size(bytes);
  if (bytes) driver_->check(driver_->memcpy_dtoh(target, address_, bytes), "cuMemcpyDtoH");
}

void DeviceBuffer::fill(std::uint8_t byte) {
  if (bytes_) driver_->check(driver_->memset_d8(address_, byte, bytes_), "cuMemsetD8");
}

StreamOwner::StreamOwner(std::shared_ptr<const Driver> driver) : driver_(std::move(driver)) {
  driver_->check(driver_->stream_create(&stream_, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
}

StreamOwner::~StreamOwner() { driver_->stream_destroy(stream_); }

Event::Event(std::shared_ptr<const Driver> driver) : driver_(std::move(driver)) {
  driver_->check(driver_->event_create(&event_, CU_EVENT_DEFAULT), "cuEventCreate");
}

Event::~Event() { driver_->event_destroy(event_); }

double Event::ms_since(const Event& start) const {
  float ms = 0;
  driver_->check(driver_->event_elapsed_time(&ms, start.event_, event_), "cuEventElapsedTime");
  return ms;
}

}  // namespace flashjit::device
