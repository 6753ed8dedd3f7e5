// What is measured with: plausible inputs for what a spec leaves to the call, and the work that a call is.
#pragma once

#include <cstdint>
#include <vector>

#include "flashjit/patterns.hpp"
#include "flashjit/spec.hpp"

namespace flashjit::autotune {

/// Seeds inputs that a spec leaves to the call, where it is measured and its tiles are counted.
inline constexpr std::uint64_t kInputSeed = 1;
/// Share of the blocks that attend when a spec with a block map is measured.
inline constexpr double kDefaultMapDensity = 0.25;
/// Dropout probability that a spec with dropout is measured with.
inline constexpr double kDefaultDropout = 0.1;

/// The block map a spec is measured with, for all batches and heads: a window around the diagonal, ending at
/// it under a mask, with `density` of every row's blocks. Empty when the spec has no block map. Throws
/// Error(invalid_argument) when density is not in (0, 1].
BlockPattern plausible_map(const KernelSpec& spec, const AttentionShape& shape, double density);

/// What a call computes and must move at least.
struct Work {
  double pairs = 0;  ///< (q, kv) that attend, over all batches and query heads
  double operations =
      0;  ///< of the matrix products, two a multiply-add: forward 2, backward 5, jvp 6, backward_jvp 12
  double bytes = 0;  ///< every input and output tensor once
};

/// `map` as given by plausible_map(); key padding and dropout are not counted.
Work work_of(const KernelSpec& spec, const AttentionShape& shape, const BlockPattern& map);

/// The middle value, or the mean of the middle two. `values` is not empty.
double median(std::vector<double> values);

}  // namespace flashjit::autotune
