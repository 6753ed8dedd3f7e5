// A spec's score and mask programs on the CPU, with the captures that they read.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "expr/evaluate.hpp"
#include "flashjit/spec.hpp"

namespace flashjit::reference {

/// A value for a name that the programs declare: a contiguous tensor, or a scalar, which has no sizes and one
/// value. Values are already rounded to the declared type.
struct Captured {
  std::string name;
  std::vector<std::int64_t> size = {};
  std::vector<double> values = {};
  std::vector<std::int64_t> exact = {};  ///< of int64s, which a double may not hold; may be empty
};

/// A pair as programs see it: q, kv and the lengths belong to its own sequence.
struct Point {
  std::int64_t b, h, h_kv, q, kv, seqlen_q, seqlen_kv;
};

/// One gradient for each capture, contiguous; empty where none is wanted.
using CaptureGrads = std::vector<std::vector<double>>;

/// Captures and a pair as expressions take them.
std::vector<expr::Bound> bound(const std::vector<Captured>& captures);
expr::Point as_program_sees(const Point& point, double s, std::int64_t column = 0, double out = 0);

class Programs {
 public:
  /// `captures` must outlive this. Throws Error(invalid_argument) when a program is not sound, a declared
  /// name has no value, a name is not declared, or a value has another rank or size than it says.
  Programs(const AttentionSpec& spec, const std::vector<Captured>& captures);

  bool has_score() const { return score_root_ >= 0; }
  bool has_grads() const;  ///< some capture has one

  bool attends(const Point& point) const;
  /// What becomes of `s` = softmax_scale * (Q K^T) at a pair that attends.
  double score(const Point& point, double s) const;
  /// d score / d s there.
  double score_grad(const Point& point, double s) const;
  bool has_out_mod() const { return out_root_ >= 0; }
  /// What becomes of `out`, O's element of the point's query in `column`, and the derivative by `out`.
  double out_mod(const Point& point, std::int64_t column, double out) const;
  double out_mod_grad(const Point& point, std::int64_t column, double out) const;

  CaptureGrads zero_grads() const;
  /// Calls add(capture, element, d score / d element) for each read of a capture with a gradient.
  using AddGrad = std::function<void(std::size_t, std::int64_t, double)>;
  void add_grads(const Point& point, double s, const AddGrad& add) const;
  /// The same of what out_mod reads.
  void add_out_mod_grads(const Point& point, std::int64_t column, double out, const AddGrad& add) const;

 private:
  /// The places of a read and of d root / d read among the values of a program.
  struct Read {
    int read, derivative;
  };
  static std::vector<Read> reads_of(expr::Evaluation& evaluation, const expr::NodePtr& program);
  static void add_reads(const expr::Evaluation& evaluation, const std::vector<Read>& reads,
                        const std::vector<expr::Value>& values, const AddGrad& add);

  const std::vector<Captured>& captures_;
  std::vector<bool> wants_grad_;  ///< of each capture
  expr::Evaluation mask_, score_, out_;
  int mask_root_ = -1, score_root_ = -1, score_grad_ = -1;  ///< -1: all pairs; the identity
  int out_root_ = -1, out_grad_ = -1;                       ///< -1: the identity
  std::vector<Read> reads_, out_reads_;
};

}  // namespace flashjit::reference
