#include "expr/graph.hpp"

#include <bit>

#include "expr/ops.hpp"

namespace flashjit::expr {
namespace {

std::uint32_t literal_bits(const Node& node) {
  switch (node.type) {
    case Type::boolean:
      return node.boolean;
    case Type::integer:
      return static_cast<std::uint32_t>(node.integer);
    case Type::real:
      return std::bit_cast<std::uint32_t>(node.real);
    case Type::int64:
      break;  // which has no literals
  }
  return 0;
}

unsigned uses_of(Name name) {
  switch (name) {
    case Name::score:
    case Name::out:
    case Name::element:
    case Name::sum_of_squares:
      return kUsesScore;
    case Name::b:
      return kUsesBatch;
    case Name::h:
    case Name::h_kv:
      return kUsesHead;
    case Name::q:
      return kUsesQ;
    case Name::kv:
    case Name::column:
      return kUsesKv;
    case Name::seqlen_q:
    case Name::seqlen_kv:
      return 0;
  }
  return 0;
}

}  // namespace

int Graph::add(const NodePtr& node) {
  if (const auto found = seen_.find(node); found != seen_.end()) return found->second;
  std::vector<int> args;
  for (const NodePtr& arg : node->args) args.push_back(add(arg));
  const bool literal = node->op == Op::literal, name = node->op == Op::name;
  const bool declared = is_of_declared(node->op), of_size = node->op == Op::size;
  Key key{node->op,
          node->type,
          name ? node->name : Name::score,
          literal || of_size ? literal_bits(*node) : 0,
          declared ? node->declaration.name : std::string(),
          args};
  const auto [place, is_new] = places_.try_emplace(std::move(key), size());
  if (is_new) {
    unsigned uses = 0;
    if (name) uses = uses_of(node->name);
    if (node->op == Op::element_at) uses = kUsesScore;
    for (const int arg : args) uses |= items_[arg].uses;
    items_.push_back({node, std::move(args), uses});
  }
  seen_.emplace(node, place->second);
  return place->second;
}

}  // namespace flashjit::expr
