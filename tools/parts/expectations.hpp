// What attention gets on a GPU: which family computes it, how fast that should be, and what keeps better
// families away.
#pragma once

#include <string>
#include <vector>

#include "flashjit/spec.hpp"

namespace flashjit::command {

/// One element type on a GPU.
struct Expectation {
  DType dtype;
  Family forward, backward;  ///< of head dimension 128, causal
  /// The share of the GPU's peak of that type, which no kernel beats there: the tuner's estimate, from 0
  /// to 1.
  double forward_share, backward_share;
  std::string missing;   ///< why the device's better families do not; empty: it is the best that it has
  double times_of_fp16;  ///< estimated, of both passes together
};

/// For fp16, bf16 and fp32; a type that no family can do is left out.
std::vector<Expectation> expectations_of(const DeviceInfo& device);

/// One line of it.
std::string to_string(const Expectation& expectation);

}  // namespace flashjit::command
