#include "expr/key_bounds.hpp"

#include "expr/classify.hpp"

namespace flashjit::expr {
namespace {

/// Narrows the keys by what narrow_bounds finds; passes over what only a call gives.
struct Narrowing {
  const Graph& graph;
  Interval q;
  int seqlen_q, seqlen_kv;
  Bounds kept;

  std::optional<long long> value(const Rest& rest) const {
    long long total = rest.constant;
    for (const Term& term : rest.terms) {
      const Node& node = graph.node(term.place);
      const bool of_keys = node.name == Name::seqlen_kv;
      if (node.op != Op::name || !(of_keys || node.name == Name::seqlen_q)) return std::nullopt;
      total += term.factor * (of_keys ? seqlen_kv : seqlen_q);
    }
    return total;
  }
  void keep_if(int /*place*/, bool /*negated*/) {}
  void keep(const Comparison& comparison, long long factor, const Affine& others) {
    const std::optional<long long> rest = value(others.rest);
    if (!rest || !comparison.fits) return;
    const Interval some = affine(others.q, q, 0, {0, 0}, *rest);
    if (comparison.relation == Relation::zero)
      kept.keep_zero(factor, some);
    else
      kept.keep_at_most_zero(factor, some.low);
  }
};

}  // namespace

KeyBounds::KeyBounds(const MaskProgram& mask) {
  if (mask.empty()) return;
  const int root = graph_.add(prepared_mask(mask.tree()));
  mask_.emplace(graph_, root);
  if (mask_->listed()) mask_.reset();
}

Range KeyBounds::of(Range queries, int seqlen_q, int seqlen_kv) const {
  if (!mask_) return {0, seqlen_kv};
  Narrowing narrowing{graph_, interval_of(queries), seqlen_q, seqlen_kv, {0, seqlen_kv}};
  narrow_bounds(graph_, *mask_, true, narrowing);
  return narrowing.kept.range();
}

}  // namespace flashjit::expr
