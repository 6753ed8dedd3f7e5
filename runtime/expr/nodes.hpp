// Nodes made by hand, for what flashjit itself derives from programs: types are the caller's business.
#pragma once

#include <utility>

#include "flashjit/expr.hpp"

namespace flashjit::expr {

inline NodePtr make_node(Op op, Type type, std::vector<NodePtr> args) {
  Node node;
  node.op = op;
  node.type = type;
  node.args = std::move(args);
  return std::make_shared<const Node>(std::move(node));
}
inline NodePtr make_real(float value) {
  Node node;
  node.type = Type::real;
  node.real = value;
  return std::make_shared<const Node>(std::move(node));
}
inline NodePtr make_boolean(bool value) {
  Node node;
  node.type = Type::boolean;
  node.boolean = value;
  return std::make_shared<const Node>(std::move(node));
}
constexpr Type type_of(Name name) {
  const bool of_floats =
      name == Name::score || name == Name::out || name == Name::element || name == Name::sum_of_squares;
  return of_floats ? Type::real : Type::integer;
}
inline NodePtr make_name(Name name) {
  Node node;
  node.op = Op::name;
  node.type = type_of(name);
  node.name = name;
  return std::make_shared<const Node>(std::move(node));
}

inline bool is_literal(const Node& node) { return node.op == Op::literal; }
inline bool is_real(const Node& node, float value) {
  return is_literal(node) && node.type == Type::real && node.real == value;
}
inline bool is_boolean(const Node& node, bool value) {
  return is_literal(node) && node.type == Type::boolean && node.boolean == value;
}
inline bool is_name(const Node& node, Name name) { return node.op == Op::name && node.name == name; }

}  // namespace flashjit::expr
