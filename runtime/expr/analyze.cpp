#include "expr/analyze.hpp"

#include <algorithm>
#include <numeric>

#include "expr/fold.hpp"
#include "expr/nodes.hpp"
#include "expr/ops.hpp"

namespace flashjit::expr {
namespace {

bool is_connective(Op op) { return op == Op::logical_not || op == Op::logical_and || op == Op::logical_or; }

/// Whether an int is affine in positions, and neither it nor its negative wraps anywhere.
bool is_affine_both_ways(const NodePtr& value) {
  Graph graph;
  const int place = graph.add(value);
  const std::optional<Affine> form = affine_form(graph, place);
  return form && graph.uses_positions(place) && always_fits(graph, *form) && always_fits(graph, *form * -1);
}

/// abs(x) compared with a bound, as a condition of x and -x; null where it is none.
NodePtr bound_of_size(const Node& node) {
  if (!is_comparison(node.op) || node.op == Op::equal || node.op == Op::not_equal) return nullptr;
  const bool on_the_left = node.args[0]->op == Op::abs;
  const Node& size = *node.args[on_the_left ? 0 : 1];
  if (size.op != Op::abs || size.type != Type::integer || !is_affine_both_ways(size.args[0])) return nullptr;
  const NodePtr x = size.args[0], bound = node.args[on_the_left ? 1 : 0];
  const bool or_equal = node.op == Op::less_equal || node.op == Op::greater_equal;
  const bool below = on_the_left == (node.op == Op::less || node.op == Op::less_equal);
  // abs(x) > b is not abs(x) <= b.
  const Op op = or_equal == below ? Op::less_equal : Op::less;
  const NodePtr negative = make_node(Op::negate, Type::integer, {x});
  const NodePtr within =
      make_node(Op::logical_and, Type::boolean,
                {make_node(op, Type::boolean, {x, bound}), make_node(op, Type::boolean, {negative, bound})});
  return below ? within : make_node(Op::logical_not, Type::boolean, {within});
}

NodePtr without_abs(const NodePtr& mask) {
  if (const NodePtr bound = bound_of_size(*mask)) return bound;
  if (!is_connective(mask->op)) return mask;
  std::vector<NodePtr> args;
  for (const NodePtr& arg : mask->args) args.push_back(without_abs(arg));
  return args == mask->args ? mask : make_node(mask->op, mask->type, std::move(args));
}

/// a - b + 1 <= 0 is a < b.
Affine plus_one(Affine form) {
  form.rest.constant += 1;
  return form;
}

Comparison compared(Op op, const Affine& left, const Affine& right, bool fits) {
  switch (op) {
    case Op::equal:
      return {Relation::zero, left - right, left, right, fits};
    case Op::not_equal:
      return {Relation::not_zero, left - right, left, right, fits};
    case Op::less:
      return {Relation::at_most_zero, plus_one(left - right), left, right, fits};
    case Op::less_equal:
      return {Relation::at_most_zero, left - right, left, right, fits};
    case Op::greater:
      return {Relation::at_most_zero, plus_one(right - left), left, right, fits};
    default:
      return {Relation::at_most_zero, right - left, left, right, fits};
  }
}

/// The comparison that is true where `comparison` is false; fits as it does.
Comparison negated(const Comparison& comparison) {
  Comparison result = comparison;
  switch (comparison.relation) {
    case Relation::zero:
      result.relation = Relation::not_zero;
      break;
    case Relation::not_zero:
      result.relation = Relation::zero;
      break;
    case Relation::at_most_zero:
      result.difference = plus_one(comparison.difference * -1);
      break;
  }
  return result;
}

}  // namespace

std::optional<Comparison> affine_comparison(const Graph& graph, int place) {
  const Node& node = graph.node(place);
  if (!is_comparison(node.op) || graph.uniform(place) || node.args[0]->type != Type::integer)
    return std::nullopt;
  const std::optional<Affine> left = affine_form(graph, graph[place].args[0]),
                              right = affine_form(graph, graph[place].args[1]);
  if (!left || !right) return std::nullopt;
  const bool fits = always_fits(graph, *left) && always_fits(graph, *right);
  return compared(node.op, *left, *right, fits);
}

bool reads_beyond(const Graph& graph, int root, const std::vector<int>& found) {
  std::vector<bool> needed(static_cast<std::size_t>(root) + 1);
  needed[root] = true;
  for (int place = root; place >= 0; --place) {
    if (!needed[place] || std::ranges::find(found, place) != found.end()) continue;
    if (graph.node(place).op == Op::read && graph.uses_positions(place)) return true;
    for (const int arg : graph[place].args) needed[arg] = true;
  }
  return false;
}

NodePtr prepared_mask(const NodePtr& mask) { return without_abs(fold(mask)); }

MaskAnalysis::MaskAnalysis(const Graph& graph, int root) : graph_(graph), root_(root) {
  find_comparisons();
  find_conjuncts(root, false);
  listed_ = !std::ranges::all_of(conjuncts_, [&](const Conjunct& conjunct) {
    return graph_.uniform(conjunct.place) || comparison(conjunct.place);
  });
  if (!listed_) bounds_ = count_bounds();
  if (!listed_) return;
  find_reads(root, false);
  for (std::vector<int>* reads : {&q_reads_, &kv_reads_}) {
    std::ranges::sort(*reads);
    reads->erase(std::unique(reads->begin(), reads->end()), reads->end());
  }
}

const Comparison* MaskAnalysis::comparison(int place) const {
  const auto found = comparisons_.find(place);
  return found == comparisons_.end() ? nullptr : &found->second;
}

std::optional<Comparison> MaskAnalysis::comparison_of(const Conjunct& conjunct) const {
  const Comparison* written = comparison(conjunct.place);
  if (!written) return std::nullopt;
  return conjunct.negated ? negated(*written) : *written;
}

std::size_t MaskAnalysis::count_bounds() const {
  std::size_t count = 0;
  for (const Conjunct& conjunct : conjuncts_) {
    const std::optional<Comparison> condition = comparison_of(conjunct);
    if (!condition) continue;
    if (!condition->fits || condition->relation == Relation::not_zero) return 0;
    ++count;
  }
  return count;
}

bool MaskAnalysis::bounds_first_key() const {
  return std::ranges::any_of(conjuncts_, [&](const Conjunct& conjunct) {
    const std::optional<Comparison> condition = comparison_of(conjunct);
    if (!condition) return false;
    const long long factor = condition->difference.kv;
    return condition->relation == Relation::zero
               ? factor != 0
               : condition->relation == Relation::at_most_zero && factor < 0;
  });
}

void MaskAnalysis::find_conjuncts(int place, bool negated) {
  const Op op = graph_.node(place).op;
  const std::vector<int>& args = graph_[place].args;
  if (op == Op::logical_not) return find_conjuncts(args[0], !negated);
  if (!graph_.uniform(place) && op == (negated ? Op::logical_or : Op::logical_and)) {
    for (const int arg : args) find_conjuncts(arg, negated);
    return;
  }
  if (!is_boolean(graph_.node(place), !negated)) conjuncts_.push_back({place, negated});
}

void MaskAnalysis::find_comparisons() {
  for (int place = 0; place <= root_; ++place) {
    if (const std::optional<Comparison> comparison = affine_comparison(graph_, place))
      comparisons_.emplace(place, *comparison);
  }
}

/// Whether it is made of affine comparisons and of values that all pairs share.
bool MaskAnalysis::plain(int place) const {
  if (graph_.uniform(place) || comparison(place)) return true;
  return is_connective(graph_.node(place).op) &&
         std::ranges::all_of(graph_[place].args, [&](int arg) { return plain(arg); });
}

/// The block of a position, such as kv / 1024: it never falls, so that intervals are exact.
bool MaskAnalysis::is_block(int place) const {
  const Op op = graph_.node(place).op;
  if (op != Op::divide && op != Op::shift_right) return false;
  const std::vector<int>& args = graph_[place].args;
  const Node& by = graph_.node(args[1]);
  const std::optional<Affine> position = affine_form(graph_, args[0]);
  return position && always_fits(graph_, *position) && is_literal(by) && by.type == Type::integer &&
         by.integer >= (op == Op::divide ? 1 : 0);
}

/// Such a position, or an affine one, times or plus what only the call knows, such as kv * ranks + rank: it
/// never turns, so that intervals are exact, too.
bool MaskAnalysis::is_stretched(int place) const {
  if (affine_form(graph_, place) || is_block(place)) return true;
  const Op op = graph_.node(place).op;
  if (op != Op::add && op != Op::subtract && op != Op::multiply) return false;
  const std::vector<int>& args = graph_[place].args;
  if (graph_.uniform(args[0])) return is_stretched(args[1]);
  return graph_.uniform(args[1]) && is_stretched(args[0]);
}

void MaskAnalysis::find_reads(int place, bool negated) {
  const Node& node = graph_.node(place);
  if (graph_.uniform(place) || comparison(place)) return;
  if (node.type == Type::integer && is_stretched(place)) return;
  const bool by_q = graph_.uses(place) & kUsesQ, by_kv = graph_.uses(place) & kUsesKv;
  if (node.type != Type::real && node.type != Type::int64 && by_q != by_kv && !plain(place)) {
    (by_q ? q_reads_ : kv_reads_).push_back(place);
    return;
  }
  if (inexact(place, negated)) evaluate_ = true;
  if (node.op == Op::read) return;
  const bool flips = node.op == Op::logical_not;
  for (const int arg : graph_[place].args) find_reads(arg, negated != flips);
}

/// Whether intervals of the operands say less of an operation on both positions than they might.
bool MaskAnalysis::inexact(int place, bool negated) const {
  const Node& node = graph_.node(place);
  const std::vector<int>& args = graph_[place].args;
  const bool of_ints = !node.args.empty() && node.args[0]->type == Type::integer;
  switch (node.op) {
    case Op::logical_not:
      return false;
    case Op::logical_and:
    case Op::logical_or: {
      // A disjunction of what varies with captures: one tile may need several of its parts.
      const bool disjunction = node.op == (negated ? Op::logical_and : Op::logical_or);
      return disjunction && std::ranges::none_of(args, [&](int arg) { return plain(arg); });
    }
    case Op::equal:
      return !of_ints || negated;
    case Op::not_equal:
      return !of_ints || !negated;
    case Op::less:
    case Op::less_equal:
    case Op::greater:
    case Op::greater_equal:
    case Op::to_bool:
      return !of_ints;
    case Op::add:
    case Op::subtract:
    case Op::multiply:
    case Op::negate:
    case Op::divide:
    case Op::min:
    case Op::max:
    case Op::abs:
      return node.type == Type::real;
    default:
      return true;
  }
}

namespace {

/// n where something is the position divided by n; else 0.
int divisor_of_position(const Graph& graph, const Graph::Item& item) {
  if (item.args.size() != 2 || graph.node(item.args[0]).op != Op::name) return 0;
  const Node& by = graph.node(item.args[1]);
  if (!is_literal(by) || by.type != Type::integer) return 0;
  if (item.node->op == Op::divide) return std::max(by.integer, 0);
  return item.node->op == Op::shift_right && by.integer >= 0 && by.integer < 31 ? 1 << by.integer : 0;
}

}  // namespace

int block_of(const Graph& graph, int root, unsigned position) {
  std::vector<int> blocks;  // of each place
  for (int place = 0; place <= root; ++place) {
    const Graph::Item& item = graph[place];
    int block = 0;
    if ((item.uses & position) != 0) {
      block = divisor_of_position(graph, item);
      if (block == 0 && item.args.empty()) block = 1;
      if (block == 0)
        for (const int arg : item.args) block = std::gcd(block, blocks[arg]);
    }
    blocks.push_back(block);
  }
  return blocks[root];
}

bool reads_bias_tile(const Graph& graph, int place) {
  const Graph::Item& read = graph[place];
  if (read.node->op != Op::read || read.args.size() < 2) return false;
  const auto follows = [&](std::size_t i, long long q, long long kv) {
    const std::optional<Affine> index = affine_form(graph, read.args[i]);
    return index && index->q == q && index->kv == kv;
  };
  const std::size_t rank = read.args.size();
  return follows(rank - 2, 1, 0) && follows(rank - 1, 0, 1) &&
         std::all_of(read.args.begin(), read.args.end() - 2,
                     [&](int index) { return (graph.uses(index) & (kUsesScore | kUsesQ | kUsesKv)) == 0; });
}

bool depends_on_difference(const Graph& graph, int root) {
  std::vector<bool> depends;  // each place
  const auto does = [&](int place) {
    const Graph::Item& item = graph[place];
    if ((item.uses & kUsesScore) != 0) return false;
    if (!graph.uses_positions(place)) return true;
    if (const std::optional<Affine> form = affine_form(graph, place)) return form->q == -form->kv;
    return !item.args.empty() && std::ranges::all_of(item.args, [&](int arg) { return depends[arg]; });
  };
  for (int place = 0; place <= root; ++place) depends.push_back(does(place));
  return depends[root];
}

bool joins_scores(const Graph& graph, int root) {
  const std::vector<int>& args = graph[root].args;
  const auto depends = [&](int arg) { return (graph.uses(arg) & kUsesScore) != 0; };
  return std::ranges::count_if(args, depends) > 1 ||
         std::ranges::any_of(args, [&](int arg) { return depends(arg) && joins_scores(graph, arg); });
}

bool reads_each_once(const Graph& graph, int read) {
  bool by_q = false, by_kv = false;
  for (const int place : graph[read].args) {
    const std::optional<Affine> index = affine_form(graph, place);
    by_q |= index && index->q != 0 && index->kv == 0;
    by_kv |= index && index->q == 0 && index->kv != 0;
  }
  return by_q && by_kv;
}

namespace {

bool is_half(const Graph& graph, int place) {
  const ElementType type = graph.node(place).declaration.type;
  return type == ElementType::fp16 || type == ElementType::bf16;
}

/// The last place of what `root` is computed from that `matches`; -1: none does.
template <class Matches>
int last_needed(const Graph& graph, int root, const Matches& matches) {
  std::vector<bool> needed(static_cast<std::size_t>(root) + 1);
  needed[root] = true;
  for (int place = root; place >= 0; --place) {
    if (!needed[place]) continue;
    if (matches(place)) return place;
    for (const int arg : graph[place].args) needed[arg] = true;
  }
  return -1;
}

/// Which index of a read of O's tile is q; -1: it is no such read.
int q_index_of_out_tile(const Graph& graph, int place) {
  const Graph::Item& read = graph[place];
  if (read.node->op != Op::read || read.args.size() < 2 || !is_half(graph, place) ||
      !is_name(graph.node(read.args.back()), Name::column))
    return -1;
  int found = -1;
  for (std::size_t i = 0; i + 1 < read.args.size(); ++i) {
    if (graph.uniform(read.args[i])) continue;
    const std::optional<Affine> index = affine_form(graph, read.args[i]);
    if (found >= 0 || !index || index->q != 1 || index->kv != 0) return -1;
    found = static_cast<int>(i);
  }
  return found;
}

}  // namespace

int bias_tile_read(const Graph& graph, int root) {
  return last_needed(graph, root, [&](int place) {
    return reads_bias_tile(graph, place) && is_half(graph, place) && graph[place].args.size() <= 4;
  });
}

OutTileRead out_tile_read(const Graph& graph, int root) {
  const int place = last_needed(graph, root, [&](int read) { return q_index_of_out_tile(graph, read) >= 0; });
  return {place, place < 0 ? 0 : q_index_of_out_tile(graph, place)};
}

bool reads_own_element(const Graph& graph, const OutTileRead& tile) {
  if (tile.place < 0) return false;
  const std::vector<int>& indices = graph[tile.place].args;
  const auto count = [&](Name name) {
    return std::ranges::count_if(indices, [&](int index) { return is_name(graph.node(index), name); });
  };
  return indices.size() == 4 && count(Name::b) == 1 && count(Name::h) == 1;
}

namespace {

/// `position`: kUsesQ or kUsesKv.
int position_term(const Graph& graph, int root, unsigned position) {
  const unsigned others = kUsesScore | kUsesQ | kUsesKv;
  const auto size = static_cast<std::size_t>(root) + 1;
  std::vector<bool> reads(size), needed(size);
  for (int place = 0; place <= root; ++place) {
    const bool by_position = graph.node(place).op == Op::read && (graph.uses(place) & position) != 0;
    reads[place] = by_position || std::ranges::any_of(graph[place].args, [&](int arg) { return reads[arg]; });
  }
  needed[root] = true;
  int found = -1;
  for (int place = root; place >= 0; --place) {
    if (!needed[place] || !reads[place]) continue;
    if (graph.node(place).type == Type::real && (graph.uses(place) & others) == position) {
      if (found >= 0) return -1;
      found = place;
    } else {
      for (const int arg : graph[place].args) needed[arg] = true;
    }
  }
  return found;
}

}  // namespace

PositionTerms position_terms(const Graph& graph, int root) {
  return {position_term(graph, root, kUsesQ), position_term(graph, root, kUsesKv)};
}

std::optional<ScoreLine> line_of_score(const Graph& graph, int root) {
  const Op sum = graph.node(root).op;
  if (sum != Op::add && sum != Op::subtract) return {};
  const std::vector<int>& args = graph[root].args;
  const bool first = is_name(graph.node(args[0]), Name::score);
  if (!first && (sum == Op::subtract || !is_name(graph.node(args[1]), Name::score))) return {};
  ScoreLine line = {args[first ? 1 : 0], sum == Op::subtract, -1, 0.0f};
  int number = line.place;
  if (graph.node(number).op == Op::multiply) {
    const std::vector<int>& factors = graph[number].args;
    const bool left = graph.uniform(factors[0]);
    line.factor = factors[left ? 0 : 1], number = factors[left ? 1 : 0];
    if (!graph.uniform(line.factor)) return {};
  }
  if (graph.node(number).op != Op::to_float || graph.node(number).args[0]->type != Type::integer) return {};
  const std::optional<Affine> form = affine_form(graph, graph[number].args[0]);
  if (!form || form->kv == 0 || !always_fits(graph, *form)) return {};
  line.keys = static_cast<float>(form->kv);
  return line;
}

bool reads_by_position(const NodePtr& program) {
  if (!program) return false;
  Graph graph;
  graph.add(program);
  for (int i = 0; i < graph.size(); ++i)
    if (graph.node(i).op == Op::read && graph.uses_positions(i)) return true;
  return false;
}

}  // namespace flashjit::expr
