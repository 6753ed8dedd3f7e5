#include "expr/fold.hpp"

#include <algorithm>
#include <cmath>
#include <optional>
#include <unordered_map>

#include "expr/evaluate.hpp"
#include "expr/ops.hpp"
#include "templates/common/int_math.cuh"

namespace flashjit::expr {
namespace {

using Folded = std::optional<Expr>;  // nothing: stays as it is

bool is_literal(const Expr& x) { return x.node().op == Op::literal; }
bool is(const Expr& x, bool value) {
  return is_literal(x) && x.type() == Type::boolean && x.node().boolean == value;
}
bool is(const Expr& x, std::int32_t value) {
  return is_literal(x) && x.type() == Type::integer && x.node().integer == value;
}
/// Signs of zeros count.
bool is(const Expr& x, float value) {
  return is_literal(x) && x.type() == Type::real && x.node().real == value &&
         std::signbit(x.node().real) == std::signbit(value);
}

/// Kernels may flush subnormal numbers to zero, and literals are finite.
bool is_plain(float value) { return std::isnormal(value) || value == 0; }

/// One operation on a literal.
Folded of_literal(Op op, const Expr& x) {
  const Node& a = x.node();
  const bool integer = a.type == Type::integer, real = a.type == Type::real;
  if (real && !is_plain(a.real)) return {};
  switch (op) {
    case Op::negate:
      return integer ? Expr(wrap_negate(a.integer)) : Expr(-a.real);
    case Op::abs:
      return integer ? Expr(wrap_abs(a.integer)) : Expr(std::fabs(a.real));
    case Op::complement:
      return Expr(~a.integer);
    case Op::logical_not:
      return Expr(!a.boolean);
    case Op::floor:
      return Expr(std::floor(a.real));
    case Op::trunc:
      return Expr(std::trunc(a.real));
    case Op::round:
      return Expr(std::nearbyint(a.real));
    case Op::to_float:
      return Expr(integer ? static_cast<float>(a.integer) : a.boolean ? 1.0f : 0.0f);
    case Op::to_int:
      return Expr(real ? to_int32(a.real) : std::int32_t{a.boolean});
    case Op::to_bool:
      return Expr(real ? a.real != 0 : a.integer != 0);
    default:
      return {};  // exp to cos: as exact as the machine that computes them
  }
}

Expr of_ints(Op op, std::int32_t x, std::int32_t y) {
  switch (op) {
    case Op::add:
      return wrap_add(x, y);
    case Op::subtract:
      return wrap_subtract(x, y);
    case Op::multiply:
      return wrap_multiply(x, y);
    case Op::divide:
      return wrap_divide(x, y);
    case Op::modulo:
      return wrap_modulo(x, y);
    case Op::shift_left:
      return wrap_shift_left(x, y);
    case Op::shift_right:
      return wrap_shift_right(x, y);
    case Op::bit_and:
      return x & y;
    case Op::bit_or:
      return x | y;
    case Op::bit_xor:
      return x ^ y;
    case Op::min:
      return std::min(x, y);
    case Op::max:
      return std::max(x, y);
    default:
      return compare(op, x, y);
  }
}

Folded of_floats(Op op, float x, float y) {
  if (!is_plain(x) || !is_plain(y)) return {};
  if (info(op).gives == Gives::boolean) return Expr(compare(op, x, y));
  float value = 0;
  switch (op) {
    case Op::add:
      value = x + y;
      break;
    case Op::subtract:
      value = x - y;
      break;
    case Op::multiply:
      value = x * y;
      break;
    case Op::divide:
      value = x / y;
      break;
    case Op::min:
    case Op::max:
      if (x == y) return {};  // of two zeros, either may come
      value = (op == Op::min) == (x < y) ? x : y;
      break;
    default:
      return {};
  }
  // A product or a quotient may be zero because it is too small.
  const bool vanished = value == 0 && (op == Op::multiply || op == Op::divide) && x != 0;
  return is_plain(value) && !vanished ? Folded(value) : Folded();
}

/// One operation on two literals of one type.
Folded of_literals(Op op, const Node& a, const Node& b) {
  switch (a.type) {
    case Type::boolean:
      if (op == Op::logical_and) return Expr(a.boolean && b.boolean);
      if (op == Op::logical_or) return Expr(a.boolean || b.boolean);
      return Expr(compare(op, a.boolean, b.boolean));
    case Type::integer:
      return of_ints(op, a.integer, b.integer);
    case Type::real:
    case Type::int64:
      break;
  }
  return of_floats(op, a.real, b.real);
}

/// x + 0, 0 + x and the like, where x is not a literal.
Folded without_effect(Op op, const Expr& a, const Expr& b) {
  switch (op) {
    case Op::add:
      if (is(a, 0) || is(a, -0.0f)) return b;
      if (is(b, 0) || is(b, -0.0f)) return a;
      return {};
    case Op::subtract:
      return is(b, 0) || is(b, 0.0f) ? Folded(a) : Folded();
    case Op::multiply:
      if (is(a, 1) || is(a, 1.0f) || is(b, 0)) return b;
      if (is(b, 1) || is(b, 1.0f) || is(a, 0)) return a;
      return {};
    case Op::divide:
      if (is(b, 1) || is(b, 1.0f)) return a;
      if (is(b, 0)) return b;
      return is(a, 0) ? Folded(a) : Folded();
    case Op::modulo:
      if (is(b, 1) || is(b, -1) || is(b, 0)) return Expr(0);
      return is(a, 0) ? Folded(a) : Folded();
    case Op::shift_left:
    case Op::shift_right:
      return is(b, 0) || is(a, 0) ? Folded(a) : Folded();
    case Op::bit_and:
      if (is(a, 0) || is(b, -1)) return a;
      return is(b, 0) || is(a, -1) ? Folded(b) : Folded();
    case Op::bit_or:
      if (is(a, -1) || is(b, 0)) return a;
      return is(b, -1) || is(a, 0) ? Folded(b) : Folded();
    case Op::bit_xor:
      if (is(a, 0)) return b;
      return is(b, 0) ? Folded(a) : Folded();
    case Op::logical_and:
      if (is(a, false) || is(b, true)) return a;
      return is(b, false) || is(a, true) ? Folded(b) : Folded();
    case Op::logical_or:
      if (is(a, true) || is(b, false)) return a;
      return is(b, true) || is(a, false) ? Folded(b) : Folded();
    default:
      return {};
  }
}

bool is_int64(const Expr& x) { return x.type() == Type::int64; }

/// The int that an int64 is made of; nothing: it is made of something else.
Folded narrow(const Expr& x) {
  if (x.node().op != Op::to_int64 || x.node().args[0]->type != Type::integer) return {};
  return Expr(x.node().args[0]);
}

/// Whether an int is no extreme one: then it compares with a saturated int64 as with the int64.
bool is_moderate(const Expr& x) {
  const Node& node = x.node();
  if (node.op == Op::name) return true;
  const bool of_names =
      node.op == Op::subtract && node.args[0]->op == Op::name && node.args[1]->op == Op::name;
  return of_names || (is_literal(x) && node.integer > INT32_MIN && node.integer < INT32_MAX);
}

Op mirrored(Op op) {
  switch (op) {
    case Op::less:
      return Op::greater;
    case Op::less_equal:
      return Op::greater_equal;
    case Op::greater:
      return Op::less;
    case Op::greater_equal:
      return Op::less_equal;
    default:
      return op;
  }
}

/// A comparison of an int with an int64, by ints alone.
Folded compare_saturated(Op op, const Expr& a, const Expr& b) {
  const Folded left = narrow(a);
  if (!left || !is_moderate(*left)) return {};
  return apply(op, {*left, to_int(b)});
}
/// kv <= q + offset[b] as kv - q <= offset[b], a bound that masks know. The sum saturates, and kv - q is no
/// extreme int.
Folded compare_moved(Op op, const Expr& a, const Expr& b) {
  const Folded left = narrow(a);
  if (!left || left->node().op != Op::name || b.node().op != Op::add) return {};
  for (const std::size_t i : {0, 1}) {
    const Folded name = narrow(Expr(b.node().args[i]));
    if (name && name->node().op == Op::name)
      return apply(op, {*left - *name, to_int(Expr(b.node().args[1 - i]))});
  }
  return {};
}

/// By their 32-bit words, whose values over a tile masks can bound.
Expr compare_words(Op op, const Expr& a, const Expr& b) {
  const Expr high_a = high_word(a), high_b = high_word(b), low_a = low_word(a), low_b = low_word(b);
  if (op == Op::equal || op == Op::not_equal) {
    const Expr same = low_a == low_b && high_a == high_b;
    return op == Op::equal ? same : !same;
  }
  if (op == Op::greater || op == Op::greater_equal) return compare_words(mirrored(op), b, a);
  const Expr low = low_a ^ INT32_MIN, other = low_b ^ INT32_MIN;  // as numbers without a sign
  const Expr by_low = high_a == high_b && (op == Op::less ? low < other : low <= other);
  return high_a < high_b || by_low;
}

Expr compare_int64(Op op, const Expr& a, const Expr& b) {
  const Folded left = narrow(a), right = narrow(b);
  if (left && right) return apply(op, {*left, *right});
  for (const auto& rule : {compare_moved, compare_saturated}) {
    if (const Folded found = rule(op, a, b)) return *found;
    if (const Folded found = rule(mirrored(op), b, a)) return *found;
  }
  return compare_words(op, a, b);
}

/// Operations on int64s that ints do as well.
Folded with_ints(Op op, const std::vector<Expr>& args) {
  const Expr& x = args[0];
  const Folded of = narrow(x);
  if (is_comparison(op)) return compare_int64(op, x, args[1]);
  if (op == Op::to_bool) return low_word(x) != 0 || high_word(x) != 0;
  if (op == Op::low_word || op == Op::to_int) return of;
  if (op == Op::high_word) return of ? Folded(*of >> 31) : Folded();
  if (op == Op::to_float) return of ? Folded(to_float(*of)) : Folded();
  return {};
}

/// The operation on operands that are folded.
Folded fold_once(Op op, const std::vector<Expr>& args) {
  if (op == Op::select) return is_literal(args[0]) ? Folded(args[is(args[0], true) ? 1 : 2]) : Folded();
  if (is_int64(args[0])) {
    if (const Folded folded = with_ints(op, args)) return Expr(expr::fold(folded->pointer()));
  }
  if (args.size() == 1) {
    if (is_literal(args[0])) return of_literal(op, args[0]);
    const bool undone = op == Op::negate || op == Op::complement || op == Op::logical_not;
    return undone && args[0].node().op == op ? Folded(Expr(args[0].node().args[0])) : Folded();
  }
  if (is_literal(args[0]) && is_literal(args[1])) return of_literals(op, args[0].node(), args[1].node());
  return without_effect(op, args[0], args[1]);
}

class Folder {
 public:
  NodePtr fold(const NodePtr& tree) {
    if (tree->args.empty()) return tree;
    if (const auto known = known_.find(tree.get()); known != known_.end()) return known->second;
    return known_[tree.get()] = fold_new(tree);
  }

 private:
  NodePtr fold_new(const NodePtr& tree) {
    std::vector<Expr> args;
    bool changed = false;
    for (const NodePtr& arg : tree->args) {
      args.emplace_back(fold(arg));
      changed |= args.back().pointer() != arg;
    }
    if (tree->op == Op::read) return changed ? read(tree->declaration, args).pointer() : tree;
    if (const Folded folded = fold_once(tree->op, args)) return folded->pointer();
    if (!changed) return tree;
    return apply(tree->op, std::move(args)).pointer();
  }

  std::unordered_map<const Node*, NodePtr> known_;  // subtrees may be shared
};

}  // namespace

NodePtr fold(const NodePtr& tree) { return Folder().fold(tree); }

}  // namespace flashjit::expr
