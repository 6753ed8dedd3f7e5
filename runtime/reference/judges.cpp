// How far results may be from the reference.
#include <algorithm>
#include <cmath>
#include <limits>

#include "reference/reference.hpp"
#include "support/dtypes.hpp"
#include "support/refuse.hpp"

namespace flashjit::reference {
namespace {

Verdict judged_by(double yardstick, double error, double factor) {
  const double limit = factor * yardstick + 1e-5;
  if (!std::isfinite(limit)) {
    refuse(
        "the rounded computation overflows its element type, so it sets no error limit; use smaller values "
        "or fp32");
  }
  return {error, limit};
}

}  // namespace

double max_abs_error(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) {
    refuse("cannot compare {} elements with {}; give two tensors of one size", a.size(), b.size());
  }
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i]) continue;  // equal infinities too
    const double error = std::fabs(a[i] - b[i]);
    if (std::isnan(error)) return std::numeric_limits<double>::infinity();
    largest = std::max(largest, error);
  }
  return largest;
}

Verdict judge(const std::vector<double>& got, const std::vector<double>& exact,
              const std::vector<double>& rounded, double factor) {
  return judged_by(max_abs_error(rounded, exact), max_abs_error(got, exact), factor);
}

Verdict judge_dsinks(const AttentionShape& shape, const std::vector<double>& got, SinkGrads exact,
                     SinkGrads rounded, double factor) {
  std::vector<double> squares(shape.heads_q);
  for (std::int64_t row = 0; row < std::ssize(exact.rows); ++row) {
    const double error = rounded.rows[row] - exact.rows[row];
    squares[row / shape.seqlen_q % shape.heads_q] += error * error;
  }
  double yardstick = max_abs_error(rounded.sums, exact.sums);
  for (const double sum : squares) yardstick = std::max(yardstick, std::sqrt(sum));
  return judged_by(yardstick, max_abs_error(got, exact.sums), factor);
}

Verdict judge_capture(DType dtype, const std::vector<double>& got, CaptureGrad exact,
                      const std::vector<double>& rounded, double factor) {
  const auto& [sums, squares, counts] = exact;
  const double rounding = dtype_info(dtype).unit_roundoff / 2, adding = dtype_info(DType::fp32).unit_roundoff;
  double yardstick = max_abs_error(rounded, sums);
  for (std::size_t i = 0; i < sums.size(); ++i) {
    const double terms = rounding * rounding * squares[i];
    const double additions = adding * adding * counts[i] * (sums[i] * sums[i] + squares[i]);
    yardstick = std::max(yardstick, std::sqrt(terms + additions));
  }
  return judged_by(yardstick, max_abs_error(got, sums), factor);
}

}  // namespace flashjit::reference
