// NVRTC and the driver of tests/fake, and environment variables for as long as a test needs them.
#pragma once

#include <dlfcn.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "fake_driver.hpp"

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

/// What the libcuda of tests/fake is asked and answers; not the state of FakeDriver::driver() in this
/// program.
inline FakeDriver& fake_cuda() {
  void* library = ::dlopen(FLASHJIT_FAKE_CUDA, RTLD_NOW | RTLD_LOCAL);
  if (!library) throw std::runtime_error(::dlerror());
  return *reinterpret_cast<FakeDriver* (*)()>(::dlsym(library, "flashjit_fake_cuda"))();
}

}  // namespace flashjit::test
