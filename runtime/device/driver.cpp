#include "device/driver.hpp"

#include <fmt/format.h>

#include "support/libraries.hpp"

namespace flashjit::device {
namespace {

constexpr int kOldestVersion = 12000;

/// What CUDA_ERROR_NOT_INITIALIZED means from a driver that is asked to initialise, or has been.
constexpr const char* kForked =
    "CUDA does not work in a process that was forked after CUDA was used: fork before the first use, "
    "or start a new program in the child.";

[[noreturn]] void too_old(const std::string& path, const std::string& found) {
  throw Error(
      ErrorCode::no_driver,
      fmt::format(
          "The CUDA driver in {} is too old: {}; flashjit needs CUDA 12.0 or newer. Install an NVIDIA "
          "driver of version 525.60 or newer.",
          path, found));
}

void* open_driver(const std::string& path) {
  const auto [handle, problem] = flashjit::open_library(path);
  if (handle) return handle;
  throw Error(
      ErrorCode::no_driver,
      fmt::format(
          "The CUDA driver could not be opened: {}. It comes with the NVIDIA driver (525.60 or newer) "
          "and needs an NVIDIA GPU; install it, or set FLASHJIT_LIBCUDA to the path of {}.",
          problem, library_names().driver));
}

void initialise(const Driver& driver) {
  const CUresult result = driver.init(0);
  if (result == CUDA_SUCCESS) return;
  if (result == CUDA_ERROR_NO_DEVICE)
    throw Error(ErrorCode::no_device, fmt::format("The CUDA driver in {} finds no GPU: check nvidia-smi and "
                                                  "CUDA_VISIBLE_DEVICES.",
                                                  driver.path));
  const char* advice =
      result == CUDA_ERROR_NOT_INITIALIZED
          ? kForked
          : "Check nvidia-smi; after an update of the driver the machine may need a restart.";
  throw Error(ErrorCode::no_driver, fmt::format("The CUDA driver in {} does not start: {}. {}", driver.path,
                                                driver.describe(result), advice));
}

}  // namespace

std::shared_ptr<const Driver> Driver::open(const std::string& library) {
  auto driver = std::make_shared<Driver>();
  driver->path = library.empty() ? library_names().driver : library;
  void* handle = open_driver(driver->path);

  const auto get_proc_address =
      reinterpret_cast<decltype(&::cuGetProcAddress_v2)>(find_symbol(handle, "cuGetProcAddress_v2"));
  if (!get_proc_address) too_old(driver->path, "it has no cuGetProcAddress_v2");

  // The version is that of the declarations used, so that a newer driver does not hand out a newer signature.
  const auto resolve = [&](const char* symbol) {
    void* address = nullptr;
    CUdriverProcAddressQueryResult found{};
    const CUresult result =
        get_proc_address(symbol, &address, kOldestVersion, CU_GET_PROC_ADDRESS_DEFAULT, &found);
    if (result != CUDA_SUCCESS || !address) too_old(driver->path, fmt::format("it has no {}", symbol));
    return address;
  };
#define FLASHJIT_RESOLVE(member, symbol) \
  driver->member = reinterpret_cast<decltype(driver->member)>(resolve(#symbol));
  FLASHJIT_DRIVER_FUNCTIONS(FLASHJIT_RESOLVE)
#undef FLASHJIT_RESOLVE

  driver->check(driver->driver_get_version(&driver->version), "cuDriverGetVersion");
  if (driver->version < kOldestVersion)
    too_old(driver->path,
            fmt::format("it speaks CUDA {}.{}", driver->version / 1000, driver->version % 1000 / 10));
  initialise(*driver);
  return driver;
}

std::string Driver::describe(CUresult result) const {
  const char* name = nullptr;
  const char* text = nullptr;
  if (get_error_name(result, &name) != CUDA_SUCCESS || !name)
    return fmt::format("CUDA error {}", static_cast<int>(result));
  if (get_error_string(result, &text) != CUDA_SUCCESS || !text) return name;
  return fmt::format("{} ({})", name, text);
}

void Driver::fail(CUresult result, std::string_view what) const {
  std::string message = fmt::format("{} failed: {}.", what, describe(result));
  if (result == CUDA_ERROR_NOT_INITIALIZED) message += fmt::format(" {}", kForked);
  throw Error(ErrorCode::cuda, message);
}

}  // namespace flashjit::device
