#include "expr/derive.hpp"

#include <algorithm>
#include <optional>

#include "expr/graph.hpp"
#include "expr/nodes.hpp"

namespace flashjit::expr {
namespace {

constexpr float kLn2 = 0.693147181f, kTwoBySqrtPi = 1.12837917f;

NodePtr negated(const NodePtr& a) {
  if (is_literal(*a)) return make_real(-a->real);
  if (a->op == Op::negate) return a->args[0];
  return make_node(Op::negate, Type::real, {a});
}
NodePtr sum(const NodePtr& a, const NodePtr& b) {
  if (is_real(*a, 0)) return b;
  if (is_real(*b, 0)) return a;
  if (is_literal(*a) && is_literal(*b)) return make_real(a->real + b->real);
  return make_node(Op::add, Type::real, {a, b});
}
NodePtr difference(const NodePtr& a, const NodePtr& b) {
  if (is_real(*a, 0)) return negated(b);
  if (is_real(*b, 0)) return a;
  if (is_literal(*a) && is_literal(*b)) return make_real(a->real - b->real);
  return make_node(Op::subtract, Type::real, {a, b});
}
NodePtr quotient(const NodePtr& a, const NodePtr& b) {
  if (is_real(*a, 0) || is_real(*b, 1)) return a;
  if (is_literal(*a) && is_literal(*b)) return make_real(a->real / b->real);
  return make_node(Op::divide, Type::real, {a, b});
}
NodePtr choice(const NodePtr& condition, const NodePtr& a, const NodePtr& b) {
  if (a == b || (is_literal(*a) && is_literal(*b) && a->real == b->real)) return a;
  return make_node(Op::select, Type::real, {condition, a, b});
}
NodePtr compared(Op op, const NodePtr& a, const NodePtr& b) { return make_node(op, Type::boolean, {a, b}); }
NodePtr call(Op op, const NodePtr& a) { return make_node(op, Type::real, {a}); }

class Derivative {
 public:
  explicit Derivative(const NodePtr& variable) { variable_ = graph_.add(variable); }

  NodePtr of(const NodePtr& node) {
    if (node->type != Type::real) return make_real(0);
    const int place = graph_.add(node);
    if (place == variable_) return make_real(1);
    if (place < static_cast<int>(known_.size()) && known_[place]) return *known_[place];
    NodePtr result = rule(node);
    known_.resize(graph_.size());
    known_[place] = result;
    return result;
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

  /// A zero factor is one that does not depend on the variable: the product is zero whatever the other is.
  /// Factors that do not depend on the variable are gathered at the right.
  NodePtr product(const NodePtr& a, const NodePtr& b) {
    if (is_real(*a, 0) || is_real(*b, 1)) return a;
    if (is_real(*b, 0) || is_real(*a, 1)) return b;
    if (is_literal(*a) && is_literal(*b)) return make_real(a->real * b->real);
    if (depends(b) && !depends(a)) return product(b, a);
    if (is_real(*b, -1)) return negated(a);
    const auto has_constant = [&](const NodePtr& node) {
      return node->op == Op::multiply && depends(node) && !depends(node->args[1]);
    };
    if (has_constant(a)) return product(a->args[0], product(a->args[1], b));
    if (has_constant(b)) return product(product(a, b->args[0]), b->args[1]);
    return make_node(Op::multiply, Type::real, {a, b});
  }

  /// What a function of one argument, f(x), multiplies the argument's derivative by.
  NodePtr outer(const NodePtr& f) {
    const NodePtr& x = f->args[0];
    const NodePtr one = make_real(1), zero = make_real(0);
    switch (f->op) {
      case Op::abs:
        return choice(compared(Op::greater, x, zero), one,
                      choice(compared(Op::less, x, zero), make_real(-1), zero));
      case Op::exp:
        return f;
      case Op::exp2:
        return product(f, make_real(kLn2));
      case Op::expm1:
        return call(Op::exp, x);
      case Op::log:
        return quotient(one, x);
      case Op::log2:
        return quotient(one, product(x, make_real(kLn2)));
      case Op::log1p:
        return quotient(one, sum(one, x));
      case Op::sqrt:
        return product(make_real(0.5f), call(Op::rsqrt, x));
      case Op::rsqrt:
        return quotient(product(make_real(-0.5f), f), x);
      case Op::tanh:
        return difference(one, product(f, f));
      case Op::sigmoid:
        return product(f, difference(one, f));
      case Op::erf:
        return product(call(Op::exp, negated(product(x, x))), make_real(kTwoBySqrtPi));
      case Op::sin:
        return call(Op::cos, x);
      case Op::cos:
        return negated(call(Op::sin, x));
      default:
        return zero;  // floor, trunc, round
    }
  }

  /// Of a power whose base is `a`: a zero exponent has no slope in a zero base, nor a zero base in the
  /// exponent.
  NodePtr of_power(const NodePtr& node) {
    const NodePtr &a = node->args[0], &b = node->args[1], zero = make_real(0);
    const NodePtr by_base = product(b, make_node(Op::pow, Type::real, {a, difference(b, make_real(1))}));
    const NodePtr by_exponent = choice(compared(Op::equal, a, zero), zero, product(node, call(Op::log, a)));
    return sum(product(choice(compared(Op::equal, b, zero), zero, by_base), of(a)),
               product(by_exponent, of(b)));
  }

  NodePtr rule(const NodePtr& node) {
    const auto arg = [&](std::size_t i) -> const NodePtr& { return node->args[i]; };
    switch (node->op) {
      case Op::literal:
      case Op::name:
      case Op::scalar:
      case Op::read:
      case Op::to_float:
        return make_real(0);
      case Op::modulo:  // a - trunc(a / b) * b
        return difference(of(arg(0)), product(call(Op::trunc, quotient(arg(0), arg(1))), of(arg(1))));
      case Op::pow:
        return of_power(node);
      case Op::negate:
        return negated(of(arg(0)));
      case Op::add:
        return sum(of(arg(0)), of(arg(1)));
      case Op::subtract:
        return difference(of(arg(0)), of(arg(1)));
      case Op::multiply:
        return sum(product(of(arg(0)), arg(1)), product(arg(0), of(arg(1))));
      case Op::divide:
        // a' / b - (a / b) * (b' / b)
        return difference(quotient(of(arg(0)), arg(1)), product(node, quotient(of(arg(1)), arg(1))));
      case Op::select:
        return choice(arg(0), of(arg(1)), of(arg(2)));
      case Op::min:
        return choice(compared(Op::less_equal, arg(0), arg(1)), of(arg(0)), of(arg(1)));
      case Op::max:
        return choice(compared(Op::greater_equal, arg(0), arg(1)), of(arg(0)), of(arg(1)));
      default: {
        const NodePtr inner = of(arg(0));
        return is_real(*inner, 0) ? inner : product(outer(node), inner);
      }
    }
  }

  Graph graph_;
  int variable_;
  std::vector<bool> depends_;  // of each of the graph's operations, on the variable
  std::vector<std::optional<NodePtr>> known_;
};

}  // namespace

NodePtr derivative(const NodePtr& root, const NodePtr& variable) { return Derivative(variable).of(root); }

std::vector<NodePtr> reads_with_grad(const NodePtr& root) {
  Graph graph;
  graph.add(root);
  std::vector<NodePtr> reads;
  for (int i = 0; i < graph.size(); ++i) {
    const Node& node = graph.node(i);
    if (node.op == Op::read && node.declaration.wants_grad) reads.push_back(graph[i].node);
  }
  return reads;
}

}  // namespace flashjit::expr
