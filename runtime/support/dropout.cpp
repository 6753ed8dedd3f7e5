#include "support/dropout.hpp"

#include <algorithm>
#include <cmath>

#include "support/refuse.hpp"

namespace flashjit {

Dropout dropout_parameters(double p) {
  if (!(p >= 0 && p < 1)) refuse("dropout_p is {}; it must be at least 0 and below 1", p);
  const double kept = std::max(std::round((1 - p) * 0x1p15), 1.0);  // of 2^15
  return {static_cast<std::uint32_t>(0x1p15 - kept) * 0x10001u, 0x1p15 / kept};
}

}  // namespace flashjit
