// A libcuda of two GPUs that compute nothing: every launch takes a time that its grid tells. With it,
// commands that need a GPU run from end to end on any machine, with real NVRTC. FLASHJIT_LIBCUDA names it.
#include <cuda.h>

#include <cstring>
#include <map>
#include <mutex>
#include <string>

namespace {

std::mutex mutex;
double clock_ms = 0;  // of all streams: what was launched so far
thread_local CUcontext current = nullptr;

struct Event {
  double at_ms = 0;
};

/// What has nothing to tell.
CUresult succeed(...) { return CUDA_SUCCESS; }

CUresult driver_version(int* version) {
  *version = 13000;
  return CUDA_SUCCESS;
}
CUresult error_text(CUresult, const char** text) {
  *text = "CUDA_ERROR_FAKE";
  return CUDA_SUCCESS;
}
CUresult device_count(int* count) {
  *count = 2;
  return CUDA_SUCCESS;
}
CUresult device(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult device_name(char* name, int size, CUdevice) {
  std::strncpy(name, "Fake GPU", static_cast<std::size_t>(size));
  return CUDA_SUCCESS;
}
CUresult device_attribute(int* value, CUdevice_attribute attribute, CUdevice) {
  static const std::map<CUdevice_attribute, int> kValues{
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 8},
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0},
      {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 108},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 166912},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 167936},
      {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, 65536},
      {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 1 << 20}};
  const auto found = kValues.find(attribute);
  *value = found == kValues.end() ? 0 : found->second;
  return CUDA_SUCCESS;
}

/// A context is its device's number and one.
CUresult retain(CUcontext* context, CUdevice device) {
  *context = reinterpret_cast<CUcontext>(static_cast<std::size_t>(device) + 1);
  return CUDA_SUCCESS;
}
CUresult set_current(CUcontext context) {
  current = context;
  return CUDA_SUCCESS;
}
CUresult get_current(CUcontext* context) {
  *context = current;
  return CUDA_SUCCESS;
}
CUresult current_device(CUdevice* device) {
  if (!current) return CUDA_ERROR_INVALID_CONTEXT;
  *device = static_cast<CUdevice>(reinterpret_cast<std::size_t>(current) - 1);
  return CUDA_SUCCESS;
}

CUresult memory_info(std::size_t* free, std::size_t* total) {
  *free = *total = std::size_t{1} << 30;
  return CUDA_SUCCESS;
}
/// Addresses that nobody looks behind.
CUresult allocate(CUdeviceptr* address, std::size_t bytes) {
  static CUdeviceptr next = CUdeviceptr{1} << 40;
  const std::lock_guard lock(mutex);
  *address = next;
  next += (bytes + 4095) / 4096 * 4096;
  return CUDA_SUCCESS;
}
CUresult pointer_attribute(void* value, CUpointer_attribute attribute, CUdeviceptr) {
  if (attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE) *static_cast<unsigned*>(value) = CU_MEMORYTYPE_DEVICE;
  if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) return CUDA_ERROR_INVALID_VALUE;
  return CUDA_SUCCESS;
}

CUresult capture_status(CUstream, CUstreamCaptureStatus* status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
CUresult create_event(CUevent* event, unsigned) {
  *event = reinterpret_cast<CUevent>(new Event);
  return CUDA_SUCCESS;
}
CUresult destroy_event(CUevent event) {
  delete reinterpret_cast<Event*>(event);
  return CUDA_SUCCESS;
}
CUresult record(CUevent event, CUstream) {
  const std::lock_guard lock(mutex);
  reinterpret_cast<Event*>(event)->at_ms = clock_ms;
  return CUDA_SUCCESS;
}
CUresult elapsed(float* ms, CUevent start, CUevent stop) {
  *ms = static_cast<float>(reinterpret_cast<Event*>(stop)->at_ms - reinterpret_cast<Event*>(start)->at_ms);
  return CUDA_SUCCESS;
}

template <class Handle>
CUresult make_handle(Handle* handle) {
  *handle = reinterpret_cast<Handle>(std::size_t{1});
  return CUDA_SUCCESS;
}
CUresult load_library(CUlibrary* library, const void*, CUjit_option*, void**, unsigned, CUlibraryOption*,
                      void**, unsigned) {
  return make_handle(library);
}
CUresult get_kernel(CUkernel* kernel, CUlibrary, const char*) { return make_handle(kernel); }
CUresult get_function(CUfunction* function, CUkernel) { return make_handle(function); }
CUresult create_stream(CUstream* stream, unsigned) { return make_handle(stream); }
CUresult kernel_attribute(int* value, CUfunction_attribute, CUkernel, CUdevice) {
  *value = 1;
  return CUDA_SUCCESS;
}
CUresult function_attribute(int* value, CUfunction_attribute, CUfunction) {
  *value = 1;
  return CUDA_SUCCESS;
}
/// Few large blocks are fast here, whatever a real GPU would say.
CUresult launch(const CUlaunchConfig* config, CUfunction, void**, void**) {
  const std::lock_guard lock(mutex);
  clock_ms += 0.01 + 1e-4 * config->gridDimX + 1e-5 * config->blockDimX;
  return CUDA_SUCCESS;
}

const std::map<std::string, void*>& functions() {
  static const std::map<std::string, void*> kFunctions{
      {"cuDriverGetVersion", reinterpret_cast<void*>(driver_version)},
      {"cuGetErrorName", reinterpret_cast<void*>(error_text)},
      {"cuGetErrorString", reinterpret_cast<void*>(error_text)},
      {"cuDeviceGetCount", reinterpret_cast<void*>(device_count)},
      {"cuDeviceGet", reinterpret_cast<void*>(device)},
      {"cuDeviceGetName", reinterpret_cast<void*>(device_name)},
      {"cuDeviceGetAttribute", reinterpret_cast<void*>(device_attribute)},
      {"cuDevicePrimaryCtxRetain", reinterpret_cast<void*>(retain)},
      {"cuCtxSetCurrent", reinterpret_cast<void*>(set_current)},
      {"cuCtxGetCurrent", reinterpret_cast<void*>(get_current)},
      {"cuCtxGetDevice", reinterpret_cast<void*>(current_device)},
      {"cuMemGetInfo", reinterpret_cast<void*>(memory_info)},
      {"cuMemAlloc", reinterpret_cast<void*>(allocate)},
      {"cuPointerGetAttribute", reinterpret_cast<void*>(pointer_attribute)},
      {"cuStreamCreate", reinterpret_cast<void*>(create_stream)},
      {"cuStreamIsCapturing", reinterpret_cast<void*>(capture_status)},
      {"cuEventCreate", reinterpret_cast<void*>(create_event)},
      {"cuEventDestroy", reinterpret_cast<void*>(destroy_event)},
      {"cuEventRecord", reinterpret_cast<void*>(record)},
      {"cuEventElapsedTime", reinterpret_cast<void*>(elapsed)},
      {"cuLibraryLoadData", reinterpret_cast<void*>(load_library)},
      {"cuLibraryGetKernel", reinterpret_cast<void*>(get_kernel)},
      {"cuKernelGetFunction", reinterpret_cast<void*>(get_function)},
      {"cuKernelGetAttribute", reinterpret_cast<void*>(kernel_attribute)},
      {"cuFuncGetAttribute", reinterpret_cast<void*>(function_attribute)},
      {"cuLaunchKernelEx", reinterpret_cast<void*>(launch)}};
  return kFunctions;
}

/// The name without the version that cuda.h's macros put behind it.
std::string plain(std::string symbol) {
  const std::size_t version = symbol.rfind("_v");
  if (version != std::string::npos) symbol.resize(version);
  return symbol;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) CUresult cuGetProcAddress_v2(
    const char* symbol, void** address, int, cuuint64_t, CUdriverProcAddressQueryResult*) {
  const auto found = functions().find(plain(symbol));
  *address = found == functions().end() ? reinterpret_cast<void*>(succeed) : found->second;
  return CUDA_SUCCESS;
}
