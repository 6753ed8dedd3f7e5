// Whether a problem can be computed on a device, asked before anything is allocated or loaded.
#pragma once

#include "flashjit/error.hpp"
#include "flashjit/spec.hpp"

namespace flashjit {

/// Whether some kernel family computes the spec at the shape on the device. If none does, `reason` is the
/// message of the Error that a call would throw: every family's reason, or the spec's or shape's mistake.
/// Asks the planner of calls, so that the answer is exact for the combination. Pure: opens no driver, no
/// compiler and no file, and takes well under a millisecond; any thread may ask. Tells nothing of a call's
/// pointers and strides, and nothing of a missing compiler.
///
/// device: Runtime::device(), or a GPU that is elsewhere: DeviceInfo::parse("sm_90a").
FLASHJIT_API Support can(const KernelSpec& spec, const AttentionShape& shape, const DeviceInfo& device);
/// The same before shapes are known: of one sequence with 16 heads, 4096 queries and 4096 keys. A shape of
/// its own matters where heads are no multiple of KV heads, a grid has too few blocks, or shared memory is
/// less than the architecture's common product has.
FLASHJIT_API Support can(const KernelSpec& spec, const DeviceInfo& device);

/// The same of one pass, by default the forward one.
inline Support can(const AttentionSpec& spec, const AttentionShape& shape, const DeviceInfo& device,
                   Pass pass = Pass::forward) {
  return can(KernelSpec{spec, pass}, shape, device);
}
inline Support can(const AttentionSpec& spec, const DeviceInfo& device, Pass pass = Pass::forward) {
  return can(KernelSpec{spec, pass}, device);
}

}  // namespace flashjit
