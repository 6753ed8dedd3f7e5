// A score program's first and second derivatives along tangents, on the CPU.
#pragma once

#include <cstdint>
#include <vector>

#include "reference/programs.hpp"

namespace flashjit::reference {

/// A pair's tangents, along the tangents of `s` = softmax_scale * (Q K^T) and of the captures.
struct PairScoreTangents {
  double tangent = 0;                   ///< of the score after the program
  double slope = 1, slope_tangent = 0;  ///< d score / d s, and its tangent
  struct Read {
    std::size_t capture;
    std::int64_t element;
    double slope, slope_tangent;  ///< d score / d element, and its tangent
  };
  std::vector<Read> reads = {};  ///< of captures with a gradient
};

/// A tangent times a derivative, which may be NaN where the tangent is zero.
inline double along(double tangent, double derivative) { return tangent == 0 ? 0 : tangent * derivative; }

class ScoreTangents {
 public:
  /// `capture_tangents`: one for each capture, or none at all; zeros where it is empty. Both must outlive
  /// this.
  ScoreTangents(const ScoreProgram& score, const std::vector<Captured>& captures,
                const std::vector<std::vector<double>>& capture_tangents);

  PairScoreTangents at(const Point& point, double s, double s_tangent) const;

 private:
  /// The places of a value and of its derivatives: by the score before the program, and by each read.
  struct Derived {
    int value = -1, by_score = -1;
    std::vector<int> by_read = {};
  };
  Derived derived(const expr::NodePtr& program);
  double tangent_of(const Derived& derived, const std::vector<expr::Value>& values, double s_tangent,
                    const std::vector<double>& tangents_of_reads) const;

  const std::vector<std::vector<double>>& capture_tangents_;
  expr::Evaluation program_;
  std::vector<expr::NodePtr> reads_;
  std::vector<int> read_places_;
  Derived score_, slope_;
  std::vector<Derived> read_slopes_;
};

}  // namespace flashjit::reference
