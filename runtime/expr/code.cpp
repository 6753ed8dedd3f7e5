#include "expr/code.hpp"

#include <algorithm>
#include <bit>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "expr/analyze.hpp"
#include "expr/nodes.hpp"
#include "expr/ops.hpp"

namespace flashjit::expr {
namespace {

std::string_view symbol(Relation relation, bool at_least) {
  if (relation == Relation::zero) return "==";
  if (relation == Relation::not_zero) return "!=";
  return at_least ? ">=" : "<=";
}

/// A sum of `parts`, each with its sign; the first is positive where any is.
std::string signed_sum(std::vector<std::pair<bool, std::string>> parts) {
  std::stable_partition(parts.begin(), parts.end(), [](const auto& part) { return !part.first; });
  std::string text;
  for (const auto& [negative, part] : parts)
    text += fmt::format("{}{}", text.empty() ? (negative ? "-" : "") : negative ? " - " : " + ", part);
  return text;
}

}  // namespace

std::string Code::line(const std::string& type, const std::string& expression) {
  const std::string name = fmt::format("v{}", variables_++);
  lines_ += fmt::format("    const {} {} = {};\n", type, name, expression);
  return name;
}

std::string Code::value(int place) {
  const NodePtr node = graph_[place].node;
  if (graph_.uniform(place)) return head_.uniform(place);
  if (is_name(*node, Name::q)) return "q.at";
  if (is_name(*node, Name::kv)) return "kv.at";
  for (const Name name : {Name::out, Name::column, Name::element, Name::sum_of_squares})
    if (is_name(*node, name)) return std::string(to_string(name));
  if (const auto found = known_.find(place); found != known_.end()) return found->second;
  const std::string text =
      is_name(*node, Name::score) ? "__fmul_rn(dot, p.softmax_scale)" : expression(place);
  return known_[place] = line(type_text(node->type), text);
}

std::string Code::expression(int place) {
  const NodePtr node = graph_[place].node;
  const bool fast = style_ == Style::fast;
  if (node->type == Type::integer) {
    if (const std::optional<Affine> form = affine_form(graph_, place)) return affine_int(*form);
  }
  if (affine_comparison(graph_, place)) return comparison(place);
  if (has_float_positions(place)) {
    const auto [bases, offsets] = affine_float(*affine_form(graph_, graph_[place].args[0]));
    return fmt::format("({}) + ({})", bases, offsets);
  }
  if (fast && node->op == Op::multiply && node->type == Type::real) return product(place);
  if (fast && node->op == Op::divide && node->type == Type::real) return quotient(place);
  if (const std::optional<std::string> text = divisibility(place)) return *text;
  if (node->op == Op::divide || node->op == Op::modulo) {
    const int number = graph_[place].args[0], divisor = graph_[place].args[1];
    if (shared_divisor(divisor))
      return fmt::format("{}.{}({})",
                         natural(number) ? head_.natural_divisor(divisor) : head_.divisor(divisor),
                         node->op == Op::divide ? "quotient" : "rest", value(number));
    if (node->type == Type::integer && divides_naturals(place))
      return fmt::format("flashjit::natural_{}({}, {})", node->op == Op::divide ? "divide" : "modulo",
                         value(number), value(divisor));
  }
  std::vector<std::string> args;
  for (const int arg : std::vector<int>(graph_[place].args)) args.push_back(value(arg));
  if (node->op == Op::read) {
    lines_ += head_.check_text(*node, args, check_);
    return head_.read_text(*node, args);
  }
  if (node->op == Op::element_at) return fmt::format("row({})", args[0]);
  return operation_text(*node, args, style_);
}

/// An int that all pairs share and that is no constant: then what a product needs instead of a division is
/// found once.
bool Code::shared_divisor(int place) const {
  const Node& node = graph_.node(place);
  return node.type == Type::integer && graph_.uniform(place) && !is_literal(node);
}

/// Whether an int is known to be no less than zero, as all that have names are: positions, heads, lengths.
bool Code::natural(int place) const {
  const Node& node = graph_.node(place);
  const std::vector<int>& args = graph_[place].args;
  switch (node.op) {
    case Op::name:
      return true;
    case Op::literal:
      return node.integer >= 0;
    case Op::divide:
    case Op::modulo:
      return divides_naturals(place);
    case Op::shift_right:
      return natural(args[0]);
    case Op::bit_and:
    case Op::max:
      return natural(args[0]) || natural(args[1]);
    case Op::bit_or:
    case Op::bit_xor:
    case Op::min:
      return natural(args[0]) && natural(args[1]);
    default:
      return false;
  }
}

/// Whether a quotient or rest is one of an int that is not negative by a literal that is positive.
bool Code::divides_naturals(int place) const {
  const Node& divisor = graph_.node(graph_[place].args[1]);
  return is_literal(divisor) && divisor.integer > 0 && natural(graph_[place].args[0]);
}

/// For a rest that is compared with zero, where the divisor is shared or is no power of two.
std::optional<std::string> Code::divisibility(int place) {
  const Node& node = graph_.node(place);
  if (node.op != Op::equal && node.op != Op::not_equal) return {};
  const int left = graph_[place].args[0], right = graph_[place].args[1];
  const Node &rest = graph_.node(left), &zero = graph_.node(right);
  if (rest.op != Op::modulo || rest.type != Type::integer || !is_literal(zero) || zero.integer != 0)
    return {};
  const int number = graph_[left].args[0], divisor = graph_[left].args[1];
  const Node& by = graph_.node(divisor);
  std::string multiples;
  if (shared_divisor(divisor))
    multiples = head_.multiples(divisor);
  else if (is_literal(by) && by.integer != 0 && !std::has_single_bit(magnitude(by.integer)))
    multiples = fmt::format("flashjit::Multiples({})", by.integer);
  else
    return {};
  return fmt::format("{}{}.contain({})", node.op == Op::equal ? "" : "!", multiples, value(number));
}

/// As the program's int: modulo 2^32, whatever the order of the additions.
std::string Code::affine_int(const Affine& form) {
  std::string text;
  const auto add = [&](long long factor, const std::string& name) {
    if (factor == 0) return;
    const long long size = std::llabs(factor);
    const std::string product = size == 1 ? name : fmt::format("flashjit::wrap_multiply({}, {})", name, size);
    if (text.empty()) {
      text = factor > 0 ? product : fmt::format("flashjit::wrap_negate({})", product);
    } else {
      text = fmt::format("flashjit::wrap_{}({}, {})", factor > 0 ? "add" : "subtract", text, product);
    }
  };
  const bool q_first = form.kv <= 0 && form.q > 0;
  if (q_first) add(form.q, "q.at");
  add(form.kv, "kv.at");
  if (!q_first) add(form.q, "q.at");
  if (!form.rest.terms.empty()) {
    add(1, fmt::format("static_cast<int>({})", head_.rest(form.rest)));
  } else if (const auto constant = static_cast<std::int32_t>(form.rest.constant); constant != 0) {
    add(1, literal_text(constant));
  }
  return text.empty() ? "0" : text;
}

/// Where the key is alone on one side, it is compared with a bound that a whole row shares.
std::string Code::comparison(int place) {
  const Comparison compared = *affine_comparison(graph_, place);
  const long long factor = compared.difference.kv;
  if (!compared.fits || std::llabs(factor) != 1 || compared.difference.q == 0) {
    return operation_text(graph_.node(place), {affine_int(compared.left), affine_int(compared.right)},
                          style_);
  }
  Affine bound = compared.difference * (factor == 1 ? -1 : 1);
  bound.kv = 0;
  std::string text = affine_int(bound);
  if (!always_fits(graph_, bound)) {
    text = fmt::format("flashjit::saturate_int({}LL * q.at + {})", bound.q, head_.rest(bound.rest));
  }
  return fmt::format("kv.at {} {}", symbol(compared.relation, factor == -1), text);
}

/// Whether the operation is to_float of what is affine in positions, and may be computed with their floats.
bool Code::has_float_positions(int place) const {
  const Node& node = graph_.node(place);
  if (style_ != Style::fast || node.op != Op::to_float || node.args[0]->type != Type::integer) return false;
  if (!graph_.uses_positions(place)) return false;
  const std::optional<Affine> form = affine_form(graph_, graph_[place].args[0]);
  return form && (form->q != 0 || form->kv != 0) && always_fits(graph_, *form);
}

/// Bases, which unrolled loops share, and offsets, which they know.
std::pair<std::string, std::string> Code::affine_float(const Affine& form) {
  std::vector<std::pair<bool, std::string>> bases, offsets;
  const auto add = [&](long long factor, std::string_view name) {
    if (factor == 0) return;
    const long long size = std::llabs(factor);
    const std::string scale = size == 1 ? "" : literal_text(static_cast<float>(size)) + " * ";
    bases.emplace_back(factor < 0, fmt::format("{}{}.base", scale, name));
    offsets.emplace_back(factor < 0, fmt::format("{}{}.offset", scale, name));
  };
  add(form.kv, "kv");
  add(form.q, "q");
  if (!form.rest.terms.empty() || form.rest.constant != 0)
    bases.emplace_back(false, head_.rest_float(form.rest));
  return {signed_sum(bases), signed_sum(offsets)};
}

std::string Code::product(int place) {
  const std::vector<int> args = graph_[place].args;
  if (graph_.uniform(args[1])) return by_uniform(args[0], args[1]);
  if (graph_.uniform(args[0])) return by_uniform(args[1], args[0]);
  return fmt::format("{} * {}", value(args[0]), value(args[1]));
}

/// The value at `place` times one that all pairs share.
std::string Code::by_uniform(int place, int factor) {
  if (is_name(graph_.node(place), Name::score)) return fmt::format("dot * {}", head_.scaled(factor));
  const std::string text = value(factor);
  if (!has_float_positions(place)) return fmt::format("{} * {}", value(place), text);
  const auto [bases, offsets] = affine_float(*affine_form(graph_, graph_[place].args[0]));
  return fmt::format("__fmaf_rn({}, {}, {} * ({}))", text, offsets, text, bases);
}

/// A division by what all pairs share is a multiplication.
std::string Code::quotient(int place) {
  const std::vector<int> args = graph_[place].args;
  const NodePtr divisor = graph_[args[1]].node;
  if (is_literal(*divisor) && std::isnormal(1 / divisor->real))
    return by_uniform(args[0], graph_.add(make_real(1 / divisor->real)));
  if (graph_.uniform(args[1]) && !is_literal(*divisor))
    return by_uniform(args[0], graph_.add(make_node(Op::divide, Type::real, {make_real(1), divisor})));
  return fmt::format("flashjit::Math<Element>::divide({}, {})", value(args[0]), value(args[1]));
}

/// score + X, score - X and X + score as one instruction besides X; empty: the result is none of them.
std::string Code::scaled_sum(int place) {
  const Node& node = graph_.node(place);
  if (node.op != Op::add && node.op != Op::subtract) return {};
  const std::vector<int> args = graph_[place].args;
  const auto other_of_score = [&](int score, int other) {
    return is_name(graph_.node(score), Name::score) && !(graph_.uses(other) & kUsesScore);
  };
  if (other_of_score(args[0], args[1]))
    return fmt::format("__fmaf_rn(dot, p.softmax_scale, {}{})", node.op == Op::subtract ? "-" : "",
                       value(args[1]));
  if (node.op == Op::add && other_of_score(args[1], args[0]))
    return fmt::format("__fmaf_rn(dot, p.softmax_scale, {})", value(args[0]));
  return {};
}

std::string Code::score_result(int place) {
  const std::string text = scaled_sum(place);
  return text.empty() ? value(place) : text;
}

}  // namespace flashjit::expr
