// NVRTC, the driver and the NVML of tests/fake, and environment variables for as long as a test needs them.
#pragma once

#include <dlfcn.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "tests/fake/nvml.hpp"
#include "tests/support/built.hpp"
#include "tests/support/fake_driver.hpp"

namespace flashjit::test {

/// Sets a variable; unsets it in the end.
class Variable {
 public:
  Variable(const char* name, const std::string& value) : name_(name) { ::setenv(name, value.c_str(), 1); }
  ~Variable() { ::unsetenv(name_); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
};

/// The state that a library of tests/fake keeps, behind its function of this name.
template <class State>
State& state_of(const std::string& library, const char* function) {
  void* opened = ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!opened) throw std::runtime_error(::dlerror());
  return *reinterpret_cast<State* (*)()>(::dlsym(opened, function))();
}

/// What the libcuda of tests/fake is asked and answers; not the state of FakeDriver::driver() in this
/// program.
inline FakeDriver& fake_cuda() {
  return state_of<FakeDriver>(built(FLASHJIT_FAKE_CUDA), "flashjit_fake_cuda");
}
inline FakeNvml& fake_nvml() { return state_of<FakeNvml>(built(FLASHJIT_FAKE_NVML), "flashjit_fake_nvml"); }

}  // namespace flashjit::test
