// libcuda, opened at run time: the one table of driver functions that flashjit calls. Nothing links libcuda.
#pragma once

#include <cuda.h>

#include <memory>
#include <string>
#include <string_view>

#include "flashjit/error.hpp"

namespace flashjit::device {

/// Member of Driver and the driver's function: all exist since CUDA 12.0, the oldest driver that flashjit
/// takes.
#define FLASHJIT_DRIVER_FUNCTIONS(X)                                        \
  X(init, cuInit)                                                           \
  X(driver_get_version, cuDriverGetVersion)                                 \
  X(get_error_name, cuGetErrorName)                                         \
  X(get_error_string, cuGetErrorString)                                     \
  X(device_get_count, cuDeviceGetCount)                                     \
  X(device_get, cuDeviceGet)                                                \
  X(device_get_name, cuDeviceGetName)                                       \
  X(device_get_attribute, cuDeviceGetAttribute)                             \
  X(device_get_pci_bus_id, cuDeviceGetPCIBusId)                             \
  X(device_total_mem, cuDeviceTotalMem)                                     \
  X(device_primary_ctx_retain, cuDevicePrimaryCtxRetain)                    \
  X(device_primary_ctx_release, cuDevicePrimaryCtxRelease)                  \
  X(ctx_get_current, cuCtxGetCurrent)                                       \
  X(ctx_set_current, cuCtxSetCurrent)                                       \
  X(ctx_get_device, cuCtxGetDevice)                                         \
  X(ctx_synchronize, cuCtxSynchronize)                                      \
  X(mem_get_info, cuMemGetInfo)                                             \
  X(mem_alloc, cuMemAlloc)                                                  \
  X(mem_free, cuMemFree)                                                    \
  X(memcpy_htod, cuMemcpyHtoD)                                              \
  X(memcpy_dtoh, cuMemcpyDtoH)                                              \
  X(memcpy_htod_async, cuMemcpyHtoDAsync)                                   \
  X(memcpy_dtod_async, cuMemcpyDtoDAsync)                                   \
  X(memset_d8, cuMemsetD8)                                                  \
  X(memset_d8_async, cuMemsetD8Async)                                       \
  X(pointer_get_attribute, cuPointerGetAttribute)                           \
  X(stream_create, cuStreamCreate)                                          \
  X(stream_destroy, cuStreamDestroy)                                        \
  X(stream_synchronize, cuStreamSynchronize)                                \
  X(stream_is_capturing, cuStreamIsCapturing)                               \
  X(thread_exchange_stream_capture_mode, cuThreadExchangeStreamCaptureMode) \
  X(stream_begin_capture, cuStreamBeginCapture)                             \
  X(stream_end_capture, cuStreamEndCapture)                                 \
  X(graph_instantiate, cuGraphInstantiateWithFlags)                         \
  X(graph_launch, cuGraphLaunch)                                            \
  X(graph_exec_destroy, cuGraphExecDestroy)                                 \
  X(graph_destroy, cuGraphDestroy)                                          \
  X(event_create, cuEventCreate)                                            \
  X(event_destroy, cuEventDestroy)                                          \
  X(event_record, cuEventRecord)                                            \
  X(event_synchronize, cuEventSynchronize)                                  \
  X(stream_wait_event, cuStreamWaitEvent)                                   \
  X(event_elapsed_time, cuEventElapsedTime)                                 \
  X(library_load_data, cuLibraryLoadData)                                   \
  X(library_unload, cuLibraryUnload)                                        \
  X(library_get_kernel, cuLibraryGetKernel)                                 \
  X(kernel_get_function, cuKernelGetFunction)                               \
  X(kernel_get_attribute, cuKernelGetAttribute)                             \
  X(kernel_set_attribute, cuKernelSetAttribute)                             \
  X(func_get_attribute, cuFuncGetAttribute)                                 \
  X(launch_kernel_ex, cuLaunchKernelEx)                                     \
  X(launch_host_func, cuLaunchHostFunc)                                     \
  X(tensor_map_encode_tiled, cuTensorMapEncodeTiled)                        \
  X(tensor_map_replace_address, cuTensorMapReplaceAddress)

/// One opened and initialised libcuda. Plain function pointers, so that a test can put its own in their
/// place.
class Driver {
 public:
  /// Opens `library`, or libcuda.so.1 when it is empty, and calls cuInit.
  /// Throws Error(no_driver) when it is missing or older than CUDA 12.0, Error(no_device) when it finds no
  /// GPU.
  static std::shared_ptr<const Driver> open(const std::string& library = {});

  /// Throws Error(cuda) with `what`, the driver's name and its text, unless `result` is CUDA_SUCCESS.
  void check(CUresult result, std::string_view what) const {
    if (result != CUDA_SUCCESS) [[unlikely]]
      fail(result, what);
  }
  /// "CUDA_ERROR_INVALID_VALUE (invalid argument)".
  std::string describe(CUresult result) const;

  int version = 0;   ///< of the CUDA the driver speaks: 12040 is 12.4
  std::string path;  ///< as it was given to the loader

#define FLASHJIT_DRIVER_MEMBER(member, symbol) decltype(&::symbol) member = nullptr;
  FLASHJIT_DRIVER_FUNCTIONS(FLASHJIT_DRIVER_MEMBER)
#undef FLASHJIT_DRIVER_MEMBER

 private:
  [[noreturn]] void fail(CUresult result, std::string_view what) const;
};

/// While it lives, the calling thread may do what a graph that another thread captures forbids to all
/// threads, such as loading code or freeing memory. Without it the call fails, and so does the capture.
class ApartFromCaptures {
 public:
  explicit ApartFromCaptures(const Driver& driver) : driver_(driver) { exchange(); }
  ~ApartFromCaptures() { exchange(); }
  ApartFromCaptures(const ApartFromCaptures&) = delete;
  ApartFromCaptures& operator=(const ApartFromCaptures&) = delete;

 private:
  /// An error of the driver is the next call's, too, which reports it.
  void exchange() { driver_.thread_exchange_stream_capture_mode(&mode_); }

  const Driver& driver_;
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

}  // namespace flashjit::device
