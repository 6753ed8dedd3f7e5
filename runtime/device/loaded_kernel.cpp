#include "device/loaded_kernel.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "device/images.hpp"

namespace flashjit::device {
namespace {

bool is_about_the_code(CUresult result) {
  switch (result) {
    case CUDA_ERROR_INVALID_VALUE:
    case CUDA_ERROR_INVALID_IMAGE:
    case CUDA_ERROR_NO_BINARY_FOR_GPU:
    case CUDA_ERROR_INVALID_PTX:
    case CUDA_ERROR_UNSUPPORTED_PTX_VERSION:
    case CUDA_ERROR_JIT_COMPILER_NOT_FOUND:
    case CUDA_ERROR_INVALID_SOURCE:
    case CUDA_ERROR_NOT_FOUND:
      return true;
    default:
      return false;
  }
}

void check_loaded(const Driver& driver, CUresult result, const std::string& what) {
  if (is_about_the_code(result))
    throw CodeRefused(ErrorCode::cuda, fmt::format("{} failed: {}.", what, driver.describe(result)));
  driver.check(result, what);
}

}  // namespace

LoadedImage::LoadedImage(std::shared_ptr<const Driver> driver, const std::string& image)
    : driver_(std::move(driver)) {
  check_loaded(*driver_,
               driver_->library_load_data(&library_, image.data(), nullptr, nullptr, 0, nullptr, nullptr, 0),
               "cuLibraryLoadData");
}

LoadedImage::~LoadedImage() {
  const ApartFromCaptures apart(*driver_);
  // At process exit the driver may be gone first and says so with an error; nothing is left to unload then.
  driver_->library_unload(library_);
}

LoadedKernel::LoadedKernel(std::shared_ptr<const Driver> driver, const std::string& cubin,
                           std::vector<plan::Entry> entries)
    : driver_(std::move(driver)), entries_(std::move(entries)) {
  const ApartFromCaptures apart(*driver_);
  // Each where an allocation of its own begins, as the driver expects of a file's bytes.
  for (const std::string_view image : images(cubin)) images_.emplace_back(driver_, std::string(image));
  for (const plan::Entry& entry : entries_) {
    const std::string symbol = "flashjit_" + entry.name;
    CUkernel kernel = nullptr;
    CUresult result = CUDA_ERROR_NOT_FOUND;
    if (const LoadedImage* image = image_of(entry))
      result = driver_->library_get_kernel(&kernel, image->library(), symbol.c_str());
    check_loaded(*driver_, result, "cuLibraryGetKernel of " + symbol);
    kernels_.push_back(kernel);
  }
}

const LoadedImage* LoadedKernel::image_of(const plan::Entry& entry) const {
  if (images_.empty()) return nullptr;
  const int number = std::min(program_of(entry, entries_), static_cast<int>(images_.size()));
  return &*std::next(images_.begin(), number - 1);
}

void LoadedKernel::make_ready(CUdevice device) const {
  const ApartFromCaptures apart(*driver_);
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    driver_->check(driver_->kernel_set_attribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                                 entries_[i].shared_bytes, kernels_[i], device),
                   fmt::format("Allowing flashjit_{} {} bytes of shared memory", entries_[i].name,
                               entries_[i].shared_bytes));
    CUfunction function = nullptr;
    driver_->check(driver_->kernel_get_function(&function, kernels_[i]), "cuKernelGetFunction");
    // Asking for an attribute makes a lazily loading driver load the function.
    int registers = 0;
    driver_->check(driver_->func_get_attribute(&registers, CU_FUNC_ATTRIBUTE_NUM_REGS, function),
                   "cuFuncGetAttribute");
  }
}

}  // namespace flashjit::device
