#include "flashjit/can.hpp"

#include "plan/plan.hpp"

namespace flashjit {

Support can(const KernelSpec& spec, const AttentionShape& shape, const DeviceInfo& device) {
  try {
    plan::make_plan(spec, shape, device, {});
    return Support::yes();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::unsupported && error.code() != ErrorCode::invalid_argument) throw;
    return Support::no(error.message());
  }
}

Support can(const KernelSpec& spec, const DeviceInfo& device) {
  constexpr AttentionShape kAny = {1, 16, 16, 4096, 4096};
  return can(spec, kAny, device);
}

}  // namespace flashjit
