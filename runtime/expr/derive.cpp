#include "expr/derive.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include "expr/graph.hpp"
#include "expr/nodes.hpp"

namespace flashjit::expr {
namespace {

constexpr float kLn2 = 0.693147181f, kTwoBySqrtPi = 1.12837917f;

bool is_zero(const NodePtr& a) { return is_real(*a, 0); }
NodePtr compared(Op op, const NodePtr& a, const NodePtr& b) { return make_node(op, Type::boolean, {a, b}); }
NodePtr call(Op op, const NodePtr& a) { return make_node(op, Type::real, {a}); }
NodePtr choice(const NodePtr& condition, const NodePtr& a, const NodePtr& b) {
  if (a == b || (is_literal(*a) && is_literal(*b) && a->real == b->real)) return a;
  return make_node(Op::select, Type::real, {condition, a, b});
}
/// Whether a branch sets the value to zero.
bool has_zero_arm(const Node& node) {
  return node.op == Op::select && (is_zero(node.args[1]) || is_zero(node.args[2]));
}
/// f(x) in the other arm of a select with a zero arm, for an f that maps zero to zero.
template <class Function>
NodePtr in_other_arm(const Node& select, Function f) {
  const NodePtr &condition = select.args[0], &a = select.args[1], &b = select.args[2];
  return is_zero(a) ? choice(condition, a, f(b)) : choice(condition, f(a), b);
}
NodePtr negated(const NodePtr& a) {
  if (is_literal(*a)) return make_real(-a->real);
  if (a->op == Op::negate) return a->args[0];
  if (has_zero_arm(*a)) return in_other_arm(*a, [](const NodePtr& arm) { return negated(arm); });
  return make_node(Op::negate, Type::real, {a});
}
NodePtr difference(const NodePtr& a, const NodePtr& b) {
  if (is_zero(b)) return a;
  if (is_literal(*a) && is_literal(*b)) return make_real(a->real - b->real);
  return make_node(Op::subtract, Type::real, {a, b});
}
bool is_linear(Op op) {
  return op == Op::negate || op == Op::add || op == Op::subtract || op == Op::multiply || op == Op::divide;
}
/// Whether floats of this form are numbers at every call.
bool never_nan(const Node& node) { return is_literal(node) || node.op == Op::to_float; }

/// Reverse mode, as frameworks do: each operation's gradient is complete before it goes on to its operands. A
/// branch that is not taken hands zero on, and zero stays zero whatever it is multiplied by: no slope of
/// sqrt(max(score, 0)) is infinity times zero, nor of select(score > 0, sqrt(score), 0).
class Derivative {
 public:
  Derivative(const NodePtr& root, const NodePtr& variable)
      : root_(graph_.add(root)), variable_(graph_.add(variable)) {}

  NodePtr get() {
    const NodePtr zero = make_real(0);
    if (variable_ > root_) return zero;
    gradients_.assign(root_ + 1, zero);
    gradients_[root_] = make_real(1);
    for (int place = root_; place > variable_; --place) {
      const NodePtr node = graph_[place].node;
      if (!is_zero(gradients_[place])) hand_on(node, gradients_[place]);
    }
    return gradients_[variable_];
  }

 private:
  bool depends(const NodePtr& node) {
    const int place = graph_.add(node);
    while (static_cast<int>(depends_.size()) < graph_.size()) {
      const int next = static_cast<int>(depends_.size());
      const std::vector<int>& args = graph_[next].args;
      depends_.push_back(next == variable_ ||
                         std::ranges::any_of(args, [&](int arg) { return depends_[arg]; }));
    }
    return depends_[place];
  }

  /// Whether a branch may set it to zero, alone or together with others.
  bool may_be_cut(const NodePtr& node) {
    if (const auto known = cut_.find(node); known != cut_.end()) return known->second;
    const auto arg_may_be = [&](std::size_t i) { return i < node->args.size() && may_be_cut(node->args[i]); };
    bool cut = has_zero_arm(*node);
    if (node->op == Op::select) cut = cut || arg_may_be(1) || arg_may_be(2);
    if (is_linear(node->op)) cut = arg_may_be(0) || arg_may_be(1);
    return cut_[node] = cut;
  }

  NodePtr sum(const NodePtr& a, const NodePtr& b) {
    if (is_zero(a)) return b;
    if (is_zero(b)) return a;
    if (is_literal(*a) && is_literal(*b)) return make_real(a->real + b->real);
    if (a->op == Op::select && b->op == Op::select && graph_.add(a->args[0]) == graph_.add(b->args[0]))
      return choice(a->args[0], sum(a->args[1], b->args[1]), sum(a->args[2], b->args[2]));
    if (b->op == Op::negate) return difference(a, b->args[0]);
    if (a->op == Op::negate) return difference(b, a->args[0]);
    return make_node(Op::add, Type::real, {a, b});
  }

  /// f(gradient), a multiple of it.
  template <class Function>
  NodePtr scaled(const NodePtr& gradient, Function f) {
    if (has_zero_arm(*gradient))
      return in_other_arm(*gradient, [&](const NodePtr& arm) { return scaled(arm, f); });
    const NodePtr multiple = f(gradient);
    if (is_literal(*gradient) || !may_be_cut(gradient)) return multiple;
    const NodePtr zero = make_real(0);
    return choice(compared(Op::equal, gradient, zero), zero, multiple);
  }

  NodePtr product(const NodePtr& gradient, const NodePtr& slope) {
    if (is_literal(*slope)) return times(gradient, slope);
    return scaled(gradient, [&](const NodePtr& arm) { return times(arm, slope); });
  }
  NodePtr quotient(const NodePtr& gradient, const NodePtr& b) {
    if (is_literal(*b) && std::isfinite(1 / b->real)) return times(gradient, make_real(1 / b->real));
    if (!depends(b)) return product(gradient, make_node(Op::divide, Type::real, {make_real(1), b}));
    return scaled(gradient, [&](const NodePtr& arm) { return make_node(Op::divide, Type::real, {arm, b}); });
  }

  /// Factors that do not depend on the variable are gathered at the right.
  NodePtr times(const NodePtr& a, const NodePtr& b) {
    if (is_zero(a) || is_real(*b, 1)) return a;
    if (is_zero(b) || is_real(*a, 1)) return b;
    if (is_literal(*a) && is_literal(*b) && std::isfinite(a->real * b->real))
      return make_real(a->real * b->real);
    if (has_zero_arm(*a)) return in_other_arm(*a, [&](const NodePtr& arm) { return times(arm, b); });
    if (has_zero_arm(*b)) return in_other_arm(*b, [&](const NodePtr& arm) { return times(a, arm); });
    if (depends(b) && !depends(a)) return times(b, a);
    if (is_real(*b, -1)) return negated(a);
    if (is_real(*a, -1)) return negated(b);
    const auto has_constant = [&](const NodePtr& node) {
      return node->op == Op::multiply && depends(node) && !depends(node->args[1]);
    };
    if (has_constant(a)) return times(a->args[0], times(a->args[1], b));
    if (has_constant(b)) return times(times(a, b->args[0]), b->args[1]);
    return make_node(Op::multiply, Type::real, {a, b});
  }

  /// The slope of a function of one argument.
  NodePtr slope(const NodePtr& f) {
    const NodePtr& x = f->args[0];
    const NodePtr one = make_real(1), zero = make_real(0);
    const auto over = [](const NodePtr& a, const NodePtr& b) {
      return make_node(Op::divide, Type::real, {a, b});
    };
    switch (f->op) {
      case Op::abs:
        return choice(compared(Op::greater, x, zero), one,
                      choice(compared(Op::less, x, zero), make_real(-1), zero));
      case Op::exp:
        return f;
      case Op::exp2:
        return times(f, make_real(kLn2));
      case Op::expm1:
        return call(Op::exp, x);
      case Op::log:
        return over(one, x);
      case Op::log2:
        return over(one, times(x, make_real(kLn2)));
      case Op::log1p:
        return over(one, sum(one, x));
      case Op::sqrt:
        return times(make_real(0.5f), call(Op::rsqrt, x));
      case Op::rsqrt:
        return over(times(make_real(-0.5f), f), x);
      case Op::tanh:
        return difference(one, times(f, f));
      case Op::sigmoid:
        return times(f, difference(one, f));
      case Op::erf:
        return times(call(Op::exp, negated(times(x, x))), make_real(kTwoBySqrtPi));
      case Op::sin:
        return call(Op::cos, x);
      case Op::cos:
        return negated(call(Op::sin, x));
      default:
        return zero;  // floor, trunc, round
    }
  }

  void add(const NodePtr& arg, const NodePtr& gradient) {
    if (!depends(arg)) return;
    NodePtr& all = gradients_[graph_.add(arg)];
    all = sum(gradient, all);
  }

  /// A zero exponent has no slope in a zero base, nor a zero base in the exponent.
  void hand_on_power(const NodePtr& node, const NodePtr& gradient) {
    const NodePtr &a = node->args[0], &b = node->args[1], zero = make_real(0);
    const NodePtr by_base = times(b, make_node(Op::pow, Type::real, {a, difference(b, make_real(1))}));
    const auto unless_zero = [&](const NodePtr& x, const NodePtr& slope) {
      if (is_literal(*x)) return is_zero(x) ? zero : slope;
      return choice(compared(Op::equal, x, zero), zero, slope);
    };
    add(a, product(gradient, unless_zero(b, by_base)));
    add(b, product(gradient, unless_zero(a, times(node, call(Op::log, a)))));
  }

  /// Whether min or max gives the first operand: it loses if it is NaN.
  static NodePtr first_is_taken(const NodePtr& node) {
    const NodePtr &a = node->args[0], &b = node->args[1];
    const bool least = node->op == Op::min;
    if (never_nan(*b)) return compared(least ? Op::less_equal : Op::greater_equal, a, b);
    const NodePtr not_second =
        make_node(Op::logical_not, Type::boolean, {compared(least ? Op::less : Op::greater, b, a)});
    if (never_nan(*a)) return not_second;
    return make_node(Op::logical_and, Type::boolean, {not_second, compared(Op::equal, a, a)});
  }

  void hand_on_choice(const NodePtr& condition, const NodePtr& a, const NodePtr& b, const NodePtr& gradient) {
    const NodePtr zero = make_real(0);
    add(a, choice(condition, gradient, zero));
    add(b, choice(condition, zero, gradient));
  }

  void hand_on(const NodePtr& node, const NodePtr& gradient) {
    const auto arg = [&](std::size_t i) -> const NodePtr& { return node->args[i]; };
    switch (node->op) {
      case Op::literal:
      case Op::name:
      case Op::scalar:
      case Op::read:
      case Op::element_at:
      case Op::to_float:
        return;
      case Op::modulo:  // a - trunc(a / b) * b
        add(arg(0), gradient);
        return add(
            arg(1),
            negated(product(gradient, call(Op::trunc, make_node(Op::divide, Type::real, {arg(0), arg(1)})))));
      case Op::pow:
        return hand_on_power(node, gradient);
      case Op::negate:
        return add(arg(0), negated(gradient));
      case Op::add:
        add(arg(0), gradient);
        return add(arg(1), gradient);
      case Op::subtract:
        add(arg(0), gradient);
        return add(arg(1), negated(gradient));
      case Op::multiply:
        add(arg(0), product(gradient, arg(1)));
        return add(arg(1), product(gradient, arg(0)));
      case Op::divide:  // 1 / b and -(a / b) / b
        add(arg(0), quotient(gradient, arg(1)));
        return add(arg(1), negated(quotient(product(gradient, node), arg(1))));
      case Op::select:
        return hand_on_choice(arg(0), arg(1), arg(2), gradient);
      case Op::min:
      case Op::max:
        return hand_on_choice(first_is_taken(node), arg(0), arg(1), gradient);
      default:
        return add(arg(0), product(gradient, slope(node)));
    }
  }

  Graph graph_;
  int root_, variable_;
  std::vector<NodePtr> gradients_;  // of the root, by each of its operations
  std::vector<bool> depends_;       // of each of the graph's operations, on the variable
  std::map<NodePtr, bool> cut_;     // see may_be_cut()
};

}  // namespace

NodePtr derivative(const NodePtr& root, const NodePtr& variable) { return Derivative(root, variable).get(); }

namespace {

/// Each node of a program that `wanted` accepts, once.
template <class Wanted>
std::vector<NodePtr> nodes_of(const NodePtr& root, const Wanted& wanted) {
  Graph graph;
  graph.add(root);
  std::vector<NodePtr> found;
  for (int i = 0; i < graph.size(); ++i)
    if (wanted(graph.node(i))) found.push_back(graph[i].node);
  return found;
}

}  // namespace

std::vector<NodePtr> reads_with_grad(const NodePtr& root) {
  return nodes_of(root, [](const Node& node) { return node.op == Op::read && node.declaration.wants_grad; });
}

std::vector<NodePtr> reads_of_row(const NodePtr& root) {
  return nodes_of(root, [](const Node& node) { return node.op == Op::element_at; });
}

}  // namespace flashjit::expr
