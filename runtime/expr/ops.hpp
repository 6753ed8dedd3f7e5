// What there is to know of each operation: its spelling, its precedence, what it takes and what it gives.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "flashjit/expr.hpp"

namespace flashjit::expr {

/// Types that an operation's operands may have.
enum class Takes : std::uint8_t {
  leaf,      ///< no operands of its own
  numbers,   ///< int, int64 or float; all become float when one is, else int64 when one is
  floats,    ///< ints become float
  integers,  ///< int or int64; all become int64 when one is
  int64s,    ///< int64
  booleans,  ///< bool
  alike,     ///< numbers, or all bool
  select,    ///< a bool and two alike
  any,
};

enum class Gives : std::uint8_t { same, boolean, integer, real, int64 };

constexpr int kSelectPrecedence = 1, kUnaryPrecedence = 12, kCallPrecedence = 13;

struct OpInfo {
  Op op;
  std::string_view text;  ///< "+", "exp"; empty for leaves
  int precedence;         ///< C's, 2 (||) to kUnaryPrecedence; kCallPrecedence: a function or a leaf
  int arity;
  Takes takes;
  Gives gives;
};

/// In the order of Op.
std::span<const OpInfo> all_ops();
const OpInfo& info(Op op);

inline bool is_operator(Op op) { return info(op).precedence < kCallPrecedence; }
inline bool is_function(Op op) { return !is_operator(op) && info(op).takes != Takes::leaf; }

inline bool is_comparison(Op op) { return op >= Op::equal && op <= Op::greater_equal; }
/// What a comparison says of two values, or of two intervals.
template <class Value>
auto compare(Op op, Value a, Value b) {
  switch (op) {
    case Op::equal:
      return a == b;
    case Op::not_equal:
      return a != b;
    case Op::less:
      return a < b;
    case Op::less_equal:
      return a <= b;
    case Op::greater:
      return a > b;
    default:
      return a >= b;
  }
}

std::string_view to_string(Name name);  // "score", ..., "sum_of_squares"
std::string_view to_string(Type type);  // "bool", "int", "float", "int64"
inline constexpr Name kNames[] = {Name::score, Name::b,      Name::h,        Name::h_kv,
                                  Name::q,     Name::kv,     Name::seqlen_q, Name::seqlen_kv,
                                  Name::out,   Name::column, Name::element,  Name::sum_of_squares};

/// Whether a declaration may have this name: an identifier that means nothing else; throws if not.
void check_name(std::string_view name);
constexpr std::size_t kLongestName = 64;

/// Longest text and largest tree of a program; trees on the way to other things may be larger.
constexpr int kMaxText = 64 << 10, kMaxDepth = 200, kMaxNodes = 4096;
constexpr int kMaxTreeDepth = 4000, kMaxTreeNodes = 1 << 20;
/// Throws Error(invalid_argument) when the tree is too large for a program.
void check_size(const Node& tree);

/// A mask whose text is a name.
struct NamedMask {
  std::string_view name;
  Expr mask;
};
const std::vector<NamedMask>& named_masks();

/// Type of the values that are read from a tensor or a scalar of `element`.
Type read_type(ElementType element);

/// The operation on operands, checked and promoted as the operators of Expr do: those are this.
Expr apply(Op op, std::vector<Expr> args);
Expr read(const Declaration& tensor, const std::vector<Expr>& indices);
Expr scalar(const Declaration& declaration);
Expr size(const Declaration& tensor, int dimension);

/// Whether an operation needs a declared name's value, or its size.
inline bool is_of_declared(Op op) { return op == Op::scalar || op == Op::read || op == Op::size; }

/// The text of an expression without its declarations; for messages and within to_string.
std::string body_text(const Node& node);

/// The declarations of a tree in the order of their first appearance. Throws Error(invalid_argument) when a
/// name is declared in two ways.
std::vector<Declaration> declarations_of(const Node& tree);

}  // namespace flashjit::expr
