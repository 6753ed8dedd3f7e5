// How trees are made: every node passes the checks here.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "expr/nodes.hpp"
#include "expr/ops.hpp"
#include "flashjit/error.hpp"
#include "flashjit/expr.hpp"
#include "flashjit/tensor.hpp"
#include "support/refuse.hpp"
#include "support/text.hpp"

namespace flashjit::expr {
namespace {

/// The node with its args' depth and size counted in. Bounded, so that what walks trees can recurse.
Expr finish(Node node) {
  for (const NodePtr& arg : node.args) {
    node.depth = std::max(node.depth, arg->depth + 1);
    node.size += arg->size;
    if (node.depth > kMaxTreeDepth || node.size > kMaxTreeNodes)
      refuse("a program grew beyond {} nodes or {} levels; at most {} nodes and {} levels make a program",
             kMaxTreeNodes, kMaxTreeDepth, kMaxNodes, kMaxDepth);
  }
  return Expr(std::make_shared<const Node>(std::move(node)));
}

std::string described(Op op) {
  return fmt::format("{}{}", is_operator(op) ? "operator " : "", info(op).text);
}

[[noreturn]] void refuse_operand(Op op, std::string_view takes, const Expr& arg) {
  refuse("{} takes {}, not {}: {}", described(op), takes, to_string(arg.type()),
         quoted(body_text(arg.node())));
}

Expr convert(Op op, Type type, const Expr& arg) {
  if (arg.type() == type) return arg;
  return finish({.op = op, .type = type, .args = {arg.pointer()}});
}

void require_type(Op op, std::string_view takes, Type type, const Expr& arg) {
  if (arg.type() != type) refuse_operand(op, takes, arg);
}

void require_number(Op op, const Expr& arg) {
  if (arg.type() == Type::boolean) refuse_operand(op, "int or float", arg);
}

void require_integer(Op op, const Expr& arg) {
  if (arg.type() != Type::integer && arg.type() != Type::int64) refuse_operand(op, "int", arg);
}

/// Makes all int64 when one is.
void widen(std::span<Expr> args) {
  if (std::ranges::none_of(args, [](const Expr& arg) { return arg.type() == Type::int64; })) return;
  for (Expr& arg : args) arg = to_int64(arg);
}

/// Makes all float when one is, or when `always`.
void promote(Op op, std::span<Expr> args, bool always) {
  for (const Expr& arg : args) require_number(op, arg);
  if (!always && std::ranges::none_of(args, [](const Expr& arg) { return arg.type() == Type::real; }))
    return widen(args);
  for (Expr& arg : args) arg = to_float(arg);
}

/// Numbers, or all bool.
void make_alike(Op op, std::span<Expr> args) {
  const auto booleans = std::ranges::count(args, Type::boolean, &Expr::type);
  if (booleans == 0) return promote(op, args, false);
  if (booleans != static_cast<std::ptrdiff_t>(args.size()))
    refuse("{} takes two numbers or two bools, not {} and {}: {} and {}", described(op),
           to_string(args[0].type()), to_string(args[1].type()), quoted(body_text(args[0].node())),
           quoted(body_text(args[1].node())));
}

/// Checks the operands and promotes them.
void prepare(Op op, std::span<Expr> args) {
  switch (info(op).takes) {
    case Takes::leaf:
    case Takes::any:
      return;
    case Takes::numbers:
      return promote(op, args, false);
    case Takes::floats:
      return promote(op, args, true);
    case Takes::integers:
      for (const Expr& arg : args) require_integer(op, arg);
      return widen(args);
    case Takes::int64s:
      for (const Expr& arg : args) require_type(op, "int64", Type::int64, arg);
      return;
    case Takes::booleans:
      for (const Expr& arg : args) require_type(op, "bool", Type::boolean, arg);
      return;
    case Takes::alike:
      return make_alike(op, args);
    case Takes::select:
      require_type(op, "a bool as its condition", Type::boolean, args[0]);
      return make_alike(op, args.subspan(1));
  }
}

Type result(Op op, const Expr& last) {
  switch (info(op).gives) {
    case Gives::boolean:
      return Type::boolean;
    case Gives::integer:
      return Type::integer;
    case Gives::real:
      return Type::real;
    case Gives::int64:
      return Type::int64;
    case Gives::same:
      break;
  }
  return last.type();
}

std::vector<NodePtr> pointers(const std::vector<Expr>& args) {
  std::vector<NodePtr> out;
  for (const Expr& arg : args) out.push_back(arg.pointer());
  return out;
}

bool same_node(const Node& a, const Node& b) {
  if (&a == &b) return true;
  return a.op == b.op && a.type == b.type && a.boolean == b.boolean && a.integer == b.integer &&
         std::bit_cast<std::uint32_t>(a.real) == std::bit_cast<std::uint32_t>(b.real) && a.name == b.name &&
         a.declaration == b.declaration &&
         std::ranges::equal(a.args, b.args,
                            [](const NodePtr& x, const NodePtr& y) { return same_node(*x, *y); });
}

}  // namespace

NodePtr Expr::literal(bool value) {
  return std::make_shared<const Node>(Node{.type = Type::boolean, .boolean = value});
}
NodePtr Expr::literal(std::int32_t value) {
  return std::make_shared<const Node>(Node{.type = Type::integer, .integer = value});
}
NodePtr Expr::literal(float value) {
  if (!std::isfinite(value))
    refuse("a program has the literal {}; literals are finite in fp32, and a mask program hides pairs",
           value);
  return std::make_shared<const Node>(Node{.type = Type::real, .real = value});
}

bool same(const Expr& a, const Expr& b) { return same_node(a.node(), b.node()); }

NameConstant::operator Expr() const { return finish({.op = Op::name, .type = type_of(name), .name = name}); }

Expr apply(Op op, std::vector<Expr> args) {
  const OpInfo& known = info(op);
  if (known.takes == Takes::leaf) throw Error(ErrorCode::internal, "apply makes no leaves");
  if (static_cast<int>(args.size()) != known.arity)
    refuse("{} takes {} argument{}, not {}", described(op), known.arity, known.arity == 1 ? "" : "s",
           args.size());
  prepare(op, args);
  if (op == Op::element_at) args[0] = to_int(args[0]);
  const Type type = result(op, args.back());
  if (known.takes == Takes::any) return convert(op, type, args[0]);
  return finish({.op = op, .type = type, .args = pointers(args)});
}

Expr read(const Declaration& tensor, const std::vector<Expr>& indices) {
  if (static_cast<int>(indices.size()) != tensor.rank)
    refuse("'{}' has {} dimension{}, but is read with {} {}", tensor.name, tensor.rank,
           tensor.rank == 1 ? "" : "s", indices.size(), indices.size() == 1 ? "index" : "indices");
  std::vector<Expr> ints;
  for (const Expr& index : indices) {
    if (index.type() != Type::integer && index.type() != Type::int64)
      refuse("an index of '{}' is int, not {}: {}", tensor.name, to_string(index.type()),
             quoted(body_text(index.node())));
    ints.push_back(to_int(index));
  }
  return finish(
      {.op = Op::read, .type = read_type(tensor.type), .args = pointers(ints), .declaration = tensor});
}

Expr size(const Declaration& tensor, int dimension) {
  if (dimension < 0 || dimension >= tensor.rank)
    refuse("size() takes a dimension of '{}' from 0 to {}, not {}", tensor.name, tensor.rank - 1, dimension);
  return finish({.op = Op::size, .type = Type::integer, .integer = dimension, .declaration = tensor});
}

Expr scalar(const Declaration& declaration) {
  check_name(declaration.name);
  return finish({.op = Op::scalar, .type = read_type(declaration.type), .declaration = declaration});
}

void check_size(const Node& tree) {
  if (tree.depth > kMaxDepth)
    refuse("a program is {} levels deep; at most {} are allowed", tree.depth, kMaxDepth);
  if (tree.size > kMaxNodes) refuse("a program has {} nodes; at most {} are allowed", tree.size, kMaxNodes);
}

Tensor::Tensor(std::string name, ElementType element, int rank)
    : declaration_{std::move(name), element, rank, false} {
  check_name(declaration_.name);
  if (rank < 1 || rank > kMaxCaptureDims)
    refuse("the tensor '{}' has {} dimensions; 1 to {} are allowed", declaration_.name, rank,
           kMaxCaptureDims);
}

Tensor Tensor::with_grad() const {
  if (read_type(declaration_.type) != Type::real)
    refuse("'{}' is {}, which has no gradient; grad goes with fp32, fp16 and bf16", declaration_.name,
           flashjit::to_string(declaration_.type));
  Tensor out = *this;
  out.declaration_.wants_grad = true;
  return out;
}

Expr Tensor::operator[](const Expr& index) const { return read({index}); }
// NOLINTNEXTLINE(performance-unnecessary-value-param): as the public interface has it
Expr Tensor::read(std::vector<Expr> indices) const { return expr::read(declaration_, indices); }

Expr Tensor::size(int dimension) const { return expr::size(declaration_, dimension); }

Expr scalar_int(std::string name) { return scalar({std::move(name), ElementType::int32, 0, false}); }
Expr scalar_float(std::string name) { return scalar({std::move(name), ElementType::fp32, 0, false}); }

Expr operator-(const Expr& a) { return apply(Op::negate, {a}); }
Expr operator~(const Expr& a) { return apply(Op::complement, {a}); }
Expr operator!(const Expr& a) { return apply(Op::logical_not, {a}); }
Expr operator+(const Expr& a, const Expr& b) { return apply(Op::add, {a, b}); }
Expr operator-(const Expr& a, const Expr& b) { return apply(Op::subtract, {a, b}); }
Expr operator*(const Expr& a, const Expr& b) { return apply(Op::multiply, {a, b}); }
Expr operator/(const Expr& a, const Expr& b) { return apply(Op::divide, {a, b}); }
Expr operator%(const Expr& a, const Expr& b) { return apply(Op::modulo, {a, b}); }
Expr operator<<(const Expr& a, const Expr& b) { return apply(Op::shift_left, {a, b}); }
Expr operator>>(const Expr& a, const Expr& b) { return apply(Op::shift_right, {a, b}); }
Expr operator&(const Expr& a, const Expr& b) { return apply(Op::bit_and, {a, b}); }
Expr operator|(const Expr& a, const Expr& b) { return apply(Op::bit_or, {a, b}); }
Expr operator^(const Expr& a, const Expr& b) { return apply(Op::bit_xor, {a, b}); }
Expr operator&&(const Expr& a, const Expr& b) { return apply(Op::logical_and, {a, b}); }
Expr operator||(const Expr& a, const Expr& b) { return apply(Op::logical_or, {a, b}); }
Expr operator==(const Expr& a, const Expr& b) { return apply(Op::equal, {a, b}); }
Expr operator!=(const Expr& a, const Expr& b) { return apply(Op::not_equal, {a, b}); }
Expr operator<(const Expr& a, const Expr& b) { return apply(Op::less, {a, b}); }
Expr operator<=(const Expr& a, const Expr& b) { return apply(Op::less_equal, {a, b}); }
Expr operator>(const Expr& a, const Expr& b) { return apply(Op::greater, {a, b}); }
Expr operator>=(const Expr& a, const Expr& b) { return apply(Op::greater_equal, {a, b}); }
Expr select(const Expr& condition, const Expr& a, const Expr& b) {
  return apply(Op::select, {condition, a, b});
}
Expr min(const Expr& a, const Expr& b) { return apply(Op::min, {a, b}); }
Expr max(const Expr& a, const Expr& b) { return apply(Op::max, {a, b}); }
Expr abs(const Expr& a) { return apply(Op::abs, {a}); }
Expr floor(const Expr& a) { return apply(Op::floor, {a}); }
Expr trunc(const Expr& a) { return apply(Op::trunc, {a}); }
Expr round(const Expr& a) { return apply(Op::round, {a}); }
Expr exp(const Expr& a) { return apply(Op::exp, {a}); }
Expr exp2(const Expr& a) { return apply(Op::exp2, {a}); }
Expr expm1(const Expr& a) { return apply(Op::expm1, {a}); }
Expr log(const Expr& a) { return apply(Op::log, {a}); }
Expr log2(const Expr& a) { return apply(Op::log2, {a}); }
Expr log1p(const Expr& a) { return apply(Op::log1p, {a}); }
Expr pow(const Expr& a, const Expr& b) { return apply(Op::pow, {a, b}); }
Expr sqrt(const Expr& a) { return apply(Op::sqrt, {a}); }
Expr rsqrt(const Expr& a) { return apply(Op::rsqrt, {a}); }
Expr tanh(const Expr& a) { return apply(Op::tanh, {a}); }
Expr sigmoid(const Expr& a) { return apply(Op::sigmoid, {a}); }
Expr erf(const Expr& a) { return apply(Op::erf, {a}); }
Expr sin(const Expr& a) { return apply(Op::sin, {a}); }
Expr cos(const Expr& a) { return apply(Op::cos, {a}); }
Expr to_float(const Expr& a) { return apply(Op::to_float, {a}); }
Expr to_int(const Expr& a) { return apply(Op::to_int, {a}); }
Expr to_bool(const Expr& a) { return apply(Op::to_bool, {a}); }
Expr to_int64(const Expr& a) { return apply(Op::to_int64, {a}); }
Expr low_word(const Expr& a) { return apply(Op::low_word, {a}); }
Expr high_word(const Expr& a) { return apply(Op::high_word, {a}); }
Expr element_at(const Expr& column) { return apply(Op::element_at, {column}); }

}  // namespace flashjit::expr
