// Classes of tiles and bounds on the host, by the walks and the arithmetic of the emitted code.
#pragma once

#include <algorithm>
#include <vector>

#include "expr/classify.hpp"
#include "expr/evaluate.hpp"
#include "expr/nodes.hpp"
#include "expr/ops.hpp"

namespace flashjit::test {

class HostTiles {
 public:
  HostTiles(const expr::NodePtr& mask, std::vector<expr::Bound> captures)
      : root_(graph_.add(mask)),
        analysis_(graph_, root_),
        evaluation_(std::move(captures), expr::Floats::rounded) {
    for (int i = 0; i < graph_.size(); ++i) places_.push_back(evaluation_.add(graph_[i].node));
  }

  const expr::MaskAnalysis& analysis() const { return analysis_; }
  bool attends(const expr::Point& point) const { return evaluation_.run(point)[places_[root_]].integer; }

  /// `head` gives what all pairs share.
  TileClass classify(const expr::Point& head, Range q, Range kv) const {
    Walk walk(*this, head, interval_of(q), interval_of(kv));
    walk.find_reads(q, kv);
    return class_of(expr::TileWalk<Walk>(graph_, analysis_, walk).truth(root_));
  }
  Range kv_bounds(const expr::Point& head, Range q) const {
    return bounds(head, interval_of(q), {0, head.seqlen_kv - 1LL}, true);
  }
  /// The keys that all queries of a range attend to, by a mask of bounds alone.
  Range kv_bounds_of_all(const expr::Point& head, Range q) const {
    return bounds(head, reversed(interval_of(q)), {0, head.seqlen_kv - 1LL}, true);
  }
  Range q_bounds(const expr::Point& head, Range kv) const {
    return bounds(head, {0, head.seqlen_q - 1LL}, interval_of(kv), false);
  }

 private:
  /// The Domain of TileWalk and narrow_bounds.
  struct Walk {
    using Interval = flashjit::Interval;
    using Truth = flashjit::Truth;
    using Op = expr::Op;

    const HostTiles& tiles;
    expr::Point head;
    Interval q, kv;
    std::vector<expr::Value> values;
    std::vector<Interval> q_reads = {}, kv_reads = {};
    Bounds kept = {};

    Walk(const HostTiles& tiles_, const expr::Point& head_, Interval q_, Interval kv_)
        : tiles(tiles_), head(head_), q(q_), kv(kv_), values(tiles.evaluation_.run(head)) {}

    void find_reads(Range q_range, Range kv_range) {
      for (const bool by_q : {true, false}) {
        const Range range = by_q ? q_range : kv_range;
        for (const int place : by_q ? tiles.analysis_.q_reads() : tiles.analysis_.kv_reads()) {
          Interval found = {INT32_MAX, INT32_MIN};
          for (int at = range.begin; at < range.end; ++at) {
            expr::Point point = head;
            (by_q ? point.q : point.kv) = at;
            const int value = tiles.evaluation_.run(point)[tiles.places_[place]].integer;
            found = join(found, {value, value});
          }
          (by_q ? q_reads : kv_reads).push_back(found);
        }
      }
    }

    long long value(const expr::Rest& rest) const {
      long long sum = rest.constant;
      for (const expr::Term& term : rest.terms) sum += term.factor * integer(term.place);
      return sum;
    }
    std::int32_t integer(int place) const { return values[tiles.places_[place]].integer; }
    Interval form(const expr::Affine& a) const { return affine(a.q, q, a.kv, kv, value(a.rest)); }

    Interval uniform_int(int place) { return {integer(place), integer(place)}; }
    Truth uniform_bool(int place) { return known(integer(place)); }
    Interval read_int(bool by_q, int i) { return by_q ? q_reads[i] : kv_reads[i]; }
    Truth read_bool(bool by_q, int i) { return flashjit::to_bool(read_int(by_q, i)); }
    Interval wrapped(const expr::Affine& a) { return flashjit::wrapped(form(a)); }
    Truth compare(const expr::Comparison& c) {
      const Interval difference = form(c.difference);
      const Truth truth = c.relation == expr::Relation::at_most_zero ? at_most_zero(difference)
                          : c.relation == expr::Relation::zero       ? is_zero(difference)
                                                                     : !is_zero(difference);
      return c.fits ? truth : if_fits(form(c.left), form(c.right), truth);
    }
    Interval int_operation(Op op, const std::vector<Interval>& a) {
      switch (op) {
        case Op::negate:
          return -a[0];
        case Op::complement:
          return ~a[0];
        case Op::add:
          return a[0] + a[1];
        case Op::subtract:
          return a[0] - a[1];
        case Op::multiply:
          return a[0] * a[1];
        case Op::divide:
          return a[0] / a[1];
        case Op::modulo:
          return a[0] % a[1];
        case Op::shift_left:
          return a[0] << a[1];
        case Op::shift_right:
          return a[0] >> a[1];
        case Op::bit_and:
          return a[0] & a[1];
        case Op::bit_or:
          return a[0] | a[1];
        case Op::bit_xor:
          return a[0] ^ a[1];
        case Op::min:
          return flashjit::min(a[0], a[1]);
        case Op::max:
          return flashjit::max(a[0], a[1]);
        default:
          return flashjit::abs(a[0]);
      }
    }
    Truth compare_ints(Op op, Interval a, Interval b) { return expr::compare(op, a, b); }
    Truth bool_operation(Op op, const std::vector<Truth>& a) {
      if (op == Op::logical_not) return !a[0];
      if (op == Op::logical_and) return a[0] && a[1];
      if (op == Op::logical_or) return a[0] || a[1];
      return op == Op::equal ? a[0] == a[1] : a[0] != a[1];
    }
    template <class Value>
    Value select(Truth condition, Value a, Value b) {
      return flashjit::select(condition, a, b);
    }
    Interval to_int(Truth a) { return flashjit::to_int(a); }
    Truth to_bool(Interval a) { return flashjit::to_bool(a); }
    Interval any_int() { return flashjit::any_int(); }
    Truth any_truth() { return flashjit::any_truth(); }

    void keep_if(int place, bool negated) { kept.keep_if(integer(place) != (negated ? 1 : 0)); }
    void keep(const expr::Comparison& c, long long factor, const expr::Affine& others) {
      if (!c.fits && !(fits(form(c.left)) && fits(form(c.right)))) return;
      if (c.relation == expr::Relation::zero) return kept.keep_zero(factor, form(others));
      kept.keep_at_most_zero(factor, form(others).low);
    }
  };

  Range bounds(const expr::Point& head, Interval q, Interval kv, bool of_keys) const {
    const int length = of_keys ? head.seqlen_kv : head.seqlen_q;
    if (analysis_.listed() && !of_keys) return {0, length};  // queries are found by lists
    Walk walk(*this, head, q, kv);
    walk.kept = {0, length};
    expr::narrow_bounds(graph_, analysis_, of_keys, walk);
    return walk.kept.range();
  }

  expr::Graph graph_;
  int root_;
  expr::MaskAnalysis analysis_;
  expr::Evaluation evaluation_;
  std::vector<int> places_;  // of the graph's operations among the evaluation's values
};

}  // namespace flashjit::test
