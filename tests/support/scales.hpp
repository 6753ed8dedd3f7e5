// Scales of K and V of 8 bits, as a test's case has them.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "flashjit/tensor.hpp"
#include "support/dtypes.hpp"

namespace flashjit::test {

/// [sequences, pages, heads, rows], contiguous: all 1 or the case's.
struct Scales {
  std::array<std::int64_t, 4> size{1, 1, 1, 1};
  std::vector<double> values = {};

  /// Its key must have one: until then it is NaN.
  double& at(std::int64_t b, std::int64_t page, std::int64_t head, std::int64_t row) {
    const std::array<std::int64_t, 4> all = {b, page, head, row};
    std::int64_t place = 0;
    for (std::size_t i = 0; i < all.size(); ++i) place = place * size[i] + (size[i] > 1 ? all[i] : 0);
    return values[place];
  }
  ConstScaleView view(const void* data) const {
    if (values.empty()) return {};
    return {
        static_cast<const float*>(data), size, {size[1] * size[2] * size[3], size[2] * size[3], size[3], 1}};
  }
};

/// `of_each_key`: as append() gives them. Else, without scales of keys, by turns one for all, for heads, and
/// for heads of sequences; else for pages (or sequences, where there are none), for keys, and for both.
inline Scales make_scales(bool key_scales, unsigned seed, const std::array<std::int64_t, 4>& all,
                          bool of_each_key = false) {
  const auto [sequences, pages, heads, rows] = all;
  const std::array<Scales, 6> forms = {Scales{{1, 1, 1, 1}},       {{1, 1, heads, 1}},
                                       {{sequences, 1, heads, 1}}, {{1, pages, heads, 1}},
                                       {{1, pages, heads, rows}},  {{sequences, 1, 1, rows}}};
  Scales scales = forms[of_each_key ? 4 : (key_scales ? 3 : 0) + seed % 3];
  std::size_t count = 1;
  for (const std::int64_t size : scales.size) count *= static_cast<std::size_t>(size);
  scales.values.assign(count, std::numeric_limits<double>::quiet_NaN());
  return scales;
}

/// Normal values in codes, and a scale that makes them normal, but for up to 8 times.
inline double random_code(DType type, std::mt19937& random) {
  const DTypeInfo& info = dtype_info(type);
  return info.round(std::normal_distribution<double>(0, info.largest / 8)(random));
}
inline double random_scale(DType type, std::mt19937& random) {
  return static_cast<float>(8 / dtype_info(type).largest *
                            std::exp2(std::uniform_real_distribution<double>(-2, 1)(random)));
}

}  // namespace flashjit::test
