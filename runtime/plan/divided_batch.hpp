// Prefills beside decodes in one call over a cache: each part of the batch has the kernel that suits it.
#pragma once

#include <optional>

#include "flashjit/spec.hpp"
#include "plan/kernel_plan.hpp"

namespace flashjit::plan {

/// A sequence with more queries is a prefill. Up to so many, as of drafts, it reads keys as one query does.
inline constexpr int kMostQueriesOfDecode = 16;

struct DividedBatch {
  KernelPlan prefills, decodes;
  AttentionShape decodes_shape;
};

/// Two kernels for the call's sequences: prefills in whole Q tiles, decodes by equal shares of all their
/// keys. Each skips the other's sequences, whose lengths are on the device. Empty if `whole`, the kernel of
/// all sequences, does as well.
std::optional<DividedBatch> divided_batch(const KernelPlan& whole, const AttentionShape& shape,
                                          const DeviceInfo& device);

}  // namespace flashjit::plan
