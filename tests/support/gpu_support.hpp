// What the GPU tests share: the device or the reason why there is none, buffers, and tensors of 16-bit
// elements.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "device/device_info.hpp"
#include "device/resources.hpp"
#include "flashjit/flashjit.hpp"
#include "support/dtypes.hpp"
#include "support/environment.hpp"

namespace flashjit::test {

/// The GPU of a test program: device 0, its primary context current on the thread that asked first.
struct Gpu {
  std::unique_ptr<device::PrimaryContext> context;  ///< null: no GPU
  DeviceInfo info;
  std::string missing;  ///< why there is none

  const std::shared_ptr<const device::Driver>& driver() const { return context->driver(); }
};

/// Opened on the first use, once a program.
inline const Gpu& gpu() {
  static const Gpu opened = [] {
    Gpu gpu;
    try {
      gpu.context =
          std::make_unique<device::PrimaryContext>(device::Driver::open(read_environment().libcuda));
      gpu.info = device::query_device(*gpu.driver(), gpu.context->device());
    } catch (const Error& error) {
      gpu.context.reset();
      gpu.missing = error.message();
    }
    return gpu;
  }();
  return opened;
}

/// Skips without a GPU; makes its context current otherwise.
template <class Test>
class OnGpu : public Test {
 protected:
  void SetUp() override {
    if (!gpu().context) GTEST_SKIP() << "no GPU: " << gpu().missing;
    gpu().context->make_current();
  }
};
using GpuTest = OnGpu<testing::Test>;
template <class Parameter>
using GpuTestWith = OnGpu<testing::TestWithParam<Parameter>>;

/// The type that a family's test has: tensor cores of sm_75 multiply no bf16.
inline DType dtype_for(Family family, DType dtype) {
  return family == Family::sm75 && dtype == DType::bf16 ? DType::fp16 : dtype;
}
inline KernelSpec spec_for(Family family, std::string_view text) {
  KernelSpec spec = parse_spec(text);
  spec.dtype = dtype_for(family, spec.dtype);
  return spec;
}

inline device::DeviceBuffer device_bytes(std::size_t bytes) { return {gpu().driver(), bytes}; }

template <class T>
device::DeviceBuffer to_device(const std::vector<T>& values) {
  return device::upload(gpu().driver(), values);
}

/// Values as the bytes of `dtype`, rounded to nearest even.
inline std::vector<std::uint8_t> encode(DType dtype, const std::vector<double>& values) {
  std::vector<std::uint8_t> bytes(values.size() * size_of(dtype));
  for (std::size_t i = 0; i < values.size(); ++i)
    dtype_info(dtype).encode(values[i], &bytes[i * size_of(dtype)]);
  return bytes;
}

inline std::vector<double> decode(DType dtype, const std::vector<std::uint8_t>& bytes) {
  std::vector<double> values(bytes.size() / size_of(dtype));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = dtype_info(dtype).decode(&bytes[i * size_of(dtype)]);
  return values;
}

inline device::DeviceBuffer to_device(DType dtype, const std::vector<double>& values) {
  return to_device(encode(dtype, values));
}
inline std::vector<double> from_device(DType dtype, const device::DeviceBuffer& buffer) {
  return decode(dtype, device::download<std::uint8_t>(buffer));
}

/// A buffer in which every element is NaN, whatever its type: what a kernel leaves unwritten shows.
inline device::DeviceBuffer poisoned(std::size_t bytes) {
  device::DeviceBuffer buffer = device_bytes(bytes);
  buffer.fill(0xff);
  return buffer;
}

}  // namespace flashjit::test
