// A cubin in the driver: its entries as kernels that launch in whatever context is current.
#pragma once

#include <list>
#include <memory>
#include <span>
#include <vector>

#include "device/driver.hpp"
#include "render/kernel_source.hpp"

namespace flashjit::device {

/// The driver cannot use this machine code: damaged, or made by a newer CUDA. Another compiler's may do.
class CodeRefused : public Error {
  using Error::Error;
};

/// One image in the driver: a CUlibrary, which belongs to no context.
class LoadedImage {
 public:
  /// Throws CodeRefused when the driver refuses the image, Error(cuda) when it cannot load anything now, such
  /// such as for lack of memory.
  LoadedImage(std::shared_ptr<const Driver> driver, const std::string& image);
  ~LoadedImage();
  LoadedImage(const LoadedImage&) = delete;
  LoadedImage& operator=(const LoadedImage&) = delete;

  CUlibrary library() const { return library_; }

 private:
  std::shared_ptr<const Driver> driver_;
  CUlibrary library_ = nullptr;
};

/// Owns a kernel's images. They unload with it: a graph that captured one of its kernels must not outlive it.
class LoadedKernel {
 public:
  /// Throws as LoadedImage does, and CodeRefused when an entry is missing.
  LoadedKernel(std::shared_ptr<const Driver> driver, const std::string& cubin,
               std::vector<plan::Entry> entries);

  /// In the order of the family's entries.
  const std::vector<plan::Entry>& entries() const { return entries_; }
  CUkernel kernel(std::size_t entry) const { return kernels_[entry]; }

  /// Allows each entry its shared memory on `device`, the current context's, and has the driver load the code
  /// now, so that no later launch does, not even inside a graph capture. Throws Error(cuda).
  void make_ready(CUdevice device) const;

 private:
  /// Its program's, or the last that there is; null: there is none. Others are not asked: a tool that watches
  /// the driver would report each refusal as an error of the user's program.
  const LoadedImage* image_of(const plan::Entry& entry) const;

  std::shared_ptr<const Driver> driver_;
  std::vector<plan::Entry> entries_;
  std::list<LoadedImage> images_;
  std::vector<CUkernel> kernels_;
};

/// One launch on `stream`. `parameters` are the addresses of the kernel's parameters, which are copied; more
/// than it takes do no harm. An `early` one may start before the launch before it has ended (programmatic
/// dependent launch). Throws Error(cuda).
inline void launch(const Driver& driver, CUkernel kernel, unsigned blocks, unsigned threads,
                   unsigned shared_bytes, CUstream stream, std::span<void*> parameters, bool early = false) {
  CUlaunchConfig config{};
  config.gridDimX = blocks;
  config.gridDimY = config.gridDimZ = 1;
  config.blockDimX = threads;
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = shared_bytes;
  config.hStream = stream;
  CUlaunchAttribute attribute{};
  attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  attribute.value.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  constexpr int kGraphsHaveIt = 12030;  // older drivers refuse it while a stream is captured
  config.numAttrs = early && driver.version >= kGraphsHaveIt ? 1 : 0;
  // The driver takes a CUkernel in a CUfunction's place and finds the current context's function itself.
  driver.check(
      driver.launch_kernel_ex(&config, reinterpret_cast<CUfunction>(kernel), parameters.data(), nullptr),
      "cuLaunchKernelEx");
}

}  // namespace flashjit::device
