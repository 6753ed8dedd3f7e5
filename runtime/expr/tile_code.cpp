#include "expr/tile_code.hpp"

#include <fmt/format.h>

#include "expr/classify.hpp"
#include "flashjit/error.hpp"

namespace flashjit::expr {
namespace {

std::string affine_text(HeadCode& head, const Affine& form) {
  return fmt::format("flashjit::affine({}, q, {}, kv, {})", form.q, form.kv, head.rest(form.rest));
}

std::string_view symbol(Op op) {
  switch (op) {
    case Op::negate:
    case Op::subtract:
      return "-";
    case Op::complement:
      return "~";
    case Op::logical_not:
      return "!";
    case Op::add:
      return "+";
    case Op::multiply:
      return "*";
    case Op::divide:
      return "/";
    case Op::modulo:
      return "%";
    case Op::shift_left:
      return "<<";
    case Op::shift_right:
      return ">>";
    case Op::bit_and:
      return "&";
    case Op::bit_or:
      return "|";
    case Op::bit_xor:
      return "^";
    case Op::logical_and:
      return "&&";
    case Op::logical_or:
      return "||";
    case Op::equal:
      return "==";
    case Op::not_equal:
      return "!=";
    case Op::less:
      return "<";
    case Op::less_equal:
      return "<=";
    case Op::greater:
      return ">";
    case Op::greater_equal:
      return ">=";
    default:
      throw Error(ErrorCode::internal, fmt::format("operation {} has no symbol", static_cast<int>(op)));
  }
}

/// Prints what TileWalk asks for.
class TileText {
 public:
  using Interval = std::string;
  using Truth = std::string;

  explicit TileText(HeadCode& head) : head_(head) {}
  const std::string& lines() const { return lines_; }

  std::string uniform_int(int place) {
    const std::string value = head_.uniform(place);
    lines_ += fmt::format("    const flashjit::Interval t{} = {{{}, {}}};\n", count_, value, value);
    return fmt::format("t{}", count_++);
  }
  std::string uniform_bool(int place) {
    return truth(fmt::format("flashjit::known({})", head_.uniform(place)));
  }
  std::string read_int(bool by_q, int i) { return fmt::format("{}_reads[{}]", by_q ? "q" : "kv", i); }
  std::string read_bool(bool by_q, int i) {
    return truth(fmt::format("flashjit::to_bool({})", read_int(by_q, i)));
  }
  std::string wrapped(const Affine& form) {
    return interval(fmt::format("flashjit::wrapped({})", affine_text(head_, form)));
  }
  std::string compare(const Comparison& c) {
    const std::string test = c.relation == Relation::at_most_zero ? "at_most_zero" : "is_zero";
    std::string text = fmt::format("{}flashjit::{}({})", c.relation == Relation::not_zero ? "!" : "", test,
                                   affine_text(head_, c.difference));
    if (!c.fits)
      text = fmt::format("flashjit::if_fits({}, {}, {})", affine_text(head_, c.left),
                         affine_text(head_, c.right), text);
    return truth(text);
  }
  std::string int_operation(Op op, const std::vector<std::string>& args) {
    if (op == Op::abs) return interval(fmt::format("flashjit::abs({})", args[0]));
    if (op == Op::min || op == Op::max)
      return interval(fmt::format("flashjit::{}({}, {})", op == Op::min ? "min" : "max", args[0], args[1]));
    return interval(operation(op, args));
  }
  std::string bool_operation(Op op, const std::vector<std::string>& args) {
    return truth(operation(op, args));
  }
  std::string compare_ints(Op op, const std::string& a, const std::string& b) {
    return truth(operation(op, {a, b}));
  }
  std::string select(const std::string& condition, const std::string& a, const std::string& b) {
    const std::string name = fmt::format("t{}", count_++);
    lines_ += fmt::format("    const auto {} = flashjit::select({}, {}, {});\n", name, condition, a, b);
    return name;
  }
  std::string to_int(const std::string& a) { return interval(fmt::format("flashjit::to_int({})", a)); }
  std::string to_bool(const std::string& a) { return truth(fmt::format("flashjit::to_bool({})", a)); }
  std::string any_int() { return "flashjit::any_int()"; }
  std::string any_truth() { return "flashjit::any_truth()"; }

 private:
  static std::string operation(Op op, const std::vector<std::string>& args) {
    if (args.size() == 1) return fmt::format("{}{}", symbol(op), args[0]);
    return fmt::format("{} {} {}", args[0], symbol(op), args[1]);
  }
  std::string truth(const std::string& text) { return line("Truth", text); }
  std::string interval(const std::string& text) { return line("Interval", text); }
  std::string line(std::string_view type, const std::string& text) {
    lines_ += fmt::format("    const flashjit::{} t{} = {};\n", type, count_, text);
    return fmt::format("t{}", count_++);
  }

  HeadCode& head_;
  std::string lines_;
  int count_ = 0;
};

/// Prints what narrow_bounds asks for.
class BoundsText {
 public:
  BoundsText(HeadCode& head, bool of_all) : head_(head), of_all_(of_all) {}
  const std::string& lines() const { return lines_; }

  void keep_if(int place, bool negated) {
    lines_ += fmt::format("    bounds.keep_if({}{});\n", negated ? "!" : "", head_.uniform(place));
  }
  void keep(const Comparison& c, long long factor, const Affine& others) {
    const std::string condition = c.fits
                                      ? ""
                                      : fmt::format("if (flashjit::fits({}) && flashjit::fits({}))\n      ",
                                                    affine_text(head_, c.left), affine_text(head_, c.right));
    const std::string some = affine_text(head_, others);
    const std::string rest = of_all_ ? fmt::format("flashjit::reversed({})", some) : some;
    lines_ += fmt::format("    {}", condition);
    lines_ += c.relation == Relation::zero
                  ? fmt::format("bounds.keep_zero({}, {});\n", factor, rest)
                  : fmt::format("bounds.keep_at_most_zero({}, {}.low);\n", factor, rest);
  }

 private:
  HeadCode& head_;
  bool of_all_;
  std::string lines_;
};

/// The intervals of positions that lines compute with, if they do.
std::string positions(const std::string& lines, std::string_view q, std::string_view kv) {
  if (lines.find("flashjit::affine(") == std::string::npos) return {};
  return fmt::format("    const flashjit::Interval q = {}, kv = {};\n", q, kv);
}

}  // namespace

std::string classify_tile_body(HeadCode& head, const MaskAnalysis& mask) {
  TileText text(head);
  const std::string root = TileWalk<TileText>(head.graph(), mask, text).truth(mask.root());
  return positions(text.lines(), "flashjit::interval_of(q_range)", "flashjit::interval_of(kv_range)") +
         text.lines() + fmt::format("    return flashjit::class_of({});\n", root);
}

std::string bounds_body(HeadCode& head, const MaskAnalysis& mask, BoundsKind kind) {
  const std::string length = kind.of_keys ? "head.seqlen_kv" : "head.seqlen_q";
  BoundsText text(head, kind.of_all);
  if (!mask.listed() || kind.of_keys) narrow_bounds(head.graph(), mask, kind.of_keys, text);
  if (text.lines().empty()) return fmt::format("    return {{0, {}}};\n", length);
  const std::string all = fmt::format("{{0, {} - 1LL}}", length);
  return (kind.of_keys ? positions(text.lines(), "flashjit::interval_of(q_range)", all)
                       : positions(text.lines(), all, "flashjit::interval_of(kv_range)")) +
         fmt::format("    flashjit::Bounds bounds = {{0, {}}};\n", length) + text.lines() +
         "    return bounds.range();\n";
}

}  // namespace flashjit::expr
