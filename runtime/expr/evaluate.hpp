// Programs on the CPU: exact integers, floats in fp64 or rounded to fp32 at each step.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "expr/graph.hpp"

namespace flashjit::expr {

/// The values of names.
struct Point {
  std::int32_t b = 0, h = 0, h_kv = 0, q = 0, kv = 0, seqlen_q = 0, seqlen_kv = 0, column = 0;
  double score = 0, out = 0;
  std::span<const double> row = {};  ///< of Q or K, whose element `column` is
  double sum_of_squares = 0;
};

/// A declared name's value: a contiguous tensor, or one number without sizes. The values outlive their users.
struct Bound {
  std::string name;
  std::span<const std::int64_t> size;
  std::span<const double> values;
  std::span<const std::int64_t> exact = {};  ///< of int64s, which a double may not hold; may be empty
};

/// A value of an operation's type: floats in `real`; ints, int64s and conditions (0 or 1) in `integer`.
struct Value {
  double real = 0;
  std::int64_t integer = 0;
};

/// How floats are computed.
enum class Floats : std::uint8_t {
  exact,    ///< in fp64
  rounded,  ///< in fp32: what masks compute, since a pair attends or does not
};

/// Programs that are evaluated together.
class Evaluation {
 public:
  /// `captures` has every name that the programs declare.
  Evaluation(std::vector<Bound> captures, Floats floats) : captures_(std::move(captures)), floats_(floats) {}

  /// The place of the tree's value among those that run() gives.
  int add(const NodePtr& node);
  std::vector<Value> run(const Point& point) const;

  /// Which capture, by its place in `captures`, and which of its elements a read reads.
  struct Element {
    std::size_t capture;
    std::int64_t index;
  };
  Element element(int read, const std::vector<Value>& values) const;
  /// Which column of the row an element_at() reads.
  std::int64_t row_column(int read, const Point& point, const std::vector<Value>& values) const;

 private:
  Value evaluate(int place, const Point& point, const std::vector<Value>& values) const;

  Graph graph_;
  std::vector<Bound> captures_;
  std::vector<int> capture_of_;  // of each operation; -1: reads none
  Floats floats_;
};

/// Towards zero, saturated; NaN gives 0.
std::int32_t to_int32(double value);
std::int64_t to_int64(double value);

}  // namespace flashjit::expr
