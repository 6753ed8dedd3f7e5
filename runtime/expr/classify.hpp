// How a mask's class over a tile and its bounds are computed: said once, for the emitted code and for the
// tests, which compute with it on the host.
#pragma once

#include <map>
#include <utility>
#include <vector>

#include "expr/analyze.hpp"

namespace flashjit::expr {

/// Walks a mask over a tile. A Domain computes, or prints what computes:
///   types Interval and Truth (one each for ints and conditions, copyable, default constructible)
///   Interval uniform_int(place), Truth uniform_bool(place)    what is the same for all pairs
///   Interval read_int(bool by_q, int i), Truth read_bool(...) the bounds of MaskAnalysis' reads
///   Interval wrapped(Affine)                                  of an affine int
///   Truth compare(Comparison)                                 of an affine comparison
///   Interval int_operation(op, vector<Interval>), Truth compare_ints(op, Interval, Interval)
///   Truth bool_operation(op, vector<Truth>)
///   Interval select(Truth, Interval, Interval), Truth select(Truth, Truth, Truth)
///   Interval to_int(Truth), Truth to_bool(Interval), Interval any_int(), Truth any_truth()
template <class Domain>
class TileWalk {
 public:
  TileWalk(const Graph& graph, const MaskAnalysis& mask, Domain& domain)
      : graph_(graph), mask_(mask), domain_(domain) {}

  typename Domain::Truth truth(int place) {
    if (const auto found = truths_.find(place); found != truths_.end()) return found->second;
    return truths_[place] = make_truth(place);
  }
  typename Domain::Interval interval(int place) {
    if (const auto found = intervals_.find(place); found != intervals_.end()) return found->second;
    return intervals_[place] = make_interval(place);
  }

 private:
  typename Domain::Truth make_truth(int place) {
    if (graph_.uniform(place)) return domain_.uniform_bool(place);
    if (const Comparison* comparison = mask_.comparison(place)) return domain_.compare(*comparison);
    if (const int i = index(mask_.q_reads(), place); i >= 0) return domain_.read_bool(true, i);
    if (const int i = index(mask_.kv_reads(), place); i >= 0) return domain_.read_bool(false, i);
    const Node& node = graph_.node(place);
    const std::vector<int>& args = graph_[place].args;
    const Type type = node.args.empty() ? Type::boolean : node.args[0]->type;
    if (node.op == Op::read || type == Type::real || type == Type::int64) return domain_.any_truth();
    if (node.op == Op::select) return domain_.select(truth(args[0]), truth(args[1]), truth(args[2]));
    if (node.op == Op::to_bool)
      return type == Type::boolean ? truth(args[0]) : domain_.to_bool(interval(args[0]));
    if (type == Type::integer) return domain_.compare_ints(node.op, interval(args[0]), interval(args[1]));
    std::vector<typename Domain::Truth> operands;
    for (const int arg : args) operands.push_back(truth(arg));
    return domain_.bool_operation(node.op, operands);
  }

  typename Domain::Interval make_interval(int place) {
    if (graph_.uniform(place)) return domain_.uniform_int(place);
    if (const auto form = affine_form(graph_, place)) return domain_.wrapped(*form);
    if (const int i = index(mask_.q_reads(), place); i >= 0) return domain_.read_int(true, i);
    if (const int i = index(mask_.kv_reads(), place); i >= 0) return domain_.read_int(false, i);
    const Node& node = graph_.node(place);
    const std::vector<int>& args = graph_[place].args;
    if (node.op == Op::read || node.op == Op::low_word || node.op == Op::high_word) return domain_.any_int();
    if (node.op == Op::select) return domain_.select(truth(args[0]), interval(args[1]), interval(args[2]));
    if (node.op == Op::to_int) {
      if (node.args[0]->type == Type::boolean) return domain_.to_int(truth(args[0]));
      return node.args[0]->type == Type::integer ? interval(args[0]) : domain_.any_int();
    }
    std::vector<typename Domain::Interval> operands;
    for (const int arg : args) operands.push_back(interval(arg));
    return domain_.int_operation(node.op, operands);
  }

  static int index(const std::vector<int>& reads, int place) {
    for (std::size_t i = 0; i < reads.size(); ++i) {
      if (reads[i] == place) return static_cast<int>(i);
    }
    return -1;
  }

  const Graph& graph_;
  const MaskAnalysis& mask_;
  Domain& domain_;
  std::map<int, typename Domain::Truth> truths_;
  std::map<int, typename Domain::Interval> intervals_;
};

/// A mask's bounds: the positions of one kind, keys if `of_keys`, that some position of a range of the other
/// kind meets. Conditions of a listed mask may rule out more. A Domain narrows, or prints what narrows:
///   void keep_if(place, negated)                 by a condition that is the same for all pairs
///   void keep(Comparison, factor, Affine others) the difference is factor * position + others
template <class Domain>
void narrow_bounds(const Graph& graph, const MaskAnalysis& mask, bool of_keys, Domain& domain) {
  for (const Conjunct& conjunct : mask.conjuncts()) {
    if (graph.uniform(conjunct.place)) {
      domain.keep_if(conjunct.place, conjunct.negated);
      continue;
    }
    const std::optional<Comparison> comparison = mask.comparison_of(conjunct);
    if (!comparison || comparison->relation == Relation::not_zero) continue;
    Affine others = comparison->difference;
    const long long factor = std::exchange(of_keys ? others.kv : others.q, 0);
    domain.keep(*comparison, factor, others);
  }
}

}  // namespace flashjit::expr
