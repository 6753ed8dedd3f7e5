#include <cmath>

#include <bit>
#include <string_view>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "expr/code.hpp"
#include "expr/ops.hpp"
#include "flashjit/error.hpp"

namespace flashjit::expr {
namespace {

/// {0} and {1} stand for the operands.
std::string_view int_pattern(Op op) {
  switch (op) {
    case Op::negate:
      return "flashjit::wrap_negate({0})";
    case Op::complement:
      return "~{0}";
    case Op::add:
      return "flashjit::wrap_add({0}, {1})";
    case Op::subtract:
      return "flashjit::wrap_subtract({0}, {1})";
    case Op::multiply:
      return "flashjit::wrap_multiply({0}, {1})";
    case Op::divide:
      return "flashjit::wrap_divide({0}, {1})";
    case Op::modulo:
      return "flashjit::wrap_modulo({0}, {1})";
    case Op::shift_left:
      return "flashjit::wrap_shift_left({0}, {1})";
    case Op::shift_right:
      return "flashjit::wrap_shift_right({0}, {1})";
    case Op::bit_and:
      return "{0} & {1}";
    case Op::bit_or:
      return "{0} | {1}";
    case Op::bit_xor:
      return "{0} ^ {1}";
    case Op::min:
      return "flashjit::min({0}, {1})";
    case Op::max:
      return "flashjit::max({0}, {1})";
    case Op::abs:
      return "flashjit::wrap_abs({0})";
    case Op::low_word:
      return "flashjit::low_word_of({0})";
    case Op::high_word:
      return "flashjit::high_word_of({0})";
    default:
      return "";
  }
}

/// Not && and ||: nothing is cheaper to skip than to compute.
std::string_view bool_pattern(Op op) {
  switch (op) {
    case Op::logical_not:
      return "!{0}";
    case Op::logical_and:
      return "{0} & {1}";
    case Op::logical_or:
      return "{0} | {1}";
    case Op::equal:
      return "{0} == {1}";
    case Op::not_equal:
      return "{0} != {1}";
    case Op::less:
      return "{0} < {1}";
    case Op::less_equal:
      return "{0} <= {1}";
    case Op::greater:
      return "{0} > {1}";
    case Op::greater_equal:
      return "{0} >= {1}";
    default:
      return "";
  }
}

std::string_view float_pattern(Op op, Style style) {
  const bool exact = style == Style::exact;
  switch (op) {
    case Op::negate:
      return "-{0}";
    case Op::add:
      return exact ? "__fadd_rn({0}, {1})" : "{0} + {1}";
    case Op::subtract:
      return exact ? "__fsub_rn({0}, {1})" : "{0} - {1}";
    case Op::multiply:
      return exact ? "__fmul_rn({0}, {1})" : "{0} * {1}";
    case Op::divide:
      return exact ? "__fdiv_rn({0}, {1})" : "flashjit::Math<Element>::divide({0}, {1})";
    case Op::modulo:
      return "fmodf({0}, {1})";
    case Op::pow:
      return "powf({0}, {1})";
    case Op::min:
      return "fminf({0}, {1})";
    case Op::max:
      return "fmaxf({0}, {1})";
    case Op::abs:
      return "fabsf({0})";
    case Op::floor:
      return "floorf({0})";
    case Op::trunc:
      return "truncf({0})";
    case Op::round:
      return "rintf({0})";
    case Op::expm1:
      return "expm1f({0})";
    case Op::log1p:
      return "log1pf({0})";
    case Op::erf:
      return "erff({0})";
    default:
      return "";
  }
}

std::string_view function_name(Op op) {
  switch (op) {
    case Op::exp:
      return "exp";
    case Op::exp2:
      return "exp2";
    case Op::log:
      return "log";
    case Op::log2:
      return "log2";
    case Op::sqrt:
      return "sqrt";
    case Op::rsqrt:
      return "rsqrt";
    case Op::tanh:
      return "tanh";
    case Op::sigmoid:
      return "sigmoid";
    case Op::sin:
      return "sin";
    case Op::cos:
      return "cos";
    default:
      throw Error(ErrorCode::internal, fmt::format("operation {} has no text", static_cast<int>(op)));
  }
}

/// Empty: the function is one of ints, too.
std::string_view int64_function(const Node& node) {
  if (node.type != Type::int64) return "";
  switch (node.op) {
    case Op::add:
      return "saturate_add";
    case Op::subtract:
      return "saturate_subtract";
    case Op::min:
      return "lesser";
    case Op::max:
      return "greater";
    default:
      return "";
  }
}

std::string filled(std::string_view pattern, const std::vector<std::string>& args) {
  return fmt::format(fmt::runtime(pattern), args[0], args.size() > 1 ? args[1] : "");
}

std::string converted(const Node& node, const std::string& arg) {
  const Type from = node.args[0]->type;
  if (from == node.type) return arg;
  if (node.type == Type::boolean) return fmt::format("{} != 0", arg);
  if (from == Type::real)
    return fmt::format("flashjit::float_to_int{}({})", node.type == Type::int64 ? "64" : "", arg);
  if (from == Type::int64 && node.type == Type::integer)
    return fmt::format("flashjit::saturate_int({})", arg);
  return fmt::format("static_cast<{}>({})", type_text(node.type), arg);
}

}  // namespace

std::string operation_text(const Node& node, const std::vector<std::string>& args, Style style) {
  if (node.op == Op::select) return fmt::format("{} ? {} : {}", args[0], args[1], args[2]);
  if (info(node.op).takes == Takes::any) return converted(node, args[0]);
  if (const std::string_view name = int64_function(node); !name.empty())
    return fmt::format("flashjit::{}({}, {})", name, args[0], args[1]);
  const std::string_view pattern = node.type == Type::boolean ? bool_pattern(node.op)
                                   : node.type == Type::real  ? float_pattern(node.op, style)
                                                              : int_pattern(node.op);
  if (!pattern.empty()) return filled(pattern, args);
  const std::string_view precision = style == Style::exact ? "float" : "Element";
  return fmt::format("flashjit::Math<{}>::{}({})", precision, function_name(node.op), args[0]);
}

std::string literal_text(float value) {
  if (!std::isfinite(value))
    return fmt::format("__uint_as_float(0x{:08x}u)", std::bit_cast<std::uint32_t>(value));
  std::string text = fmt::format("{}", value);
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  text += "f";
  return std::signbit(value) ? fmt::format("({})", text) : text;
}

std::string literal_text(std::int32_t value) {
  if (value == INT32_MIN) return "(-2147483647 - 1)";
  return value < 0 ? fmt::format("({})", value) : fmt::format("{}", value);
}

std::string literal_text(const Node& node) {
  if (node.type == Type::real) return literal_text(node.real);
  if (node.type == Type::integer) return literal_text(node.integer);
  return node.boolean ? "true" : "false";
}

std::string type_text(Type type) {
  constexpr std::string_view kTexts[] = {"bool", "int", "float", "long long"};
  return std::string(kTexts[static_cast<std::size_t>(type)]);
}

std::string element_text(ElementType type) {
  switch (type) {
    case ElementType::fp32:
      return "float";
    case ElementType::fp16:
      return "flashjit::fp16";
    case ElementType::bf16:
      return "flashjit::bf16";
    case ElementType::int32:
      return "int";
    case ElementType::int64:
      return "long long";
    case ElementType::int16:
      return "short";
    case ElementType::int8:
      return "signed char";
    case ElementType::uint8:
      return "unsigned char";
    case ElementType::boolean:
      return "bool";
  }
  throw Error(ErrorCode::internal, fmt::format("element type {} has no name", static_cast<int>(type)));
}

}  // namespace flashjit::expr
