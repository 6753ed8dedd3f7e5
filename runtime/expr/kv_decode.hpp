// What codes of a KV format mean by an expression: its values, its CUDA, and what rows are encoded by.
#pragma once

#include <string>
#include <string_view>

#include "expr/evaluate.hpp"
#include "flashjit/kv_format.hpp"

namespace flashjit {

/// An expression of `code`, an int, and of the floats `scale` and `zero`; rounded as kernels compute it.
class DecodeExpression {
 public:
  /// Throws Error(invalid_argument) where the text is no such expression.
  explicit DecodeExpression(std::string_view text, expr::Floats floats = expr::Floats::rounded);
  DecodeExpression(const DecodeExpression&) = delete;  // its evaluation reads its own numbers
  DecodeExpression& operator=(const DecodeExpression&) = delete;

  bool reads_scale() const { return reads_scale_; }
  bool reads_zero() const { return reads_zero_; }
  double value(int code, double scale, double zero) const;
  /// The lines of a function of these three names that returns the value.
  std::string cuda_lines() const;

 private:
  mutable double code_ = 0, scale_ = 0, zero_ = 0;
  expr::Graph graph_;
  expr::Evaluation evaluation_;
  int root_ = 0;
  bool reads_scale_ = false, reads_zero_ = false, is_real_ = true;
};

/// The expression in format.decode. A thread parses each text once.
const DecodeExpression& decode_expression(const KvFormat& format);

/// Codes whose values are a block's extremes, whatever its scale and zero point are, so that these can be
/// searched.
struct DecodeExtremes {
  int largest = 0;              ///< code of the largest magnitude; of formats without zero points
  int highest = 0, lowest = 0;  ///< of the others
  bool zero_raises = false;     ///< the highest value grows with the zero point
};
/// Throws Error(invalid_argument) where values do not grow with the scale, so that a search finds none.
DecodeExtremes decode_extremes(const KvFormat& format);

}  // namespace flashjit
