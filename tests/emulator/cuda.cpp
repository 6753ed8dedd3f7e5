// A libcuda whose device is the emulator: its memory is the host's, its launches run kernels that nvrtc.cpp
// compiled. FLASHJIT_LIBCUDA names it; contexts, streams and events are those of the fake driver.
//   FLASHJIT_EMULATOR_CAPABILITY=N  the device's compute capability; 90 by default
//   FLASHJIT_EMULATOR_SEED=N        decides the order of all that may happen in any order
#include <dlfcn.h>
#include <elf.h>
#include <fmt/format.h>
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>

#include "support/file.hpp"
#include "tests/emulator/machine.hpp"
#include "tests/emulator/tensor_map.hpp"
#include "tests/support/fake_driver.hpp"

namespace {

using flashjit::device::Driver;
using flashjit::test::FakeDriver;
namespace emulator = flashjit_emulator;

using emulator::kPage;

/// Device memory. What is behind an allocation faults, and what is before its page.
class Memory {
 public:
  CUresult allocate(CUdeviceptr* address, std::size_t bytes) {
    if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    const std::size_t inside = (bytes + kPage - 1) / kPage * kPage;
    void* pages = ::mmap(nullptr, inside + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    char* begin = static_cast<char*>(pages) + kPage;
    ::mprotect(begin, inside, PROT_READ | PROT_WRITE);
    const std::size_t alignment = 16;
    *address =
        reinterpret_cast<CUdeviceptr>(begin + inside - (bytes + alignment - 1) / alignment * alignment);
    const std::lock_guard lock(mutex_);
    mappings_[*address] = {pages, inside + 2 * kPage};
    return CUDA_SUCCESS;
  }
  CUresult free(CUdeviceptr address) {
    const std::lock_guard lock(mutex_);
    const auto found = mappings_.find(address);
    if (found == mappings_.end()) return CUDA_ERROR_INVALID_VALUE;
    ::munmap(found->second.pages, found->second.bytes);
    mappings_.erase(found);
    return CUDA_SUCCESS;
  }

  /// Whether an allocation has the address, or the page behind it.
  bool has(const void* address, std::size_t page_behind = kPage) {
    const std::lock_guard lock(mutex_);
    const auto behind = mappings_.upper_bound(reinterpret_cast<CUdeviceptr>(address));
    if (behind == mappings_.begin()) return false;
    const Mapping& mapping = std::prev(behind)->second;
    const char* end = static_cast<const char*>(mapping.pages) + mapping.bytes - kPage;
    return static_cast<const char*>(address) < end + page_behind;
  }

 private:
  struct Mapping {
    void* pages;
    std::size_t bytes;
  };
  std::mutex mutex_;
  std::map<CUdeviceptr, Mapping> mappings_;
};

Memory& memory() {
  static Memory instance;
  return instance;
}
/// What went wrong with the last launch that failed.
std::string& last_error() {
  static std::string message;
  return message;
}

void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

template <class... More>
CUresult copy(CUdeviceptr to, const void* from, std::size_t bytes, More...) {
  std::memcpy(pointer(to), from, bytes);
  return CUDA_SUCCESS;
}
template <class... More>
CUresult fill(CUdeviceptr to, unsigned char byte, std::size_t bytes, More...) {
  std::memset(pointer(to), byte, bytes);
  return CUDA_SUCCESS;
}

void set_memory(Driver& d) {
  d.mem_alloc = [](CUdeviceptr* address, std::size_t bytes) { return memory().allocate(address, bytes); };
  d.mem_free = [](CUdeviceptr address) { return memory().free(address); };
  d.memcpy_htod = copy<>;
  d.memcpy_htod_async = copy<CUstream>;
  d.memcpy_dtoh = [](void* to, CUdeviceptr from, std::size_t bytes) {
    std::memcpy(to, pointer(from), bytes);
    return CUDA_SUCCESS;
  };
  d.memcpy_dtod_async = [](CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream) {
    return copy(to, pointer(from), bytes);
  };
  d.pointer_get_attribute = [](void* value, CUpointer_attribute attribute, CUdeviceptr address) {
    static const auto of_fake_driver = FakeDriver::driver()->pointer_get_attribute;
    return memory().has(pointer(address), 0) ? of_fake_driver(value, attribute, address)
                                             : CUDA_ERROR_INVALID_VALUE;
  };
  d.memset_d8 = fill<>;
  d.memset_d8_async = fill<CUstream>;
}

/// Bytes of an ELF file: its table of sections comes last.
std::size_t size_of(const void* image) {
  Elf64_Ehdr header;
  std::memcpy(&header, image, sizeof header);
  if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0) return 0;
  return header.e_shoff + std::size_t{header.e_shnum} * header.e_shentsize;
}

/// Kernels find the emulator's functions in this library, which was opened for its opener alone.
void show_functions_to_kernels() {
  Dl_info info{};
  ::dladdr(reinterpret_cast<void*>(&show_functions_to_kernels), &info);
  ::dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_GLOBAL);
}

/// The loader takes files only. The library stays, as an unloaded one's variables may be named by a report.
CUresult load(CUlibrary* library, const void* image, CUjit_option*, void**, unsigned, CUlibraryOption*,
              void**, unsigned) {
  const std::filesystem::path path =
      std::filesystem::temp_directory_path() / ("flashjit-emulated-" + flashjit::unique_suffix() + ".so");
  std::ofstream(path, std::ios::binary)
      .write(static_cast<const char*>(image), static_cast<std::streamsize>(size_of(image)));
  *library = static_cast<CUlibrary>(::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL));
  std::filesystem::remove(path);
  if (!*library) last_error() = ::dlerror();
  return *library ? CUDA_SUCCESS : CUDA_ERROR_INVALID_IMAGE;
}

/// Kernels and functions are entries.
CUresult get_kernel(CUkernel* kernel, CUlibrary library, const char* name) {
  *kernel = static_cast<CUkernel>(::dlsym(library, fmt::format("{}_entry", name).c_str()));
  return *kernel ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
CUresult get_function(CUfunction* function, CUkernel kernel) {
  *function = reinterpret_cast<CUfunction>(kernel);
  return CUDA_SUCCESS;
}

CUresult launch(const CUlaunchConfig* config, CUfunction function, void** parameters, void**) {
  if (config->gridDimX == 0) return CUDA_ERROR_INVALID_VALUE;
  const auto* entry = reinterpret_cast<const emulator::Entry*>(function);
  const std::string error = emulator::launch(
      {entry, config->gridDimX, config->blockDimX, config->sharedMemBytes, parameters,
       FakeDriver::is_early(*config), [](const void* address) { return memory().has(address); }});
  if (error.empty()) return CUDA_SUCCESS;
  last_error() = error;
  return CUDA_ERROR_LAUNCH_FAILED;
}

CUresult encode(CUtensorMap* to, CUtensorMapDataType type, cuuint32_t rank, void* data,
                const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t*,
                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                CUtensorMapFloatOOBfill) {
  const std::uint64_t element_bytes = type == CU_TENSOR_MAP_DATA_TYPE_UINT8    ? 1
                                      : type == CU_TENSOR_MAP_DATA_TYPE_UINT32 ? 4
                                                                               : 2;
  const std::uint64_t row_bytes = box[0] * element_bytes;
  constexpr std::uint64_t kMostStride = std::uint64_t{1} << 40;
  emulator::TensorMap map{.data = static_cast<char*>(data), .dimensions = static_cast<std::uint16_t>(rank)};
  bool valid = reinterpret_cast<std::uintptr_t>(data) % 16 == 0 &&
               rank <= emulator::TensorMap::kMostDimensions && interleave == CU_TENSOR_MAP_INTERLEAVE_NONE &&
               (element_bytes == 2 ? swizzle == CU_TENSOR_MAP_SWIZZLE_128B && row_bytes <= 128
                                   : swizzle == CU_TENSOR_MAP_SWIZZLE_NONE && row_bytes % 16 == 0);
  for (cuuint32_t i = 0; i < rank && valid; ++i) {
    map.sizes[i] = static_cast<std::uint32_t>(sizes[i]);
    map.strides[i] = i == 0 ? element_bytes : strides[i - 1];
    map.box[i] = static_cast<std::uint16_t>(box[i]);
    valid = sizes[i] > 0 && sizes[i] <= std::uint64_t{1} << 32 && box[i] > 0 && box[i] <= 256 &&
            (i == 0 || (map.strides[i] % 16 == 0 && map.strides[i] < kMostStride));  // 0, too, on an H200
  }
  if (!valid) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(to, &map, sizeof map);
  return CUDA_SUCCESS;
}

CUresult replace_address(CUtensorMap* map, void* data) {
  if (reinterpret_cast<std::uintptr_t>(data) % 16 != 0) return CUDA_ERROR_INVALID_VALUE;
  emulator::TensorMap changed;
  std::memcpy(static_cast<void*>(&changed), map, sizeof changed);
  changed.data = static_cast<char*>(data);
  std::memcpy(map, &changed, sizeof changed);
  return CUDA_SUCCESS;
}

CUresult get_attribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  if (attribute == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT) {
    *value = emulator::kMultiprocessors;
    return CUDA_SUCCESS;
  }
  static const auto of_fake_driver = FakeDriver::driver()->device_get_attribute;
  return of_fake_driver(value, attribute, device);
}

/// What has nothing to do.
template <class... Arguments>
CUresult succeed(Arguments...) {
  return CUDA_SUCCESS;
}

std::shared_ptr<const Driver> emulated_driver() {
  show_functions_to_kernels();
  if (const char* capability = std::getenv("FLASHJIT_EMULATOR_CAPABILITY"))
    FakeDriver::state().compute_capability = std::atoi(capability);
  auto driver = std::make_shared<Driver>(*FakeDriver::driver());
  set_memory(*driver);
  driver->driver_get_version = [](int* version) {
    *version = 13000;
    return CUDA_SUCCESS;
  };
  driver->get_error_name = [](CUresult result, const char** name) {
    *name = result == CUDA_ERROR_LAUNCH_FAILED ? "CUDA_ERROR_LAUNCH_FAILED" : "CUDA_ERROR";
    return CUDA_SUCCESS;
  };
  driver->get_error_string = [](CUresult, const char** text) {
    *text = last_error().c_str();
    return CUDA_SUCCESS;
  };
  driver->device_get_attribute = get_attribute;
  driver->library_load_data = load;
  driver->library_get_kernel = get_kernel;
  driver->kernel_get_function = get_function;
  driver->launch_kernel_ex = launch;
  driver->tensor_map_encode_tiled = encode;
  driver->tensor_map_replace_address = replace_address;
#define FLASHJIT_FILL(member, name) \
  if (!driver->member) driver->member = succeed;
  FLASHJIT_DRIVER_FUNCTIONS(FLASHJIT_FILL)
#undef FLASHJIT_FILL
  return driver;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) CUresult cuGetProcAddress_v2(
    const char* symbol, void** address, int, cuuint64_t, CUdriverProcAddressQueryResult*) {
  static const std::shared_ptr<const Driver> driver = emulated_driver();
  *address = nullptr;
#define FLASHJIT_LOOK_UP(member, name) \
  if (std::strcmp(symbol, #name) == 0) *address = reinterpret_cast<void*>(driver->member);
  FLASHJIT_DRIVER_FUNCTIONS(FLASHJIT_LOOK_UP)
#undef FLASHJIT_LOOK_UP
  return CUDA_SUCCESS;
}
