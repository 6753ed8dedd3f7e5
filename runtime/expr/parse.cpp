// Programs from text: declarations, then an expression by C's precedence. All that is known of operators and
// functions, and all checks of types, are those that build expressions in C++.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>

#include "expr/lexer.hpp"
#include "expr/ops.hpp"
#include "flashjit/error.hpp"
#include "flashjit/tensor.hpp"
#include "support/text.hpp"

namespace flashjit::expr {
namespace {

// A level of a tree prints as an operator and its parentheses at most.
constexpr int kMaxNesting = 2 * kMaxDepth;

constexpr ElementType kElements[] = {ElementType::fp32,  ElementType::fp16,  ElementType::bf16,
                                     ElementType::int32, ElementType::int64, ElementType::int16,
                                     ElementType::int8,  ElementType::uint8, ElementType::boolean};

template <class Ops>
const OpInfo* find_op(std::string_view text, Ops fits) {
  const auto found =
      std::ranges::find_if(all_ops(), [&](const OpInfo& op) { return op.text == text && fits(op); });
  return found == all_ops().end() ? nullptr : &*found;
}

const OpInfo* function_named(std::string_view text) {
  return find_op(text, [](const OpInfo& op) { return is_function(op.op); });
}
const OpInfo* binary_operator(std::string_view text) {
  return find_op(text, [](const OpInfo& op) { return is_operator(op.op) && op.arity == 2; });
}
const OpInfo* unary_operator(std::string_view text) {
  return find_op(text, [](const OpInfo& op) { return is_operator(op.op) && op.arity == 1; });
}

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text), tokens_(tokens_of(text)) {}

  Expr parse() {
    while (peek().kind == TokenKind::word && ahead(1).text == ":") parse_declaration();
    const Expr out = parse_expression();
    if (peek().kind != TokenKind::end) expected("an operator or the end");
    for (const auto& [declared, name, used] : declared_) {
      if (!used)
        refuse(name, fmt::format("'{}' is declared, but not used; leave its declaration out", name.text));
    }
    check_size(out.node());
    return out;
  }

 private:
  struct Declared {
    Declaration declaration;
    Token name;
    bool used = false;
  };

  const Token& ahead(std::size_t count) const { return tokens_[std::min(next_ + count, tokens_.size() - 1)]; }
  const Token& peek() const { return ahead(0); }
  Token take() {
    const Token token = peek();
    if (next_ + 1 < tokens_.size()) ++next_;
    return token;
  }
  bool take_if(std::string_view symbol) {
    if (peek().text != symbol) return false;
    take();
    return true;
  }

  [[noreturn]] void refuse(const Token& at, std::string_view message) const {
    refuse_at(text_, static_cast<std::size_t>(at.text.data() - text_.data()), message);
  }
  [[noreturn]] void expected(std::string_view what) const {
    const std::string found = peek().kind == TokenKind::end ? "the end" : quoted(peek().text);
    refuse(peek(), fmt::format("a program has {} where {} should stand", found, what));
  }
  void require(std::string_view symbol, std::string_view what) {
    if (!take_if(symbol)) expected(what);
  }

  /// Runs `make`; an error of it then shows the place.
  template <class Make>
  auto at(const Token& token, Make make) const {
    try {
      return make();
    } catch (const Error& error) {
      if (error.code() != ErrorCode::invalid_argument) throw;
      refuse(token, error.message());
    }
  }

  void parse_declaration() {
    const Token name = take();
    at(name, [&] { check_name(name.text); });
    if (find(name.text)) refuse(name, fmt::format("'{}' is declared twice", name.text));
    require(":", "':'");
    Declaration declared{.name = std::string(name.text)};
    const Token type = take();
    if (type.text == "int" || type.text == "float") {
      declared.type = type.text == "int" ? ElementType::int32 : ElementType::fp32;
    } else {
      read_tensor(type, declared);
    }
    require(";", "';', which ends a declaration,");
    declared_.push_back({std::move(declared), name});
  }

  void read_tensor(const Token& type, Declaration& declared) {
    const auto found =
        std::ranges::find(kElements, type.text, [](ElementType e) { return flashjit::to_string(e); });
    if (found == std::end(kElements)) {
      std::vector<std::string> names;
      for (const ElementType element : kElements) names.push_back(flashjit::to_string(element));
      refuse(type, fmt::format("'{}' is declared as {}; it must be int or float (a scalar), or a captured "
                               "tensor such as 'fp32 2d' of {}",
                               declared.name, quoted(type.text), fmt::join(names, ", ")));
    }
    declared.type = *found;
    const std::string_view rank = peek().text;
    if (rank.size() != 2 || rank[0] < '1' || rank[0] > '0' + kMaxCaptureDims || rank[1] != 'd')
      expected(fmt::format("the number of dimensions, 1d to {}d,", kMaxCaptureDims));
    declared.rank = take().text[0] - '0';
    if (peek().text != "grad") return;
    const Token grad = take();
    at(grad, [&] { Tensor(declared.name, declared.type, declared.rank).with_grad(); });
    declared.wants_grad = true;
  }

  Declared* find(std::string_view name) {
    const auto found = std::ranges::find(
        declared_, name, [](const Declared& d) { return std::string_view(d.declaration.name); });
    return found == declared_.end() ? nullptr : &*found;
  }

  /// Counts how deep the parser has called itself.
  class Nested {
   public:
    explicit Nested(Parser& parser) : parser_(parser) {
      if (++parser_.nesting_ > kMaxNesting)
        parser_.refuse(parser_.peek(), fmt::format("a program nests deeper than {} levels", kMaxNesting));
    }
    ~Nested() { --parser_.nesting_; }
    Nested(const Nested&) = delete;
    Nested& operator=(const Nested&) = delete;

   private:
    Parser& parser_;
  };

  /// condition ? a : b, or anything that binds tighter.
  Expr parse_expression() {
    const Expr condition = parse_binary(kSelectPrecedence + 1);
    const Token question = peek();
    if (!take_if("?")) return condition;
    const Nested nested(*this);
    const Expr a = parse_expression();
    require(":", "':' of '?:'");
    const Expr b = parse_expression();
    return at(question, [&] { return select(condition, a, b); });
  }

  Expr parse_binary(int least) {
    Expr left = parse_unary();
    while (peek().kind == TokenKind::symbol) {
      const OpInfo* op = binary_operator(peek().text);
      if (op == nullptr || op->precedence < least) break;
      const Token token = take();
      const Expr right = parse_binary(op->precedence + 1);
      left = at(token, [&] { return apply(op->op, {left, right}); });
    }
    return left;
  }

  Expr parse_unary() {
    const OpInfo* op = peek().kind == TokenKind::symbol ? unary_operator(peek().text) : nullptr;
    if (op == nullptr) return parse_primary();
    const Token token = take();
    if (op->op == Op::negate && peek().kind == TokenKind::number) return parse_number("-");
    const Nested nested(*this);
    const Expr arg = parse_unary();
    return at(token, [&] { return apply(op->op, {arg}); });
  }

  Expr parse_primary() {
    if (peek().kind == TokenKind::number) return parse_number("");
    if (peek().kind == TokenKind::word) return parse_word();
    const Nested nested(*this);
    if (!take_if("(")) expected("an expression");
    const Expr out = parse_expression();
    require(")", "an operator or ')'");
    return out;
  }

  Expr parse_number(std::string_view sign) {
    const Token token = take();
    const std::string text = fmt::format("{}{}", sign, token.text);
    const char* const end = text.data() + text.size();
    const auto done = [&](const std::from_chars_result& result, std::string_view type) {
      if (result.ec == std::errc::result_out_of_range)
        refuse(token, fmt::format("{} is beyond what {} holds", quoted(text), type));
      return result.ec == std::errc() && result.ptr == end;
    };
    if (std::int32_t value = 0; text.find_first_not_of("-0123456789") == std::string::npos &&
                                done(std::from_chars(text.data(), end, value), "an int (32 bits)"))
      return value;
    if (float value = 0; done(std::from_chars(text.data(), end, value), "a float (fp32)")) return value;
    refuse(token, fmt::format("{} is no number; write such as 1, 1.5 or 1e-3", quoted(text)));
  }

  Expr parse_word() {
    const Token token = take();
    if (token.text == "true" || token.text == "false") return token.text == "true";
    for (const Name name : kNames) {
      if (to_string(name) == token.text) return NameConstant{name};
    }
    for (const NamedMask& named : named_masks()) {
      if (named.name == token.text) return named.mask;
    }
    if (const OpInfo* op = function_named(token.text)) return parse_call(token, *op);
    if (token.text == "size" && peek().text == "(") return parse_size(token);
    if (Declared* declared = find(token.text)) {
      declared->used = true;
      return parse_declared(token, declared->declaration);
    }
    if (peek().text == "[")
      refuse(token,
             fmt::format("'{0}' is read as a tensor, but not declared; declare it, such as '{0}: fp32 1d; "
                         "...'",
                         token.text));
    refuse_unknown(token);
  }

  [[noreturn]] void refuse_unknown(const Token& token) const {
    if (peek().text == "(") {
      std::vector<std::string_view> functions;
      for (const OpInfo& op : all_ops()) {
        if (is_function(op.op)) functions.push_back(op.text);
      }
      refuse(token, fmt::format("a program calls the unknown function {}; there are {}", quoted(token.text),
                                fmt::join(functions, ", ")));
    }
    std::vector<std::string_view> names;
    for (const Name name : kNames) names.push_back(to_string(name));
    for (const Declared& declared : declared_) names.push_back(declared.declaration.name);
    refuse(token,
           fmt::format("a program has the unknown name {}; there are {}, and what is declared before the "
                       "expression",
                       quoted(token.text), fmt::join(names, ", ")));
  }

  Expr parse_call(const Token& token, const OpInfo& op) {
    require("(", fmt::format("'(' after the function '{}'", op.text));
    std::vector<Expr> args = parse_list(")");
    return at(token, [&] { return apply(op.op, std::move(args)); });
  }

  /// size(tensor, dimension).
  Expr parse_size(const Token& token) {
    require("(", "'('");
    Declared* declared = find(peek().text);
    if (declared == nullptr || declared->declaration.is_scalar()) expected("a declared tensor");
    declared->used = true;
    take();
    require(",", "',' and a dimension");
    const Expr dimension = parse_expression();
    require(")", "')'");
    if (dimension.node().op != Op::literal || dimension.type() != Type::integer)
      refuse(token, "size() takes a dimension that is a literal int, such as size(bias, 0)");
    return at(token, [&] { return size(declared->declaration, dimension.node().integer); });
  }

  Expr parse_declared(const Token& token, const Declaration& declaration) {
    if (declaration.is_scalar()) {
      if (peek().text == "[")
        refuse(token, fmt::format("'{}' is declared as a scalar, which is read without [ ]", token.text));
      return at(token, [&] { return scalar(declaration); });
    }
    require("[", fmt::format("'[' and {} ind{} of '{}'", declaration.rank,
                             declaration.rank == 1 ? "ex" : "ices", token.text));
    const std::vector<Expr> indices = parse_list("]");
    return at(token, [&] { return read(declaration, indices); });
  }

  /// Expressions separated by commas, up to `close`.
  std::vector<Expr> parse_list(std::string_view close) {
    const Nested nested(*this);
    std::vector<Expr> out;
    if (take_if(close)) return out;
    do out.push_back(parse_expression());
    while (take_if(","));
    require(close, fmt::format("an operator, ',' or '{}'", close));
    return out;
  }

  std::string_view text_;
  std::vector<Token> tokens_;
  std::size_t next_ = 0;
  int nesting_ = 0;
  std::vector<Declared> declared_;
};

}  // namespace

Expr parse(std::string_view text) {
  if (text.size() > kMaxText)
    throw Error(ErrorCode::invalid_argument,
                fmt::format("a program's text has {} bytes; at most {} are allowed", text.size(), kMaxText));
  return Parser(text).parse();
}

}  // namespace flashjit::expr
