#include "expr/affine.hpp"

#include <algorithm>

#include "expr/nodes.hpp"

namespace flashjit::expr {
namespace {

// Sums of this many products of such a factor and an int stay far below 2^63.
constexpr long long kLargestFactor = 1 << 20;
constexpr std::size_t kMostTerms = 64;

Rest sum(const Rest& a, const Rest& b) {
  Rest result{a.terms, a.constant + b.constant};
  for (const Term& term : b.terms) {
    const auto at = std::ranges::lower_bound(result.terms, term.place, {}, &Term::place);
    if (at != result.terms.end() && at->place == term.place) {
      at->factor += term.factor;
    } else {
      result.terms.insert(at, term);
    }
  }
  std::erase_if(result.terms, [](const Term& term) { return term.factor == 0; });
  return result;
}

bool is_small(const Affine& form) {
  const auto small = [](long long factor) { return std::llabs(factor) <= kLargestFactor; };
  return small(form.q) && small(form.kv) && form.rest.terms.size() <= kMostTerms &&
         std::ranges::all_of(form.rest.terms, small, &Term::factor);
}

/// Literals are known modulo 2^32 only: the int is as good as any.
std::optional<Affine> checked(Affine form) {
  form.rest.constant = static_cast<std::int32_t>(form.rest.constant);
  if (!is_small(form)) return std::nullopt;
  return form;
}

/// What a form multiplies another by, where it is a literal.
std::optional<long long> literal_of(const Affine& form) {
  if (form.q != 0 || form.kv != 0 || !form.rest.terms.empty()) return std::nullopt;
  return form.rest.constant;
}

std::optional<Affine> product(const Affine& a, const Affine& b) {
  const std::optional<long long> left = literal_of(a), right = literal_of(b);
  if (right && std::llabs(*right) <= kLargestFactor) return a * *right;
  if (left && std::llabs(*left) <= kLargestFactor) return b * *left;
  return std::nullopt;
}

std::optional<Affine> shifted_left(const Affine& a, const Affine& count) {
  const std::optional<long long> literal = literal_of(count);
  if (!literal || (*literal & 31) > 20) return std::nullopt;
  return a * (1LL << (*literal & 31));
}

std::optional<Affine> of_operation(const Graph& graph, int place) {
  const Node& node = graph.node(place);
  const std::vector<int>& args = graph[place].args;
  if (is_literal(node)) return Affine{.rest = {.constant = node.integer}};
  if (is_name(node, Name::q)) return Affine{.q = 1};
  if (is_name(node, Name::kv)) return Affine{.kv = 1};
  if (node.op == Op::negate) {
    const std::optional<Affine> a = affine_form(graph, args[0]);
    return a ? std::optional(*a * -1) : std::nullopt;
  }
  const bool linear =
      node.op == Op::add || node.op == Op::subtract || node.op == Op::multiply || node.op == Op::shift_left;
  if (!linear) return std::nullopt;
  const std::optional<Affine> a = affine_form(graph, args[0]), b = affine_form(graph, args[1]);
  if (!a || !b) return std::nullopt;
  if (node.op == Op::add) return *a + *b;
  if (node.op == Op::subtract) return *a - *b;
  return node.op == Op::multiply ? product(*a, *b) : shifted_left(*a, *b);
}

constexpr long long kLargestInt = 2147483647;

/// What a uniform int may be. There are pairs, so the lengths are not zero; captured tensors have elements.
Interval any_value(const Node& node) {
  if (node.op == Op::size) return {1, kLargestInt};
  if (node.op != Op::name) return any_int();
  const bool length = node.name == Name::seqlen_q || node.name == Name::seqlen_kv;
  return {length ? 1 : 0, kLargestInt};
}

Interval any_value(const Graph& graph, const Rest& rest) {
  Interval total = {rest.constant, rest.constant};
  for (const Term& term : rest.terms) {
    const Interval by_term = affine(term.factor, any_value(graph.node(term.place)), 0, {0, 0}, 0);
    total = {total.low + by_term.low, total.high + by_term.high};
  }
  return total;
}

/// The place of a name; -1: the graph has none.
int find_name(const Graph& graph, Name name) {
  for (int i = 0; i < graph.size(); ++i) {
    if (is_name(graph.node(i), name)) return i;
  }
  return -1;
}

/// The form at the last position of one kind: factor * (length - 1).
Rest at_last(const Graph& graph, Name length, long long factor) {
  const int place = find_name(graph, length);
  if (place >= 0) return {{{place, factor}}, -factor};
  // Nothing else depends on the length: the farthest position of all.
  return {{}, factor * (kLargestInt - 1)};
}

}  // namespace

Rest operator*(const Rest& a, long long factor) {
  Rest result{a.terms, a.constant * factor};
  for (Term& term : result.terms) term.factor *= factor;
  std::erase_if(result.terms, [](const Term& term) { return term.factor == 0; });
  return result;
}
Affine operator*(const Affine& a, long long factor) { return {a.q * factor, a.kv * factor, a.rest * factor}; }
Affine operator+(const Affine& a, const Affine& b) { return {a.q + b.q, a.kv + b.kv, sum(a.rest, b.rest)}; }
Affine operator-(const Affine& a, const Affine& b) { return a + b * -1; }

std::optional<Affine> affine_form(const Graph& graph, int place) {
  if (const std::optional<Affine> form = of_operation(graph, place)) {
    if (const std::optional<Affine> small = checked(*form)) return small;
  }
  if (!graph.uniform(place)) return std::nullopt;
  return Affine{.rest = {.terms = {{place, 1}}}};
}

bool always_fits(const Graph& graph, const Affine& form) {
  Rest low = form.rest, high = form.rest;
  const auto add_position = [&](long long factor, Name length) {
    Rest& reached = factor < 0 ? low : high;
    reached = sum(reached, at_last(graph, length, factor));
  };
  add_position(form.q, Name::seqlen_q);
  add_position(form.kv, Name::seqlen_kv);
  return any_value(graph, low).low >= any_int().low && any_value(graph, high).high <= any_int().high;
}

}  // namespace flashjit::expr
