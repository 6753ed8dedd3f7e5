// What kernels and the reference compute with instead of dropout's probability.
#pragma once

#include <cstdint>

namespace flashjit {

/// drop_share is what draw_dropped() takes. The share that stays is a multiple of 2^-15, at least that, and
/// keep_scale its inverse.
struct Dropout {
  std::uint32_t drop_share;
  double keep_scale;
};
/// Throws Error(invalid_argument) when p is outside of [0, 1).
Dropout dropout_parameters(double p);

}  // namespace flashjit
