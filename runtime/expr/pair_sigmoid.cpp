#include "expr/pair_sigmoid.hpp"

#include <algorithm>

#include "expr/derive.hpp"
#include "expr/nodes.hpp"

namespace flashjit::expr {
namespace {

constexpr float kLog2E = 1.44269504f;

class Rewriting {
 public:
  explicit Rewriting(Graph& graph) : graph_(graph) {}

  /// Whether the tree is made as PairSigmoid says; `found` is its sigmoid.
  bool is_smooth(const NodePtr& node, NodePtr& found) {
    const int place = graph_.add(node);
    if (graph_.uniform(place) || is_literal(*node)) return true;
    const auto arg = [&](std::size_t i) { return is_smooth(node->args[i], found); };
    switch (node->op) {
      case Op::name:
        return true;
      case Op::negate:
      case Op::to_float:
        return arg(0);
      case Op::add:
      case Op::subtract:
      case Op::multiply:
        return arg(0) && arg(1);
      case Op::divide:
        return node->type == Type::real && uniform(node->args[1]) && arg(0);
      case Op::sigmoid: {
        if (found && graph_.add(found) != place) return false;
        found = node;
        NodePtr within;
        return is_smooth(node->args[0], within) && !within;
      }
      default:
        return false;
    }
  }

  /// The node times a factor that all pairs share, which becomes a part of others where there are any.
  NodePtr scaled(const NodePtr& node, const NodePtr& factor) {
    if (node->op == Op::negate) return scaled(node->args[0], negated(factor));
    if (!uniform(node) && (node->op == Op::add || node->op == Op::subtract))
      return real(node->op, scaled(node->args[0], factor), scaled(node->args[1], factor));
    if (!uniform(node) && node->op == Op::multiply) {
      const NodePtr &a = node->args[0], &b = node->args[1];
      if (uniform(b)) return scaled(a, times(b, factor));
      if (uniform(a)) return scaled(b, times(a, factor));
      return is_name(*b, Name::score) ? real(Op::multiply, scaled(b, factor), a)
                                      : real(Op::multiply, scaled(a, factor), b);
    }
    if (!uniform(node) && node->op == Op::divide)
      return scaled(node->args[0], real(Op::divide, factor, node->args[1]));
    return times(node, factor);
  }
  /// The tree with its factors at the score.
  NodePtr with_scaled_scores(const NodePtr& node) {
    if (uniform(node) || node->type != Type::real) return node;
    const auto arg = [&](std::size_t i) { return with_scaled_scores(node->args[i]); };
    switch (node->op) {
      case Op::add:
      case Op::subtract:
        return real(node->op, arg(0), arg(1));
      case Op::negate:
        return scaled(arg(0), make_real(-1));
      case Op::multiply:
        if (uniform(node->args[1])) return scaled(arg(0), node->args[1]);
        if (uniform(node->args[0])) return scaled(arg(1), node->args[0]);
        return real(Op::multiply, arg(0), arg(1));
      case Op::divide:
        return scaled(arg(0), real(Op::divide, make_real(1), node->args[1]));
      default:
        return node;
    }
  }

  /// x s (1 - s) as x s - x s s, whose first product the weight has.
  NodePtr with_shared_products(const NodePtr& node) {
    if (uniform(node) || node->type != Type::real || node->args.empty() || node->op == Op::sigmoid)
      return node;
    if (node->op == Op::multiply) {
      const NodePtr &a = node->args[0], &b = node->args[1];
      if (const NodePtr s = of_slope(node)) return less_itself(s, s);
      for (const auto& [x, slope] : {std::pair{a, b}, {b, a}})
        if (const NodePtr s = of_slope(slope))
          return less_itself(real(Op::multiply, with_shared_products(x), s), s);
    }
    std::vector<NodePtr> args;
    for (const NodePtr& arg : node->args) args.push_back(with_shared_products(arg));
    return make_node(node->op, node->type, std::move(args));
  }

  /// Whether the tree is SiLU of the score, or that times a factor that all pairs share.
  bool is_silu(const NodePtr& node) {
    if (node->op != Op::multiply) return false;
    const auto is_score = [](const NodePtr& x) { return is_name(*x, Name::score); };
    const auto of_both = [&](const NodePtr& x, const NodePtr& s) {
      const bool has_factor = x->op == Op::multiply && is_score(x->args[0]) && uniform(x->args[1]);
      return (is_score(x) || has_factor) && s->op == Op::sigmoid && is_score(s->args[0]);
    };
    return of_both(node->args[0], node->args[1]) || of_both(node->args[1], node->args[0]);
  }

 private:
  bool uniform(const NodePtr& node) { return graph_.uniform(graph_.add(node)); }
  static NodePtr real(Op op, const NodePtr& a, const NodePtr& b) { return make_node(op, Type::real, {a, b}); }
  static NodePtr negated(const NodePtr& a) {
    return is_literal(*a) ? make_real(-a->real) : make_node(Op::negate, Type::real, {a});
  }
  static NodePtr times(const NodePtr& a, const NodePtr& b) {
    if (is_real(*a, 1)) return b;
    if (is_real(*b, 1)) return a;
    if (is_literal(*a) && is_literal(*b)) return make_real(a->real * b->real);
    return real(Op::multiply, a, b);
  }
  /// s of s (1 - s); null: it is something else.
  NodePtr of_slope(const NodePtr& node) {
    if (node->op != Op::multiply) return nullptr;
    const NodePtr &s = node->args[0], &rest = node->args[1];
    const bool is_slope = s->op == Op::sigmoid && rest->op == Op::subtract && is_real(*rest->args[0], 1) &&
                          graph_.add(rest->args[1]) == graph_.add(s);
    return is_slope ? s : nullptr;
  }
  static NodePtr less_itself(const NodePtr& x, const NodePtr& s) {
    return real(Op::subtract, x, real(Op::multiply, x, s));
  }

  Graph& graph_;
};

bool is_finite_operation(Op op) {
  switch (op) {
    case Op::name:
    case Op::negate:
    case Op::add:
    case Op::subtract:
    case Op::multiply:
    case Op::min:
    case Op::max:
    case Op::abs:
    case Op::sigmoid:
    case Op::tanh:
    case Op::select:
    case Op::to_float:
    case Op::equal:
    case Op::not_equal:
    case Op::less:
    case Op::less_equal:
    case Op::greater:
    case Op::greater_equal:
      return true;
    default:
      return false;
  }
}

}  // namespace

bool is_finite(const Graph& graph, int place) {
  if (graph.uniform(place) || is_literal(graph.node(place))) return true;
  const std::vector<int>& args = graph[place].args;
  if (graph.node(place).op == Op::divide)
    return graph.node(place).type == Type::real && graph.uniform(args[1]) && is_finite(graph, args[0]);
  return is_finite_operation(graph.node(place).op) &&
         std::ranges::all_of(args, [&](int arg) { return is_finite(graph, arg); });
}

bool names_score_once(const NodePtr& program) {
  if (is_name(*program, Name::score)) return true;
  const auto names = [](const NodePtr& arg) {
    Graph graph;
    return (graph.uses(graph.add(arg)) & kUsesScore) != 0;
  };
  const auto first = std::ranges::find_if(program->args, names);
  return first != program->args.end() && names_score_once(*first) &&
         std::none_of(first + 1, program->args.end(), names);
}

PairSigmoid pair_sigmoid_of(Graph& graph, int score) {
  Rewriting rewriting(graph);
  const NodePtr program = graph[score].node;
  NodePtr sigmoid;
  if (!rewriting.is_smooth(program, sigmoid) || !sigmoid) return {};
  const NodePtr scaled = rewriting.with_scaled_scores(program);
  // Scaled again, so that its products are the weight's own: x s of SiLU is found once.
  const NodePtr slope = rewriting.with_scaled_scores(
      rewriting.with_shared_products(derivative(scaled, make_name(Name::score))));
  return {.place = graph.add(sigmoid),
          .exponent = graph.add(rewriting.scaled(sigmoid->args[0], make_real(-kLog2E))),
          .score = graph.add(scaled),
          .slope = graph.add(slope),
          .silu = rewriting.is_silu(scaled)};
}

}  // namespace flashjit::expr
