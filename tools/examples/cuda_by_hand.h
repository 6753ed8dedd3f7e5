/* libcuda opened by hand, for the examples: they link and start where there is no driver. A program of yours
 * would use the CUDA runtime, PyTorch or whatever else it has its device memory from. */
#ifndef FLASHJIT_EXAMPLES_CUDA_BY_HAND_H
#define FLASHJIT_EXAMPLES_CUDA_BY_HAND_H

#include <cuda.h>
#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

typedef struct {
  CUresult (*init)(unsigned);
  CUresult (*retain)(CUcontext*, CUdevice);
  CUresult (*set_current)(CUcontext);
  CUresult (*synchronize)(void);
  CUresult (*alloc)(CUdeviceptr*, size_t);
  CUresult (*alloc_managed)(CUdeviceptr*, size_t, unsigned);
  CUresult (*fill)(CUdeviceptr, unsigned short, size_t);
  CUresult (*download)(void*, CUdeviceptr, size_t);
  CUresult (*upload)(CUdeviceptr, const void*, size_t);
  CUresult (*device_count)(int*);
  CUresult (*create_stream)(CUstream*, unsigned);
  CUresult (*wait_for_stream)(CUstream);
  CUresult (*begin_capture)(CUstream, CUstreamCaptureMode);
  CUresult (*end_capture)(CUstream, CUgraph*);
  CUresult (*instantiate)(CUgraphExec*, CUgraph, unsigned long long);
  CUresult (*launch_graph)(CUgraphExec, CUstream);
} cuda_functions;

/* Returns 0 where the driver has no such function, as one that is too old. */
static inline int look_up(void* library, const char* name, void* target) {
  void* address = dlsym(library, name);
  memcpy(target, &address, sizeof address);
  return address != NULL;
}

/* Makes a device's primary context current in this thread. Returns 0 when that cannot be. */
static inline int use_device(const cuda_functions* cuda, int device) {
  CUcontext context;
  return cuda->retain(&context, device) == CUDA_SUCCESS && cuda->set_current(context) == CUDA_SUCCESS;
}

/* Makes device 0's primary context current. Returns 0 when there is no GPU, or a driver without these
 * functions. */
static inline int open_cuda(cuda_functions* cuda) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  if (!library) return 0;
  const int found = look_up(library, "cuInit", &cuda->init) &&
                    look_up(library, "cuDevicePrimaryCtxRetain", &cuda->retain) &&
                    look_up(library, "cuCtxSetCurrent", &cuda->set_current) &&
                    look_up(library, "cuCtxSynchronize", &cuda->synchronize) &&
                    look_up(library, "cuMemAlloc_v2", &cuda->alloc) &&
                    look_up(library, "cuMemAllocManaged", &cuda->alloc_managed) &&
                    look_up(library, "cuMemsetD16_v2", &cuda->fill) &&
                    look_up(library, "cuMemcpyDtoH_v2", &cuda->download) &&
                    look_up(library, "cuMemcpyHtoD_v2", &cuda->upload) &&
                    look_up(library, "cuDeviceGetCount", &cuda->device_count) &&
                    look_up(library, "cuStreamCreate", &cuda->create_stream) &&
                    look_up(library, "cuStreamSynchronize", &cuda->wait_for_stream) &&
                    look_up(library, "cuStreamBeginCapture_v2", &cuda->begin_capture) &&
                    look_up(library, "cuStreamEndCapture", &cuda->end_capture) &&
                    look_up(library, "cuGraphInstantiateWithFlags", &cuda->instantiate) &&
                    look_up(library, "cuGraphLaunch", &cuda->launch_graph);
  return found && cuda->init(0) == CUDA_SUCCESS && use_device(cuda, 0);
}

/* Device memory of `count` 16-bit elements, every one `bits`; null when there is no room. */
static inline void* make_filled(const cuda_functions* cuda, unsigned short bits, size_t count) {
  CUdeviceptr address = 0;
  if (cuda->alloc(&address, count * 2) != CUDA_SUCCESS) return NULL;
  if (cuda->fill(address, bits, count) != CUDA_SUCCESS) return NULL;
  return (void*)(size_t)address;
}

#endif
