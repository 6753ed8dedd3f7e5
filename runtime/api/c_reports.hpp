// Reports of prepared kernels, as the C interface tells them.
#pragma once

#include "flashjit/flashjit.h"
#include "flashjit/runtime.hpp"

namespace flashjit::c_api {

/// Gives the report to `receiver`, if there is one.
void tell(const KernelReport& report, flashjit_kernel_receiver receiver, void* user);

}  // namespace flashjit::c_api
