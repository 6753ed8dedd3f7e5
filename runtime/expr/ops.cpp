#include "expr/ops.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#include "flashjit/error.hpp"
#include "support/text.hpp"

namespace flashjit::expr {
namespace {

constexpr int kCall = kCallPrecedence, kUnary = kUnaryPrecedence;

constexpr OpInfo kOps[] = {
    {Op::literal, "", kCall, 0, Takes::leaf, Gives::same},
    {Op::name, "", kCall, 0, Takes::leaf, Gives::same},
    {Op::scalar, "", kCall, 0, Takes::leaf, Gives::same},
    {Op::read, "", kCall, 0, Takes::leaf, Gives::same},
    {Op::size, "", kCall, 0, Takes::leaf, Gives::integer},
    {Op::negate, "-", kUnary, 1, Takes::numbers, Gives::same},
    {Op::complement, "~", kUnary, 1, Takes::integers, Gives::same},
    {Op::logical_not, "!", kUnary, 1, Takes::booleans, Gives::same},
    {Op::add, "+", 10, 2, Takes::numbers, Gives::same},
    {Op::subtract, "-", 10, 2, Takes::numbers, Gives::same},
    {Op::multiply, "*", 11, 2, Takes::numbers, Gives::same},
    {Op::divide, "/", 11, 2, Takes::numbers, Gives::same},
    {Op::modulo, "%", 11, 2, Takes::numbers, Gives::same},
    {Op::shift_left, "<<", 9, 2, Takes::integers, Gives::same},
    {Op::shift_right, ">>", 9, 2, Takes::integers, Gives::same},
    {Op::bit_and, "&", 6, 2, Takes::integers, Gives::same},
    {Op::bit_or, "|", 4, 2, Takes::integers, Gives::same},
    {Op::bit_xor, "^", 5, 2, Takes::integers, Gives::same},
    {Op::logical_and, "&&", 3, 2, Takes::booleans, Gives::same},
    {Op::logical_or, "||", 2, 2, Takes::booleans, Gives::same},
    {Op::equal, "==", 7, 2, Takes::alike, Gives::boolean},
    {Op::not_equal, "!=", 7, 2, Takes::alike, Gives::boolean},
    {Op::less, "<", 8, 2, Takes::numbers, Gives::boolean},
    {Op::less_equal, "<=", 8, 2, Takes::numbers, Gives::boolean},
    {Op::greater, ">", 8, 2, Takes::numbers, Gives::boolean},
    {Op::greater_equal, ">=", 8, 2, Takes::numbers, Gives::boolean},
    {Op::select, "select", kCall, 3, Takes::select, Gives::same},
    {Op::min, "min", kCall, 2, Takes::numbers, Gives::same},
    {Op::max, "max", kCall, 2, Takes::numbers, Gives::same},
    {Op::abs, "abs", kCall, 1, Takes::numbers, Gives::same},
    {Op::floor, "floor", kCall, 1, Takes::floats, Gives::same},
    {Op::trunc, "trunc", kCall, 1, Takes::floats, Gives::same},
    {Op::round, "round", kCall, 1, Takes::floats, Gives::same},
    {Op::exp, "exp", kCall, 1, Takes::floats, Gives::same},
    {Op::exp2, "exp2", kCall, 1, Takes::floats, Gives::same},
    {Op::expm1, "expm1", kCall, 1, Takes::floats, Gives::same},
    {Op::log, "log", kCall, 1, Takes::floats, Gives::same},
    {Op::log2, "log2", kCall, 1, Takes::floats, Gives::same},
    {Op::log1p, "log1p", kCall, 1, Takes::floats, Gives::same},
    {Op::pow, "pow", kCall, 2, Takes::floats, Gives::same},
    {Op::sqrt, "sqrt", kCall, 1, Takes::floats, Gives::same},
    {Op::rsqrt, "rsqrt", kCall, 1, Takes::floats, Gives::same},
    {Op::tanh, "tanh", kCall, 1, Takes::floats, Gives::same},
    {Op::sigmoid, "sigmoid", kCall, 1, Takes::floats, Gives::same},
    {Op::erf, "erf", kCall, 1, Takes::floats, Gives::same},
    {Op::sin, "sin", kCall, 1, Takes::floats, Gives::same},
    {Op::cos, "cos", kCall, 1, Takes::floats, Gives::same},
    {Op::to_float, "to_float", kCall, 1, Takes::any, Gives::real},
    {Op::to_int, "to_int", kCall, 1, Takes::any, Gives::integer},
    {Op::to_bool, "to_bool", kCall, 1, Takes::any, Gives::boolean},
    {Op::to_int64, "to_int64", kCall, 1, Takes::any, Gives::int64},
    {Op::low_word, "low_word", kCall, 1, Takes::int64s, Gives::integer},
    {Op::high_word, "high_word", kCall, 1, Takes::int64s, Gives::integer},
    {Op::element_at, "element_at", kCall, 1, Takes::integers, Gives::real},
};

constexpr bool in_order() {
  for (std::size_t i = 0; i < std::size(kOps); ++i) {
    if (kOps[i].op != static_cast<Op>(i)) return false;
  }
  return std::size(kOps) == static_cast<std::size_t>(Op::element_at) + 1;
}
static_assert(in_order());

// Words with a meaning of their own, besides names and functions.
constexpr std::string_view kReserved[] = {"true",  "false", "int",    "float",          "bool",  "fp32",
                                          "fp16",  "bf16",  "int32",  "int64",          "int16", "int8",
                                          "uint8", "grad",  "causal", "causal_top_left"};

bool is_taken(std::string_view name) {
  return std::ranges::any_of(kNames, [&](Name known) { return to_string(known) == name; }) ||
         std::ranges::any_of(kOps, [&](const OpInfo& op) { return is_function(op.op) && op.text == name; }) ||
         std::ranges::find(kReserved, name) != std::end(kReserved);
}

bool is_identifier(std::string_view name) {
  const auto fits = [](unsigned char c) { return c < 0x80 && (std::isalnum(c) != 0 || c == '_'); };
  return !name.empty() && name.size() <= kLongestName && std::ranges::all_of(name, fits) &&
         std::isdigit(static_cast<unsigned char>(name[0])) == 0;
}

}  // namespace

std::span<const OpInfo> all_ops() { return kOps; }
const OpInfo& info(Op op) { return kOps[static_cast<std::size_t>(op)]; }

std::string_view to_string(Name name) {
  constexpr std::string_view kTexts[] = {"score", "b",      "h",        "h_kv",
                                         "q",     "kv",     "seqlen_q", "seqlen_kv",
                                         "out",   "column", "element",  "sum_of_squares"};
  return kTexts[static_cast<std::size_t>(name)];
}

std::string_view to_string(Type type) {
  constexpr std::string_view kTexts[] = {"bool", "int", "float", "int64"};
  return kTexts[static_cast<std::size_t>(type)];
}

Type read_type(ElementType element) {
  switch (element) {
    case ElementType::fp32:
    case ElementType::fp16:
    case ElementType::bf16:
      return Type::real;
    case ElementType::boolean:
      return Type::boolean;
    case ElementType::int64:
      return Type::int64;
    default:
      return Type::integer;
  }
}

void check_name(std::string_view name) {
  if (!is_identifier(name)) {
    throw Error(
        ErrorCode::invalid_argument,
        fmt::format("a program declares the name {}; a name is 1 to {} letters, digits and _, and does "
                    "not begin with a digit",
                    quoted(name), kLongestName));
  }
  if (is_taken(name)) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("a program declares {}, which means something already; choose another name",
                            quoted(name)));
  }
}

}  // namespace flashjit::expr
