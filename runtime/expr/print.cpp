// Programs as canonical text: parse() of it gives the same tree.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "expr/declarations.hpp"
#include "expr/ops.hpp"
#include "flashjit/error.hpp"
#include "support/until_unload.hpp"

namespace flashjit::expr {
namespace {

/// Shortest text that reads as this float, and as no int.
std::string float_text(float value) {
  char buffer[32];
  const auto [end, error] = std::to_chars(std::begin(buffer), std::end(buffer), value);
  std::string out(buffer, end);
  return out.find_first_of(".e") == std::string::npos ? out + ".0" : out;
}

std::string source_text(const Node& node) {
  switch (node.type) {
    case Type::boolean:
      return node.boolean ? "true" : "false";
    case Type::integer:
      return fmt::format("{}", node.integer);
    case Type::real:
    case Type::int64:  // which has no literals
      break;
  }
  return float_text(node.real);
}

bool is_number(const Node& node) { return node.op == Op::literal && node.type != Type::boolean; }

bool is_negative(const Node& node) {
  return is_number(node) && (node.type == Type::integer ? node.integer < 0 : std::signbit(node.real));
}

/// A negative literal binds as the unary minus that it begins with.
int precedence(const Node& node) { return is_negative(node) ? kUnaryPrecedence : info(node.op).precedence; }

class Printer {
 public:
  std::string take() { return std::move(out_); }

  void print(const Node& node) {
    switch (node.op) {
      case Op::literal:
        out_ += source_text(node);
        return;
      case Op::name:
        out_ += to_string(node.name);
        return;
      case Op::scalar:
        out_ += node.declaration.name;
        return;
      case Op::read:
        return print_list(node.declaration.name, '[', node, ']');
      case Op::size:
        out_ += fmt::format("size({}, {})", node.declaration.name, node.integer);
        return;
      default:
        break;
    }
    if (is_function(node.op)) return print_list(info(node.op).text, '(', node, ')');
    node.args.size() == 1 ? print_unary(node) : print_binary(node);
  }

 private:
  void print_list(std::string_view name, char open, const Node& node, char close) {
    out_ += name;
    out_ += open;
    for (std::size_t i = 0; i < node.args.size(); ++i) {
      if (i > 0) out_ += ", ";
      print(*node.args[i]);
    }
    out_ += close;
  }

  void print_in(const Node& node, bool parentheses) {
    if (parentheses) out_ += '(';
    print(node);
    if (parentheses) out_ += ')';
  }

  void print_unary(const Node& node) {
    const Node& arg = *node.args[0];
    // -1 is a literal, so the negation of 1 is -(1), and the negation of -x is -(-x).
    const bool apart = node.op == Op::negate && (arg.op == Op::negate || is_number(arg));
    out_ += info(node.op).text;
    print_in(arg, apart || precedence(arg) < kUnaryPrecedence);
  }

  void print_binary(const Node& node) {
    const int own = precedence(node);
    print_in(*node.args[0], precedence(*node.args[0]) < own);
    out_ += fmt::format(" {} ", info(node.op).text);
    print_in(*node.args[1], precedence(*node.args[1]) <= own);
  }

  std::string out_;
};

void collect(const Node& node, std::vector<Declaration>& out) {
  if (is_of_declared(node.op)) {
    const auto found = std::ranges::find(out, node.declaration.name, &Declaration::name);
    if (found == out.end()) {
      out.push_back(node.declaration);
    } else if (*found != node.declaration) {
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("a program declares one name in two ways: '{}' and '{}'", to_string(*found),
                              to_string(node.declaration)));
    }
  }
  for (const NodePtr& arg : node.args) collect(*arg, out);
}

}  // namespace

std::string to_string(const Declaration& d) {
  if (d.is_scalar()) return fmt::format("{}: {}", d.name, d.type == ElementType::int32 ? "int" : "float");
  return fmt::format("{}: {} {}d{}", d.name, flashjit::to_string(d.type), d.rank,
                     d.wants_grad ? " grad" : "");
}

std::string body_text(const Node& node) {
  Printer printer;
  printer.print(node);
  return printer.take();
}

std::vector<Declaration> declarations_of(const Node& tree) {
  std::vector<Declaration> out;
  collect(tree, out);
  return out;
}

std::string to_string(const Expr& expr) {
  for (const NamedMask& named : named_masks()) {
    if (same(expr, named.mask)) return std::string(named.name);
  }
  std::string out;
  for (const Declaration& d : declarations_of(expr.node())) out += to_string(d) + "; ";
  return out + body_text(expr.node());
}

const std::vector<NamedMask>& named_masks() {
  static const std::vector<NamedMask>& all = until_unload(
      std::vector<NamedMask>{{"causal", kv <= q + seqlen_kv - seqlen_q}, {"causal_top_left", kv <= q}});
  return all;
}

}  // namespace flashjit::expr
