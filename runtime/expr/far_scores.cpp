#include "expr/far_scores.hpp"

#include <cmath>
#include <vector>

namespace flashjit::expr {
namespace {

constexpr float kFarLiteral = 1e37f;

struct Reach {
  bool far = false;   ///< the value may be a far score
  bool huge = false;  ///< it is made of a far literal, so that its products are far, too
};

Reach either(Reach a, Reach b) { return {a.far || b.far, a.huge || b.huge}; }

Reach of_leaf(const Node& node) {
  const bool far_literal = node.op == Op::literal && std::fabs(node.real) >= kFarLiteral;
  const bool read =
      node.op == Op::scalar || (node.op == Op::read && node.declaration.type != ElementType::fp16);
  return {far_literal || read, far_literal};
}

}  // namespace

bool may_be_far(const Graph& graph, int root) {
  std::vector<Reach> reach;  // each place
  for (int place = 0; place <= root; ++place) {
    const Graph::Item& item = graph[place];
    const auto arg = [&](std::size_t i) { return reach[item.args[i]]; };
    const auto is_number = [&](std::size_t i) { return graph.node(item.args[i]).op == Op::literal; };
    Reach found;
    if (item.node->type == Type::real) switch (item.node->op) {
        case Op::literal:
        case Op::scalar:
        case Op::read:
          found = of_leaf(*item.node);
          break;
        case Op::negate:
        case Op::abs:
        case Op::floor:
        case Op::trunc:
        case Op::round:
        case Op::divide:
          found = arg(0);
          break;
        case Op::add:
        case Op::subtract:
        case Op::min:
        case Op::max:
          found = either(arg(0), arg(1));
          break;
        case Op::select:
          found = either(arg(1), arg(2));
          break;
        case Op::multiply:
          found.huge = arg(0).huge || arg(1).huge;
          found.far =
              found.huge || (arg(0).far && (arg(1).far || is_number(1))) || (arg(1).far && is_number(0));
          break;
        default:
          break;
      }
    reach.push_back(found);
  }
  return reach[root].far;
}

}  // namespace flashjit::expr
