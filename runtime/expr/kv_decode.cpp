#include "expr/kv_decode.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "expr/code.hpp"
#include "expr/lexer.hpp"
#include "support/refuse.hpp"

namespace flashjit {
namespace {

/// Scales that decode_extremes() looks at: powers of two with these exponents.
constexpr int kLeastExponent = -6, kMostExponent = 4;

int codes_of(const KvFormat& format) { return 1 << format.bits(); }

/// The code for which `score` is largest, the first of several.
template <class Score>
int best_code(int codes, const Score& score) {
  int best = 0;
  for (int code = 1; code < codes; ++code)
    if (score(code) > score(best)) best = code;
  return best;
}

[[noreturn]] void refuse_search(const KvFormat& format, std::string_view why) {
  refuse(
      "rows of {} cannot be encoded: {}; attention reads such rows, but write them yourself, or give an "
      "expression whose values grow with the scale",
      to_string(format), why);
}

DecodeExtremes extremes_of_magnitudes(const KvFormat& format) {
  const DecodeExpression& decode = decode_expression(format);
  DecodeExtremes found;
  double before = -1;
  for (int exponent = kLeastExponent; exponent <= kMostExponent; ++exponent) {
    const double scale = std::ldexp(1.0, exponent);
    const auto magnitude = [&](int code) { return std::fabs(decode.value(code, scale, 0)); };
    const int largest = best_code(codes_of(format), magnitude);
    if (!std::isfinite(magnitude(largest))) break;
    if (exponent == kLeastExponent) found.largest = largest;
    if (magnitude(found.largest) < magnitude(largest))
      refuse_search(format, "which code has the largest magnitude depends on the scale");
    if (!(magnitude(largest) > before))
      refuse_search(format, "the largest magnitude does not grow with the scale");
    before = magnitude(largest);
  }
  return found;
}

/// The zero point with which the highest value is 1.
double zero_of_one(const DecodeExpression& decode, const DecodeExtremes& of, double scale) {
  double low = -0x1p14, high = 0x1p14;
  for (int step = 0; step < 60; ++step) {
    const double middle = (low + high) / 2;
    ((decode.value(of.highest, scale, middle) < 1) == of.zero_raises ? low : high) = middle;
  }
  return high;
}

DecodeExtremes extremes_of_values(const KvFormat& format) {
  const DecodeExpression& decode = decode_expression(format);
  DecodeExtremes found;
  double before = HUGE_VAL;
  for (int exponent = kLeastExponent; exponent <= kMostExponent && before > -HUGE_VAL; ++exponent) {
    const double scale = std::ldexp(1.0, exponent);
    const auto at_zero = [&](int code) { return decode.value(code, scale, 0); };
    const int highest = best_code(codes_of(format), at_zero);
    const int lowest = best_code(codes_of(format), [&](int code) { return -at_zero(code); });
    const bool raises = decode.value(highest, scale, 0.5) > decode.value(highest, scale, -0.5);
    if (exponent == kLeastExponent) found = {.highest = highest, .lowest = lowest, .zero_raises = raises};
    if (highest != found.highest || lowest != found.lowest || raises != found.zero_raises)
      refuse_search(format, "which codes have the highest and the lowest value depends on the scale");
    const double least = decode.value(lowest, scale, zero_of_one(decode, found, scale));
    if (!(least < before))
      refuse_search(format, "where the highest value is given, the lowest does not fall with the scale");
    before = least;
  }
  if (before > -1) refuse_search(format, "beside positive values it has no negative ones");
  return found;
}

}  // namespace

DecodeExpression::DecodeExpression(std::string_view text, expr::Floats floats)
    : evaluation_({{"code", {}, {&code_, 1}}, {"scale", {}, {&scale_, 1}}, {"zero", {}, {&zero_, 1}}},
                  floats) {
  const auto tokens = expr::tokens_of(text);
  std::string program;
  for (const std::string_view name : {"code", "scale", "zero"}) {
    const bool is_read = std::ranges::any_of(tokens, [&](const auto& token) { return token.text == name; });
    if (is_read) program += fmt::format("{}: {}; ", name, name == "code" ? "int" : "float");
    reads_scale_ = reads_scale_ || (is_read && name == "scale");
    reads_zero_ = reads_zero_ || (is_read && name == "zero");
  }
  const expr::Expr parsed = expr::parse(program.append(text));
  if (parsed.type() == expr::Type::boolean) refuse("it is a condition; give a number");
  is_real_ = parsed.type() == expr::Type::real;
  graph_.add(parsed.pointer());
  for (int i = 0; i < graph_.size(); ++i)
    if (const expr::Op op = graph_.node(i).op; op == expr::Op::name || op == expr::Op::element_at)
      refuse("it reads what only programs of attention have; give an expression of code, scale and zero");
  root_ = evaluation_.add(parsed.pointer());
}

double DecodeExpression::value(int code, double scale, double zero) const {
  code_ = code, scale_ = scale, zero_ = zero;
  const expr::Value value = evaluation_.run({})[static_cast<std::size_t>(root_)];
  return is_real_ ? value.real : static_cast<double>(value.integer);
}

std::string DecodeExpression::cuda_lines() const {
  std::string lines;
  std::vector<std::string> names;
  for (int i = 0; i < graph_.size(); ++i) {
    const expr::Node& node = graph_.node(i);
    if (node.op == expr::Op::literal) {
      names.push_back(literal_text(node));
      continue;
    }
    if (node.op == expr::Op::scalar) {
      names.push_back(node.declaration.name);
      continue;
    }
    std::vector<std::string> operands;
    for (const int place : graph_[i].args) operands.push_back(names[static_cast<std::size_t>(place)]);
    names.push_back(fmt::format("v{}", i));
    lines += fmt::format("      const {} {} = {};\n", type_text(node.type), names.back(),
                         operation_text(node, operands, expr::Style::exact));
  }
  return lines + fmt::format("      return static_cast<float>({});\n", names.back());
}

const DecodeExpression& decode_expression(const KvFormat& format) {
  thread_local std::map<std::string, std::unique_ptr<const DecodeExpression>> known;
  auto& found = known[format.decode];
  if (!found) found = std::make_unique<const DecodeExpression>(format.decode);
  return *found;
}

DecodeExtremes decode_extremes(const KvFormat& format) {
  const bool has_zero = format.zero != KvFormat::Zero::none;
  thread_local std::map<std::tuple<std::string, int, bool>, DecodeExtremes> known;
  const auto [at, is_new] = known.try_emplace({format.decode, format.bits(), has_zero});
  if (!is_new) return at->second;
  try {
    return at->second = has_zero ? extremes_of_values(format) : extremes_of_magnitudes(format);
  } catch (...) {
    known.erase(at);
    throw;
  }
}

}  // namespace flashjit
