// Matrices, the arithmetic of a precision, and loops over heads: what the passes of the reference share.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <future>
#include <limits>
#include <numeric>
#include <thread>
#include <vector>

#include "reference/context.hpp"

namespace flashjit::reference {

inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

struct Matrix {
  std::int64_t rows = 0, columns = 0;
  std::vector<double> values;

  Matrix(std::int64_t rows, std::int64_t columns) : rows(rows), columns(columns), values(rows * columns) {}
  double* operator[](std::int64_t row) { return values.data() + row * columns; }
  const double* operator[](std::int64_t row) const { return values.data() + row * columns; }
};

inline Matrix transpose(const Matrix& a) {
  Matrix result(a.columns, a.rows);
  for (std::int64_t i = 0; i < a.rows; ++i) {
    for (std::int64_t j = 0; j < a.columns; ++j) result[j][i] = a[i][j];
  }
  return result;
}

/// A B with sums in `Sum`.
template <class Sum>
Matrix multiply(const Matrix& a, const Matrix& b) {
  const std::vector<Sum> right(b.values.begin(), b.values.end());
  Matrix result(a.rows, b.columns);
  std::vector<Sum> row(b.columns);
  for (std::int64_t i = 0; i < a.rows; ++i) {
    std::fill(row.begin(), row.end(), Sum{0});
    for (std::int64_t k = 0; k < a.columns; ++k) {
      const Sum factor = static_cast<Sum>(a[i][k]);
      if (factor == 0) continue;  // most of a masked P
      const Sum* from = right.data() + k * b.columns;
      for (std::int64_t j = 0; j < b.columns; ++j) row[j] += factor * from[j];
    }
    std::copy(row.begin(), row.end(), result[i]);
  }
  return result;
}

/// The arithmetic of a precision: how matrices are multiplied and what becomes of each result.
struct Arithmetic {
  DType dtype;
  Precision precision;

  double rounded(double value) const {
    return precision == Precision::exact ? value : round_to(dtype, value);
  }
  double rounded_score(double value) const {
    return precision == Precision::fused ? static_cast<float>(value) : rounded(value);
  }
  double sum(double a, double b) const {
    return precision == Precision::exact ? a + b : static_cast<float>(a + b);
  }
  void round(Matrix& a) const {
    if (precision != Precision::exact) {
      for (double& value : a.values) value = round_to(dtype, value);
    }
  }
  /// Rows of e4m3 whose largest is 256, as products of 8 bits have P.
  void round_to_codes(Matrix& a) const {
    if (precision == Precision::exact) return;
    for (std::int64_t i = 0; i < a.rows; ++i) {
      const double largest =
          std::accumulate(a[i], a[i] + a.columns, 0.0, [](double x, double y) { return std::max(x, y); });
      if (!(largest > 0)) continue;
      for (std::int64_t j = 0; j < a.columns; ++j)
        a[i][j] = round_to(DType::e4m3, a[i][j] * 256 / largest) * largest / 256;
    }
  }
  Matrix product(const Matrix& a, const Matrix& b) const {
    return precision == Precision::exact ? multiply<double>(a, b) : multiply<float>(a, b);
  }
};

/// Calls task(0) to task(count - 1) on all processors; rethrows what one of them throws.
inline void parallel_for(std::int64_t count, const std::function<void(std::int64_t)>& task) {
  std::atomic<std::int64_t> next{0};
  const auto work = [&] {
    for (std::int64_t i = next++; i < count; i = next++) task(i);
  };
  const std::int64_t processors = std::max(1u, std::thread::hardware_concurrency());
  std::vector<std::future<void>> helpers;
  for (std::int64_t i = 1; i < std::min(processors, count); ++i) {
    helpers.push_back(std::async(std::launch::async, work));
  }
  work();
  for (auto& helper : helpers) helper.get();
}

/// Some rows of a tensor [..., columns].
inline Matrix slice(const std::vector<double>& tensor, Rows rows, std::int64_t columns) {
  Matrix result(rows.count, columns);
  std::copy_n(tensor.begin() + rows.begin * columns, rows.count * columns, result.values.begin());
  return result;
}

inline void put(const Matrix& from, std::vector<double>& tensor, Rows rows) {
  std::copy(from.values.begin(), from.values.end(), tensor.begin() + rows.begin * from.columns);
}

}  // namespace flashjit::reference
