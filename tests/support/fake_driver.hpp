// A driver for tests without a GPU: it remembers what it was asked and launches nothing. Every launch takes a
// time that its grid tells.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "device/tensor_maps.hpp"
#include "templates/common/params.cuh"

namespace flashjit::test {

/// What a fake driver has and what it was asked. The driver's functions carry no context, so this is one a
/// process; reset() begins a test.
struct FakeDriver {
  struct Launch {
    unsigned blocks, threads, shared_bytes;
    CUstream stream;
    std::array<std::byte, sizeof(Params)> params;  ///< those that the kernel has; what follows is no matter
    device::TensorMaps maps;  ///< the second parameter, which the Runtime always hands over
    bool early;               ///< may start before the launch before it has ended
    std::thread::id thread = std::this_thread::get_id();
  };
  static bool is_early(const CUlaunchConfig& config) {
    return config.numAttrs == 1 &&
           config.attrs[0].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION &&
           config.attrs[0].value.programmaticStreamSerializationAllowed == 1;
  }
  /// What a tensor map was made of. The map itself holds the place in the list, counted from 1.
  struct EncodedMap {
    CUtensorMapDataType type;
    const void* data;
    std::vector<std::uint64_t> sizes, strides;  ///< elements, bytes
    std::vector<std::uint32_t> box, element_strides;
    CUtensorMapInterleave interleave;
    CUtensorMapSwizzle swizzle;
    CUtensorMapL2promotion promotion;
    CUtensorMapFloatOOBfill fill;
  };

  std::mutex mutex;
  bool has_context = true;
  bool capturing = false;
  int device = 0;
  static inline thread_local int own_device = -1;  ///< of this thread, and its memory's; -1: `device`
  static constexpr int kDevices = 2;
  static constexpr std::intptr_t kFirstContext = 0xc0;
  int compute_capability = 90;
  CUresult init_result = CUDA_SUCCESS, load_result = CUDA_SUCCESS, launch_result = CUDA_SUCCESS;
  bool throws_at_launch = false;           ///< what no driver does: an error that is not one of flashjit's
  std::size_t unknown_pointers_below = 0;  ///< addresses that are no CUDA memory
  int owner_of_pointers = 0;
  CUresult encode_result = CUDA_SUCCESS;
  CUresult ctx_result = CUDA_SUCCESS;  ///< of cuCtxSetCurrent
  /// While a graph is captured in the global mode, what is unsafe fails and spoils it, in any thread that is
  /// not relaxed.
  std::atomic<bool> captures_globally = false, capture_spoilt = false;
  static inline thread_local CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  static CUresult unsafe() {
    if (!state().captures_globally || capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_SUCCESS;
    state().capture_spoilt = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  template <class... Arguments>
  static CUresult unsafe_and_nothing_else(Arguments...) {
    return unsafe();
  }
  std::vector<Launch> launches;
  std::vector<EncodedMap> encoded;
  int libraries_loaded = 0, libraries_unloaded = 0, functions_touched = 0, pointers_asked = 0;
  std::map<int, int> opt_ins;  ///< calls of cuKernelSetAttribute by device
  double clock_ms = 0;         ///< of all streams: what was launched so far
  double slower = 0;  ///< by this share of their time launches take longer after each event: a GPU that heats
  double slowest = INFINITY;  ///< the share that they end at, as under a power limit
  double heat = 0;            ///< the share so far
  std::map<CUdeviceptr, std::vector<std::uint8_t>> uploads;  ///< small ones, by where they went
  CUdeviceptr next_address = 1ull << 40;                     ///< what is behind it is never read
  std::uintptr_t next_stream = 0x1000;                       ///< each made is another

  static FakeDriver& state() {
    static FakeDriver& fake = *new FakeDriver;  // as a driver, it is there to the very end
    return fake;
  }

  void reset() {
    const std::lock_guard lock(mutex);
    has_context = true;
    capturing = captures_globally = capture_spoilt = false;
    device = 0;
    compute_capability = 90;
    init_result = load_result = launch_result = CUDA_SUCCESS;
    throws_at_launch = false;
    unknown_pointers_below = 0;
    owner_of_pointers = 0;
    encode_result = ctx_result = CUDA_SUCCESS;
    launches.clear();
    encoded.clear();
    libraries_loaded = libraries_unloaded = functions_touched = pointers_asked = 0;
    opt_ins.clear();
    slower = heat = 0;
    slowest = INFINITY;
    uploads.clear();
  }

  /// Few large blocks are fast here, whatever a real GPU would say.
  static double launch_ms(unsigned blocks, unsigned threads) { return 0.01 + 1e-4 * blocks + 1e-5 * threads; }

  /// The context of a device, also of -1, which means `device`; never null.
  static CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(kFirstContext + device); }

  static std::shared_ptr<const device::Driver> driver() {
    auto fake = std::make_shared<device::Driver>();
    fake->version = 13000;
    fake->path = "fake";
    set_errors(*fake);
    set_context(*fake);
    set_device(*fake);
    set_memory(*fake);
    set_streams(*fake);
    set_events(*fake);
    set_captures(*fake);
    set_library(*fake);
    set_launch(*fake);
    return fake;
  }

 private:
  static void set_errors(device::Driver& d) {
    d.get_error_name = [](CUresult, const char** name) {
      *name = "CUDA_ERROR_FAKE";
      return CUDA_SUCCESS;
    };
    d.get_error_string = [](CUresult, const char** text) {
      *text = "as the test asked";
      return CUDA_SUCCESS;
    };
  }

  static void set_context(device::Driver& d) {
    d.device_primary_ctx_retain = [](CUcontext* context, CUdevice device) {
      *context = context_of(device);
      return CUDA_SUCCESS;
    };
    d.ctx_get_current = [](CUcontext* context) {
      *context = context_of(own_device);
      return CUDA_SUCCESS;
    };
    d.ctx_set_current = [](CUcontext context) {
      if (state().ctx_result == CUDA_SUCCESS)
        own_device = static_cast<int>(reinterpret_cast<std::intptr_t>(context) - kFirstContext);
      return state().ctx_result;
    };
    d.ctx_get_device = [](CUdevice* device) {
      *device = own_device >= 0 ? own_device : state().device;
      return state().has_context ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
    };
  }

  static void set_device(device::Driver& d) {
    d.device_get_count = [](int* count) {
      *count = kDevices;
      return CUDA_SUCCESS;
    };
    d.device_get = [](CUdevice* device, int ordinal) {
      *device = ordinal;
      return CUDA_SUCCESS;
    };
    d.device_get_name = [](char* name, int size, CUdevice) {
      std::strncpy(name, "Fake GPU", size);
      return CUDA_SUCCESS;
    };
    d.device_get_pci_bus_id = [](char* id, int size, CUdevice device) {
      std::snprintf(id, static_cast<std::size_t>(size), "FA4E:%02X:00.0", device + 1);
      return CUDA_SUCCESS;
    };
    d.device_get_attribute = [](int* value, CUdevice_attribute attribute, CUdevice) {
      switch (attribute) {
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
          *value = state().compute_capability / 10;
          break;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
          *value = state().compute_capability % 10;
          break;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
          *value = 132;
          break;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
          *value = 232448;
          break;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
          *value = 233472;
          break;
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR:
          *value = 65536;
          break;
        case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE:
          *value = 50 << 20;
          break;
        default:
          *value = 0;
      }
      return CUDA_SUCCESS;
    };
  }

  static void remember_upload(CUdeviceptr target, const void* source, std::size_t bytes) {
    constexpr std::size_t kSmall = 4096;
    const std::lock_guard lock(state().mutex);
    const auto* begin = static_cast<const std::uint8_t*>(source);
    if (bytes <= kSmall) state().uploads[target] = {begin, begin + bytes};
  }

  static void set_memory(device::Driver& d) {
    d.mem_get_info = [](std::size_t* free, std::size_t* total) {
      *free = *total = std::size_t{1} << 30;
      return CUDA_SUCCESS;
    };
    d.mem_alloc = [](CUdeviceptr* address, std::size_t bytes) {
      if (const CUresult result = unsafe(); result != CUDA_SUCCESS) return result;
      FakeDriver& fake = state();
      const std::lock_guard lock(fake.mutex);
      *address = fake.next_address;
      fake.next_address += (bytes + 4095) / 4096 * 4096;
      return CUDA_SUCCESS;
    };
    d.memcpy_htod = [](CUdeviceptr target, const void* source, std::size_t bytes) {
      remember_upload(target, source, bytes);
      return unsafe();
    };
    d.memcpy_htod_async = [](CUdeviceptr target, const void* source, std::size_t bytes, CUstream) {
      remember_upload(target, source, bytes);
      return CUDA_SUCCESS;
    };
    d.pointer_get_attribute = [](void* value, CUpointer_attribute attribute, CUdeviceptr pointer) {
      FakeDriver& fake = state();
      const std::lock_guard lock(fake.mutex);
      ++fake.pointers_asked;
      if (pointer < fake.unknown_pointers_below) return CUDA_ERROR_INVALID_VALUE;
      switch (attribute) {
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
          *static_cast<unsigned*>(value) = CU_MEMORYTYPE_DEVICE;
          break;
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
          *static_cast<int*>(value) = own_device >= 0 ? own_device : fake.owner_of_pointers;
          break;
        default:
          return CUDA_ERROR_INVALID_VALUE;  // nothing of another device is reachable
      }
      return CUDA_SUCCESS;
    };
  }

  static void set_streams(device::Driver& d) {
    d.stream_create = [](CUstream* stream, unsigned) {
      FakeDriver& fake = state();
      const std::lock_guard lock(fake.mutex);
      *stream = reinterpret_cast<CUstream>(fake.next_stream++);
      return CUDA_SUCCESS;
    };
    d.stream_is_capturing = [](CUstream, CUstreamCaptureStatus* status) {
      *status = state().capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
      return CUDA_SUCCESS;
    };
  }

  /// An event is the time at which it was recorded.
  static void set_events(device::Driver& d) {
    d.event_create = [](CUevent* event, unsigned) {
      *event = reinterpret_cast<CUevent>(new double(0));
      return CUDA_SUCCESS;
    };
    d.event_destroy = [](CUevent event) {
      delete reinterpret_cast<double*>(event);
      return CUDA_SUCCESS;
    };
    d.event_record = [](CUevent event, CUstream) {
      FakeDriver& fake = state();
      const std::lock_guard lock(fake.mutex);
      *reinterpret_cast<double*>(event) = fake.clock_ms;
      fake.heat = std::min(fake.heat + fake.slower, fake.slowest);
      return CUDA_SUCCESS;
    };
    d.event_elapsed_time = [](float* ms, CUevent start, CUevent stop) {
      *ms = static_cast<float>(*reinterpret_cast<double*>(stop) - *reinterpret_cast<double*>(start));
      return CUDA_SUCCESS;
    };
  }

  static void set_captures(device::Driver& d) {
    d.thread_exchange_stream_capture_mode = [](CUstreamCaptureMode* mode) {
      std::swap(*mode, capture_mode);
      return CUDA_SUCCESS;
    };
    d.stream_begin_capture = [](CUstream, CUstreamCaptureMode mode) {
      state().capture_spoilt = false;
      state().captures_globally = mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
      return CUDA_SUCCESS;
    };
    d.stream_end_capture = [](CUstream, CUgraph* graph) {
      state().captures_globally = false;
      *graph = nullptr;
      return state().capture_spoilt ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
    };
    d.ctx_synchronize = unsafe_and_nothing_else;
    d.stream_synchronize = unsafe_and_nothing_else;
    d.event_synchronize = unsafe_and_nothing_else;
    d.mem_free = unsafe_and_nothing_else;
    d.memcpy_dtoh = unsafe_and_nothing_else;
  }

  static void set_library(device::Driver& d) {
    d.library_load_data = [](CUlibrary* library, const void*, CUjit_option*, void**, unsigned,
                             CUlibraryOption*, void**, unsigned) {
      if (const CUresult result = unsafe(); result != CUDA_SUCCESS) return result;
      FakeDriver& fake = state();
      const std::lock_guard lock(fake.mutex);
      if (fake.load_result == CUDA_SUCCESS) ++fake.libraries_loaded;
      *library = nullptr;
      return fake.load_result;
    };
    d.library_unload = [](CUlibrary) {
      FakeDriver& fake = state();
      const std::lock_guard lock(fake.mutex);
      ++fake.libraries_unloaded;
      return unsafe();
    };
    d.library_get_kernel = [](CUkernel* kernel, CUlibrary, const char*) {
      *kernel = nullptr;
      return unsafe();
    };
    d.kernel_get_attribute = [](int* value, CUfunction_attribute, CUkernel, CUdevice) {
      *value = 1;
      return CUDA_SUCCESS;
    };
    d.kernel_set_attribute = [](CUfunction_attribute, int, CUkernel, CUdevice device) {
      FakeDriver& fake = state();
      const std::lock_guard lock(fake.mutex);
      ++fake.opt_ins[device];
      return CUDA_SUCCESS;
    };
    d.kernel_get_function = [](CUfunction* function, CUkernel) {
      *function = nullptr;
      return unsafe();
    };
    d.func_get_attribute = [](int* value, CUfunction_attribute, CUfunction) {
      FakeDriver& fake = state();
      const std::lock_guard lock(fake.mutex);
      ++fake.functions_touched;
      *value = 1;
      return unsafe();
    };
  }

  static void set_launch(device::Driver& d) {
    d.tensor_map_encode_tiled = [](CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                                   const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                   const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                                   CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                   CUtensorMapFloatOOBfill fill) {
      FakeDriver& fake = state();
      const std::lock_guard lock(fake.mutex);
      if (fake.encode_result != CUDA_SUCCESS) return fake.encode_result;
      const bool aligned =
          reinterpret_cast<std::uintptr_t>(data) % 16 == 0 &&
          std::all_of(strides, strides + rank - 1, [](auto bytes) { return bytes % 16 == 0; });
      if (!aligned) return CUDA_ERROR_INVALID_VALUE;
      fake.encoded.push_back({type,
                              data,
                              {sizes, sizes + rank},
                              {strides, strides + rank - 1},
                              {box, box + rank},
                              {element_strides, element_strides + rank},
                              interleave,
                              swizzle,
                              promotion,
                              fill});
      map->opaque[0] = fake.encoded.size();
      return CUDA_SUCCESS;
    };
    d.tensor_map_replace_address = [](CUtensorMap* map, void* data) {
      FakeDriver& fake = state();
      const std::lock_guard lock(fake.mutex);
      EncodedMap replaced = fake.encoded.at(map->opaque[0] - 1);
      replaced.data = data;
      fake.encoded.push_back(std::move(replaced));
      map->opaque[0] = fake.encoded.size();
      return CUDA_SUCCESS;
    };
    d.launch_kernel_ex = [](const CUlaunchConfig* config, CUfunction, void** parameters, void**) {
      FakeDriver& fake = state();
      const std::lock_guard lock(fake.mutex);
      if (fake.throws_at_launch) throw std::runtime_error("thrown by the fake driver");
      if (fake.launch_result != CUDA_SUCCESS) return fake.launch_result;
      fake.clock_ms += launch_ms(config->gridDimX, config->blockDimX) * (1 + fake.heat);
      fake.launches.push_back({config->gridDimX,
                               config->blockDimX,
                               config->sharedMemBytes,
                               config->hStream,
                               {},
                               *static_cast<const device::TensorMaps*>(parameters[1]),
                               is_early(*config)});
      std::memcpy(fake.launches.back().params.data(), parameters[0], sizeof(Params));
      return CUDA_SUCCESS;
    };
  }
};

}  // namespace flashjit::test
