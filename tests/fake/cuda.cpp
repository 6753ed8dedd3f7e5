// The fake driver as a libcuda that can be opened: for tests of what only dlopen shows, and for commands that
// need a GPU, which run with it from end to end on any machine. FLASHJIT_LIBCUDA names it.
//   FAKE_CUDA_SLOWER=X  after each event launches take longer by this share of their time
#include <cstdlib>
#include <cstring>

#include "tests/support/fake_driver.hpp"

namespace {

using flashjit::device::Driver;
using flashjit::test::FakeDriver;

/// What has nothing to tell.
template <class... Arguments>
CUresult succeed(Arguments...) {
  return CUDA_SUCCESS;
}

std::shared_ptr<const Driver> whole_driver() {
  auto driver = std::make_shared<Driver>(*FakeDriver::driver());
  if (const char* slower = std::getenv("FAKE_CUDA_SLOWER")) FakeDriver::state().slower = std::atof(slower);
  driver->init = [](unsigned) { return FakeDriver::state().init_result; };
  driver->driver_get_version = [](int* version) {
    *version = 13000;
    return CUDA_SUCCESS;
  };
#define FLASHJIT_FILL(member, name) \
  if (!driver->member) driver->member = succeed;
  FLASHJIT_DRIVER_FUNCTIONS(FLASHJIT_FILL)
#undef FLASHJIT_FILL
  return driver;
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) FakeDriver* flashjit_fake_cuda() { return &FakeDriver::state(); }

/// For Python: how many kernels were launched so far.
__attribute__((visibility("default"))) std::size_t flashjit_fake_launches() {
  return FakeDriver::state().launches.size();
}

__attribute__((visibility("default"))) CUresult cuGetProcAddress_v2(const char* symbol, void** address, int,
                                                                    cuuint64_t,
                                                                    CUdriverProcAddressQueryResult*) {
  static const std::shared_ptr<const Driver> driver = whole_driver();
  *address = nullptr;
#define FLASHJIT_LOOK_UP(member, name) \
  if (std::strcmp(symbol, #name) == 0) *address = reinterpret_cast<void*>(driver->member);
  FLASHJIT_DRIVER_FUNCTIONS(FLASHJIT_LOOK_UP)
#undef FLASHJIT_LOOK_UP
  return CUDA_SUCCESS;
}
}
