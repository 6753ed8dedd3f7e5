#include "device/resources.hpp"

#include <fmt/format.h>

#include "device/device_info.hpp"

namespace flashjit::device {

namespace {

Context retain(std::shared_ptr<const Driver> driver, int ordinal) {
  const int count = device_count(*driver);
  if (ordinal < 0 || ordinal >= count)
    throw Error(
        ErrorCode::no_device,
        fmt::format("There is no CUDA device {}: this machine has {}, counted from 0.", ordinal, count));
  CUdevice device = 0;
  CUcontext context = nullptr;
  driver->check(driver->device_get(&device, ordinal), "cuDeviceGet");
  driver->check(driver->device_primary_ctx_retain(&context, device), "cuDevicePrimaryCtxRetain");
  const CUresult result = driver->ctx_set_current(context);
  if (result != CUDA_SUCCESS) {
    driver->device_primary_ctx_release(device);
    driver->check(result, "cuCtxSetCurrent");
  }
  return {std::move(driver), device, context};
}

}  // namespace

Context current_context(const std::shared_ptr<const Driver>& driver) {
  const CUdevice device = current_device(*driver);
  CUcontext context = nullptr;
  driver->check(driver->ctx_get_current(&context), "cuCtxGetCurrent");
  return {driver, device, context};
}

PrimaryContext::PrimaryContext(std::shared_ptr<const Driver> driver, int ordinal)
    : Context(retain(std::move(driver), ordinal)) {}

PrimaryContext::~PrimaryContext() { driver()->device_primary_ctx_release(device()); }

DeviceBuffer::DeviceBuffer(std::shared_ptr<const Driver> driver, std::size_t bytes, CUstream stream)
    : driver_(std::move(driver)), bytes_(bytes), stream_(stream) {
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
  std::swap(stream_, other.stream_);
}

void DeviceBuffer::check_size(std::size_t bytes) const {
  if (bytes > bytes_)
    throw Error(ErrorCode::invalid_argument,
                fmt::format("A copy of {} bytes does not fit a device buffer of {}.", bytes, bytes_));
}

void DeviceBuffer::upload(const void* source, std::size_t bytes) {
  check_size(bytes);
  if (bytes == 0) return;
  if (!stream_) return driver_->check(driver_->memcpy_htod(address_, source, bytes), "cuMemcpyHtoD");
  driver_->check(driver_->memcpy_htod_async(address_, source, bytes, stream_), "cuMemcpyHtoDAsync");
  driver_->check(driver_->stream_synchronize(stream_), "cuStreamSynchronize");
}

void DeviceBuffer::download(void* target, std::size_t bytes) const {
  check_size(bytes);
  if (bytes) driver_->check(driver_->memcpy_dtoh(target, address_, bytes), "cuMemcpyDtoH");
}

void DeviceBuffer::fill(std::uint8_t byte) {
  if (bytes_ == 0) return;
  if (!stream_) return driver_->check(driver_->memset_d8(address_, byte, bytes_), "cuMemsetD8");
  driver_->check(driver_->memset_d8_async(address_, byte, bytes_, stream_), "cuMemsetD8Async");
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
