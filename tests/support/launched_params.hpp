// What a launch on the fake driver handed over.
#pragma once

#include "plan/params_layout.hpp"
#include "tests/support/fake_driver.hpp"

namespace flashjit::test {

/// Zeros where the kernel has no such members.
inline Params launched_params(const FakeDriver::Launch& launch, const plan::KernelPlan& kernel) {
  Params params{};
  const std::byte* from = launch.params.data();
  for (const plan::ParamsLayout::Part& part : plan::params_layout(kernel).parts) {
    std::memcpy(reinterpret_cast<std::byte*>(&params) + part.begin, from, part.bytes);
    from += part.bytes;
  }
  return params;
}

}  // namespace flashjit::test
