// Score and mask programs as C++ expressions: what is written here, or parsed from text, becomes CUDA code,
// its derivative, the bounds of the loops and the CPU reference.
//
//   using namespace flashjit::expr;
//   spec.score = score + tensor("slopes", ElementType::fp32, 1)[h] * to_float(kv - q);
//   spec.mask = q >= kv && q - kv < 1024;
//   spec.score = parse("50.0 * tanh(score / 50.0)");
#pragma once

#include <concepts>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "flashjit/types.hpp"

namespace flashjit::expr {

/// int is 32 bits and wraps, int64 is 64 bits, whose sums and differences saturate and all else wraps; float
/// is fp32.
enum class Type : std::uint8_t { boolean, integer, real, int64 };

/// Names of a program. Score and mask programs have the first eight. A program of O has `out`, an element of
/// O, and `column`, its column, in place of score and kv; one of Q's or K's rows `element`, the row's
/// `sum_of_squares` and `column`.
enum class Name : std::uint8_t {
  score,
  b,
  h,
  h_kv,
  q,
  kv,
  seqlen_q,
  seqlen_kv,
  out,
  column,
  element,
  sum_of_squares
};

enum class Op : std::uint8_t {
  literal,
  name,
  scalar,
  read,
  size,  // leaves; a read's arguments are its indices, a size's integer is the dimension
  negate,
  complement,
  logical_not,  // -x ~x !x
  add,
  subtract,
  multiply,
  divide,
  modulo,  // int or float; the rest has the dividend's sign
  shift_left,
  shift_right,
  bit_and,
  bit_or,
  bit_xor,  // int
  logical_and,
  logical_or,  // bool
  equal,
  not_equal,
  less,
  less_equal,
  greater,
  greater_equal,  // int or float; equal and not_equal bool, too
  select,         // select(condition, a, b)
  min,
  max,
  abs,  // int or float
  floor,
  trunc,
  round,  // to the even one of two
  exp,
  exp2,
  expm1,  // exp(x) - 1
  log,
  log2,
  log1p,  // log(1 + x)
  pow,
  sqrt,
  rsqrt,
  tanh,
  sigmoid,
  erf,
  sin,
  cos,       // float
  to_float,  // of int or bool
  to_int,    // of float or bool
  to_bool,   // of int or float
  to_int64,  // of all others
  low_word,
  high_word,  // int: 32 bits of an int64
  element_at  // float: the row's element in a column, an int
};

/// A scalar or a captured tensor declared by a program and bound by name at the call.
struct Declaration {
  std::string name;
  ElementType type = ElementType::fp32;  ///< of a scalar: int32 or fp32
  int rank = 0;                          ///< 0: a scalar
  bool wants_grad = false;               ///< tensors of floats; not of mask programs

  bool is_scalar() const { return rank == 0; }
  bool operator==(const Declaration&) const = default;
};

struct Node;
using NodePtr = std::shared_ptr<const Node>;

/// A node of a program's tree; immutable, checked on creation. Literals are finite.
struct Node {
  Op op = Op::literal;
  Type type = Type::real;
  std::vector<NodePtr> args = {};
  bool boolean = false;          ///< literal of type boolean
  std::int32_t integer = 0;      ///< literal of type integer; dimension of Op::size
  float real = 0;                ///< literal of type real
  Name name = Name::score;       ///< of Op::name
  Declaration declaration = {};  ///< of Op::scalar, Op::read and Op::size
  int depth = 1;                 ///< nodes on the longest path down, including this one
  int size = 1;                  ///< nodes of the tree; a node reached in two ways counts twice
};

/// A typed expression: a cheap value. Operators and functions check their operands' types and throw
/// Error(invalid_argument) that names the operation, its operands and the allowed types. An int meeting a
/// float becomes a float. Converting an operand to its own type is a no-op.
class FLASHJIT_API Expr {
 public:
  Expr(std::same_as<bool> auto value) : Expr(literal(value)) {}
  Expr(std::same_as<std::int32_t> auto value) : Expr(literal(value)) {}
  Expr(std::same_as<float> auto value) : Expr(literal(value)) {}
  Expr(std::same_as<double> auto value) : Expr(literal(static_cast<float>(value))) {}  ///< rounded to fp32
  explicit Expr(NodePtr node) : node_(std::move(node)) {}

  Type type() const { return node_->type; }
  const Node& node() const { return *node_; }
  const NodePtr& pointer() const { return node_; }

 private:
  static NodePtr literal(bool value);
  static NodePtr literal(std::int32_t value);
  static NodePtr literal(float value);

  NodePtr node_;
};

/// Whether both are the same tree.
FLASHJIT_API bool same(const Expr& a, const Expr& b);

/// A name as a constant of the language, such as q.
struct FLASHJIT_API NameConstant {
  Name name;
  operator Expr() const;
};
inline constexpr NameConstant score{Name::score}, b{Name::b}, h{Name::h}, h_kv{Name::h_kv}, q{Name::q},
    kv{Name::kv}, seqlen_q{Name::seqlen_q}, seqlen_kv{Name::seqlen_kv}, out{Name::out}, column{Name::column},
    element{Name::element}, sum_of_squares{Name::sum_of_squares};

/// A captured tensor of 1 to 6 dimensions: slopes[h], bias(b, h, q, kv). An index out of range is clamped
/// into the tensor; RuntimeOptions::check_indices reports it. Integer types read as int, int64 as int64,
/// bool as bool, float types as float.
class FLASHJIT_API Tensor {
 public:
  Tensor(std::string name, ElementType element, int rank);
  /// The same tensor, with its gradient; float types only.
  Tensor with_grad() const;
  Expr operator[](const Expr& index) const;
  template <class... Indices>
  Expr operator()(const Indices&... indices) const {
    return read(std::vector<Expr>{Expr(indices)...});
  }
  Expr read(std::vector<Expr> indices) const;
  /// Its size in a dimension, an int that each call gives.
  Expr size(int dimension) const;

 private:
  Declaration declaration_;
};
inline Tensor tensor(std::string name, ElementType element, int rank) {
  return {std::move(name), element, rank};
}
FLASHJIT_API Expr scalar_int(std::string name);
FLASHJIT_API Expr scalar_float(std::string name);

FLASHJIT_API Expr operator-(const Expr& a);
FLASHJIT_API Expr operator~(const Expr& a);
FLASHJIT_API Expr operator!(const Expr& a);
FLASHJIT_API Expr operator+(const Expr& a, const Expr& b);
FLASHJIT_API Expr operator-(const Expr& a, const Expr& b);
FLASHJIT_API Expr operator*(const Expr& a, const Expr& b);
FLASHJIT_API Expr operator/(const Expr& a, const Expr& b);
FLASHJIT_API Expr operator%(const Expr& a, const Expr& b);
FLASHJIT_API Expr operator<<(const Expr& a, const Expr& b);
FLASHJIT_API Expr operator>>(const Expr& a, const Expr& b);
FLASHJIT_API Expr operator&(const Expr& a, const Expr& b);
FLASHJIT_API Expr operator|(const Expr& a, const Expr& b);
FLASHJIT_API Expr operator^(const Expr& a, const Expr& b);
FLASHJIT_API Expr operator&&(const Expr& a, const Expr& b);
FLASHJIT_API Expr operator||(const Expr& a, const Expr& b);
FLASHJIT_API Expr operator==(const Expr& a, const Expr& b);
FLASHJIT_API Expr operator!=(const Expr& a, const Expr& b);
FLASHJIT_API Expr operator<(const Expr& a, const Expr& b);
FLASHJIT_API Expr operator<=(const Expr& a, const Expr& b);
FLASHJIT_API Expr operator>(const Expr& a, const Expr& b);
FLASHJIT_API Expr operator>=(const Expr& a, const Expr& b);
FLASHJIT_API Expr select(const Expr& condition, const Expr& a, const Expr& b);
// In parentheses for the macros of windows.h.
FLASHJIT_API Expr(min)(const Expr& a, const Expr& b);
FLASHJIT_API Expr(max)(const Expr& a, const Expr& b);
FLASHJIT_API Expr abs(const Expr& a);
FLASHJIT_API Expr floor(const Expr& a);
FLASHJIT_API Expr trunc(const Expr& a);
FLASHJIT_API Expr round(const Expr& a);
FLASHJIT_API Expr exp(const Expr& a);
FLASHJIT_API Expr exp2(const Expr& a);
FLASHJIT_API Expr expm1(const Expr& a);
FLASHJIT_API Expr log(const Expr& a);
FLASHJIT_API Expr log2(const Expr& a);
FLASHJIT_API Expr log1p(const Expr& a);
FLASHJIT_API Expr pow(const Expr& a, const Expr& b);
FLASHJIT_API Expr sqrt(const Expr& a);
FLASHJIT_API Expr rsqrt(const Expr& a);
FLASHJIT_API Expr tanh(const Expr& a);
FLASHJIT_API Expr sigmoid(const Expr& a);
FLASHJIT_API Expr erf(const Expr& a);
FLASHJIT_API Expr sin(const Expr& a);
FLASHJIT_API Expr cos(const Expr& a);
FLASHJIT_API Expr to_float(const Expr& a);
FLASHJIT_API Expr to_int(const Expr& a);
FLASHJIT_API Expr to_bool(const Expr& a);
FLASHJIT_API Expr to_int64(const Expr& a);
FLASHJIT_API Expr low_word(const Expr& a);
FLASHJIT_API Expr high_word(const Expr& a);
/// An element of the row that a program of Q or K changes; a column out of range is clamped into the row.
FLASHJIT_API Expr element_at(const Expr& column);

/// Parses a program. Throws Error(invalid_argument) with the text, a caret and what was expected.
FLASHJIT_API Expr parse(std::string_view text);
/// The program's canonical text, with its declarations; parse() gives the same tree.
FLASHJIT_API std::string to_string(const Expr& expr);

}  // namespace flashjit::expr
