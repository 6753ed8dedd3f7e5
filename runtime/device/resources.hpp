// Owners of device things for the tools, the tuner and the tests. The Runtime itself owns none of them.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "device/driver.hpp"

namespace flashjit::device {

/// A context of a device that someone keeps alive.
class Context {
 public:
  Context(std::shared_ptr<const Driver> driver, CUdevice device, CUcontext context)
      : driver_(std::move(driver)), device_(device), context_(context) {}

  const std::shared_ptr<const Driver>& driver() const { return driver_; }
  CUdevice device() const { return device_; }
  CUcontext context() const { return context_; }
  /// Makes the context current on the calling thread.
  void make_current() const { driver_->check(driver_->ctx_set_current(context_), "cuCtxSetCurrent"); }
  /// The same for a thread that from now on is as under ApartFromCaptures.
  void make_current_apart() const {
    make_current();
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    driver_->check(driver_->thread_exchange_stream_capture_mode(&mode), "cuThreadExchangeStreamCaptureMode");
  }
  void synchronize() const { driver_->check(driver_->ctx_synchronize(), "cuCtxSynchronize"); }

 private:
  std::shared_ptr<const Driver> driver_;
  CUdevice device_;
  CUcontext context_;
};

/// The calling thread's. Throws Error(no_device) when none is current.
Context current_context(const std::shared_ptr<const Driver>& driver);

/// The primary context of a device, current on the constructing thread. It is not popped: a program has one.
class PrimaryContext : public Context {
 public:
  /// Throws Error(no_device) when there is no device `ordinal`.
  explicit PrimaryContext(std::shared_ptr<const Driver> driver, int ordinal = 0);
  ~PrimaryContext();
  PrimaryContext(const PrimaryContext&) = delete;
  PrimaryContext& operator=(const PrimaryContext&) = delete;
};

/// Device memory, uninitialised; null when it has no bytes. Copies block until they are done; they are in
/// order with `stream`, where one is given, and touch no other.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(std::shared_ptr<const Driver> driver, std::size_t bytes, CUstream stream = nullptr);
  DeviceBuffer(DeviceBuffer&& other) noexcept { swap(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    DeviceBuffer moved(std::move(other));
    swap(moved);
    return *this;
  }
  ~DeviceBuffer();

  void* data() const { return reinterpret_cast<void*>(address_); }
  CUdeviceptr address() const { return address_; }
  std::size_t bytes() const { return bytes_; }

  /// From offset 0. Throws Error(invalid_argument) when the buffer is smaller.
  void upload(const void* source, std::size_t bytes);
  void download(void* target, std::size_t bytes) const;
  void fill(std::uint8_t byte);

 private:
  void swap(DeviceBuffer& other) noexcept;
  void check_size(std::size_t bytes) const;

  std::shared_ptr<const Driver> driver_;
  CUdeviceptr address_ = 0;
  std::size_t bytes_ = 0;
  CUstream stream_ = nullptr;
};

template <class T>
DeviceBuffer upload(std::shared_ptr<const Driver> driver, const std::vector<T>& values,
                    CUstream stream = nullptr) {
  DeviceBuffer buffer(std::move(driver), values.size() * sizeof(T), stream);
  buffer.upload(values.data(), buffer.bytes());
  return buffer;
}

template <class T>
std::vector<T> download(const DeviceBuffer& buffer) {
  std::vector<T> values(buffer.bytes() / sizeof(T));
  buffer.download(values.data(), values.size() * sizeof(T));
  return values;
}

class StreamOwner {
 public:
  explicit StreamOwner(std::shared_ptr<const Driver> driver);
  ~StreamOwner();
  StreamOwner(const StreamOwner&) = delete;
  StreamOwner& operator=(const StreamOwner&) = delete;

  CUstream get() const { return stream_; }
  void synchronize() const { driver_->check(driver_->stream_synchronize(stream_), "cuStreamSynchronize"); }

 private:
  std::shared_ptr<const Driver> driver_;
  CUstream stream_ = nullptr;
};

class Event {
 public:
  explicit Event(std::shared_ptr<const Driver> driver);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(CUstream stream) const {
    driver_->check(driver_->event_record(event_, stream), "cuEventRecord");
  }
  /// Lets the stream wait until the event has happened.
  void make_wait(CUstream stream) const {
    driver_->check(driver_->stream_wait_event(stream, event_, 0), "cuStreamWaitEvent");
  }
  void synchronize() const { driver_->check(driver_->event_synchronize(event_), "cuEventSynchronize"); }
  /// Milliseconds from `start` to this one; both must have happened.
  double ms_since(const Event& start) const;

 private:
  std::shared_ptr<const Driver> driver_;
  CUevent event_ = nullptr;
};

}  // namespace flashjit::device
