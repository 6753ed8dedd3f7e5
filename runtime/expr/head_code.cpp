#include <fmt/format.h>
#include <fmt/ranges.h>

#include "expr/code.hpp"
#include "expr/nodes.hpp"
#include "flashjit/error.hpp"

namespace flashjit::expr {
namespace {

std::string name_text(Name name) {
  switch (name) {
    case Name::b:
      return "head.b";
    case Name::h:
      return "head.h";
    case Name::h_kv:
      return "head.h_kv";
    case Name::seqlen_q:
      return "head.seqlen_q";
    case Name::seqlen_kv:
      return "head.seqlen_kv";
    default:
      throw Error(ErrorCode::internal,
                  "a name that differs from pair to pair was taken for one that does not");
  }
}

}  // namespace

HeadCode::HeadCode(Graph& graph, const std::vector<Declaration>& declarations, bool check_indices)
    : graph_(graph), check_indices_(check_indices) {
  int tensors = 0, scalars = 0;
  for (const Declaration& d : declarations) slots_.emplace(d.name, d.is_scalar() ? scalars++ : tensors++);
}

int HeadCode::slot(const Declaration& declaration) const {
  const auto found = slots_.find(declaration.name);
  if (found == slots_.end())
    throw Error(ErrorCode::internal, fmt::format("'{}' is not declared", declaration.name));
  return found->second;
}

std::string HeadCode::read_text(const Node& read, const std::vector<std::string>& indices) const {
  return fmt::format("flashjit::read_capture<{}>(p.captures[{}], {})", element_text(read.declaration.type),
                     slot(read.declaration), fmt::join(indices, ", "));
}

std::string HeadCode::check_text(const Node& read, const std::vector<std::string>& indices,
                                 const ReadCheck& check) const {
  if (!check_indices_ || check.exists.empty()) return {};
  return fmt::format("    flashjit::check_indices({}, {{{}}}, \"{}\", p.captures[{}], {});\n", check.exists,
                     check.place, read.declaration.name, slot(read.declaration), fmt::join(indices, ", "));
}

template <class Key, class Value>
std::string HeadCode::member(std::map<Key, std::string>& known, const Key& key, char prefix,
                             std::string_view type, const Value& value) {
  const auto [found, is_new] = known.try_emplace(key, fmt::format("{}{}", prefix, known.size()));
  if (is_new) {
    members_ += fmt::format("    {} {};\n", type, found->second);
    const std::string text = value();  // which may add lines of its own first
    body_ += fmt::format("    head.{} = {};\n", found->second, text);
  }
  return fmt::format("head.{}", found->second);
}

std::string HeadCode::uniform(int place) {
  const Node& node = graph_.node(place);
  if (node.args.empty()) return value(place);
  return member(known_, place, 'u', type_text(node.type), [&] { return value(place); });
}

std::string HeadCode::value(int place) {
  const NodePtr node = graph_[place].node;
  if (node->op == Op::literal) return literal_text(*node);
  if (node->op == Op::name) return name_text(node->name);
  if (node->op == Op::size)
    return fmt::format("p.captures[{}].size[{}]", slot(node->declaration), node->integer);
  if (const auto found = values_.find(place); found != values_.end()) return found->second;
  std::vector<std::string> args;
  for (const int arg : graph_[place].args) args.push_back(value(arg));
  std::string text;
  if (node->op == Op::scalar) {
    return fmt::format("flashjit::scalar_{}(p, {})", type_text(node->type), slot(node->declaration));
  } else if (node->op == Op::read) {
    body_ += check_text(*node, args, {"true", "head.b, head.h, -1, -1"});
    text = read_text(*node, args);
  } else {
    text = operation_text(*node, args, Style::exact);
  }
  const std::string name = fmt::format("v{}", values_.size());
  body_ += fmt::format("    const {} {} = {};\n", type_text(node->type), name, text);
  return values_[place] = name;
}

/// The sum of a Rest's terms; it has some.
std::string HeadCode::term_sum(const Rest& rest) {
  std::vector<std::string> parts;
  for (const Term& term : rest.terms) {
    const std::string text = value(term.place);
    parts.push_back(term.factor == 1 ? fmt::format("static_cast<long long>({})", text)
                                     : fmt::format("{}LL * {}", term.factor, text));
  }
  if (rest.constant != 0) parts.push_back(fmt::format("{}LL", rest.constant));
  return fmt::format("{}", fmt::join(parts, " + "));
}

std::string HeadCode::rest(const Rest& rest) {
  if (rest.terms.empty()) return fmt::format("{}LL", rest.constant);
  if (rest.terms[0].factor < 0) return fmt::format("-{}", this->rest(rest * -1));
  return member(rests_, rest, 'r', "long long", [&] { return term_sum(rest); });
}

std::string HeadCode::scaled(int place) {
  return member(scaled_, place, 's', "float",
                [&] { return fmt::format("__fmul_rn(p.softmax_scale, {})", value(place)); });
}

std::string HeadCode::divisor(int place) {
  return member(divisors_, place, 'd', "flashjit::Divisor",
                [&] { return fmt::format("flashjit::Divisor({})", value(place)); });
}

std::string HeadCode::natural_divisor(int place) {
  return member(natural_divisors_, place, 'n', "flashjit::NaturalDivisor",
                [&] { return fmt::format("flashjit::NaturalDivisor({})", value(place)); });
}

std::string HeadCode::multiples(int place) {
  return member(multiples_, place, 'm', "flashjit::Multiples",
                [&] { return fmt::format("flashjit::Multiples({})", value(place)); });
}

std::string HeadCode::rest_float(const Rest& rest) {
  if (rest.terms.empty()) return literal_text(static_cast<float>(rest.constant));
  return member(rest_floats_, rest, 'f', "float",
                [&] { return fmt::format("static_cast<float>({})", term_sum(rest)); });
}

}  // namespace flashjit::expr
