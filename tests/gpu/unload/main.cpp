// Opens libflashjit at run time, computes with it, closes it and looks at what is left, several times; links
// nothing of it.
//   flashjit_unload LIBRARY CACHE_FOLDER
// Exit code: 0 all is as before, 77 no GPU, 1 else, with the reason on stderr.
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "flashjit/flashjit.h"
#include "tools/examples/cuda_by_hand.h"

namespace {

constexpr std::int64_t kHeads = 2, kLength = 128, kDim = 64, kElements = kHeads * kLength * kDim;
constexpr unsigned short kOne = 0x3f80, kHalf = 0x3f00, kNan = 0x7fff;  // bf16
constexpr int kRounds = 4;  // the first may leave what the driver keeps for the next
constexpr std::size_t kDriverKeeps = std::size_t{16} << 20;

void require(bool ok, const std::string& what) {
  if (!ok) throw std::runtime_error(what);
}

struct Cuda : cuda_functions {
  CUresult (*free)(CUdeviceptr) = nullptr;
  CUresult (*memory)(std::size_t*, std::size_t*) = nullptr;

  bool open() {
    if (!open_cuda(this)) return false;
    void* library = ::dlopen("libcuda.so.1", RTLD_NOW);
    look_up(library, "cuMemFree_v2", &free);
    look_up(library, "cuMemGetInfo_v2", &memory);
    return free && memory;
  }
  std::size_t free_bytes() const {
    std::size_t left = 0, total = 0;
    require(memory(&left, &total) == CUDA_SUCCESS, "cuMemGetInfo failed");
    return left;
  }
};

/// [1, heads, length, dim] of bf16, freed in the end.
class Tensor {
 public:
  Tensor(const Cuda& cuda, unsigned short bits) : cuda_(cuda), data_(make_filled(&cuda, bits, kElements)) {
    require(data_, "no device memory");
  }
  ~Tensor() { cuda_.free(address()); }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;

  flashjit_tensor view() const {
    return {data_, {1, kHeads, kLength, kDim}, {kElements, kLength * kDim, kDim, 1}};
  }
  bool is_all(unsigned short bits) const {
    std::vector<unsigned short> got(kElements);
    require(cuda_.download(got.data(), address(), kElements * sizeof bits) == CUDA_SUCCESS,
            "cuMemcpyDtoH failed");
    return got == std::vector<unsigned short>(kElements, bits);
  }

 private:
  CUdeviceptr address() const { return reinterpret_cast<CUdeviceptr>(data_); }

  const Cuda& cuda_;
  void* data_;
};

template <class Function>
Function* function(void* library, const char* name) {
  void* address = ::dlsym(library, name);
  require(address, std::string("the library has no ") + name);
  return reinterpret_cast<Function*>(address);
}
#define FUNCTION(library, name) function<decltype(name)>(library, #name)

/// Equal values everywhere: whatever the weights, their average is that value.
void compute(void* library, const Cuda& cuda, const char* cache_folder) {
  // Asked for only then: a thread that has asked keeps the library until it ends.
  const auto check = [&](flashjit_status status, const char* what) {
    if (status != FLASHJIT_OK)
      throw std::runtime_error(std::string(what) + ": " + FUNCTION(library, flashjit_last_error_message)());
  };
  flashjit_options options{};
  options.struct_size = sizeof options;
  options.cache_dir = cache_folder;
  flashjit_runtime* runtime = nullptr;
  check(FUNCTION(library, flashjit_runtime_create)(&options, &runtime), "flashjit_runtime_create");
  flashjit_spec* spec = nullptr;
  check(FUNCTION(library, flashjit_spec_create)("bf16:d64", &spec), "flashjit_spec_create");
  {
    const Tensor q(cuda, kOne), k(cuda, kOne), v(cuda, kHalf), out(cuda, kNan);
    flashjit_forward_args args{};
    args.struct_size = sizeof args;
    args.q = q.view();
    args.k = k.view();
    args.v = v.view();
    args.out = out.view();
    check(FUNCTION(library, flashjit_forward)(runtime, spec, &args, nullptr), "flashjit_forward");
    require(cuda.synchronize() == CUDA_SUCCESS, "cuCtxSynchronize failed");
    require(out.is_all(kHalf), "the forward pass is wrong");
  }
  FUNCTION(library, flashjit_spec_destroy)(spec);
  FUNCTION(library, flashjit_runtime_destroy)(runtime);
}

bool is_mapped(const std::string& file) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);)
    if (line.find(file) != line.npos) return true;
  return false;
}

void use_and_unload(const char* path, const Cuda& cuda, const char* cache_folder) {
  const std::string file = std::filesystem::canonical(path).string();
  void* library = ::dlopen(path, RTLD_NOW | RTLD_LOCAL);
  require(library, library ? "" : ::dlerror());
  require(is_mapped(file), "it is not known by which name the library is mapped");
  compute(library, cuda, cache_folder);
  require(::dlclose(library) == 0, "dlclose failed");
  require(!is_mapped(file), "the library is still mapped after dlclose");
  // The context is the caller's, and works as before.
  require(cuda.synchronize() == CUDA_SUCCESS, "the context is broken after dlclose");
  require(Tensor(cuda, kOne).is_all(kOne), "memory of the context is broken after dlclose");
}

int run(const char* path, const char* cache_folder) {
  Cuda cuda;
  if (!cuda.open()) {
    std::fprintf(stderr, "no GPU\n");
    return 77;
  }
  std::vector<std::size_t> left{cuda.free_bytes()};
  for (int round = 0; round < kRounds; ++round) {
    use_and_unload(path, cuda, cache_folder);
    left.push_back(cuda.free_bytes());
    std::printf("round %d: %zu bytes of the device's memory are free, %zu before all\n", round + 1,
                left.back(), left.front());
  }
  require(left[1] + kDriverKeeps >= left[0], "the first use left device memory behind");
  require(left.back() >= left[1], "later uses left device memory behind, or another process took some");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: %s LIBRARY CACHE_FOLDER\n", argv[0]);
    return 1;
  }
  try {
    return run(argv[1], argv[2]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
