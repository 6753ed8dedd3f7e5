// KV formats from text: names, parts, and codes by an expression in the language of programs.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <optional>

#include "expr/kv_codec.hpp"
#include "expr/kv_decode.hpp"
#include "flashjit/kv_format.hpp"
#include "support/refuse.hpp"
#include "support/text.hpp"

namespace flashjit {
namespace {

using Code = KvFormat::Code;
using Scales = KvFormat::Scales;
using Number = KvFormat::Number;
using Zero = KvFormat::Zero;
using Packing = KvFormat::Packing;

/// For messages.
std::string allowed() {
  std::string names;
  for (const NamedKvFormat& named : named_kv_formats()) names += fmt::format("{}, ", named.name);
  return fmt::format(
      "write {}or codes (e4m3, e5m2, int8, uint8, e2m1, int4, int4_offset, uint4, uint2, int5_offset, uint5, "
      "uint3, book(<values>), decode<bits>(<expression of code, scale and zero>)) and then, for scales of "
      "blocks, g16|g32|g64|g128|row|keys<n>, "
      "fp32|fp16|bf16|e4m3|e8m0, before|apart, "
      "zero|zero=uint2|zero=uint4|zero=uint8|min, halves, tail<columns>[xfp16], scaled, such as "
      "int4:g32:fp16:zero",
      names);
}

[[noreturn]] void refuse_text(std::string_view text, std::string_view why) {
  refuse("the KV format {} {}; {}", quoted(text), why, allowed());
}

/// Codes that an expression means, and its zero points; `decode` has the expression where no table does.
struct DecodedCode {
  Code code = Code::book;
  std::vector<float> book = {};
  Zero zero = Zero::none;
  std::string decode = {};
};

/// Whether an expression is `wanted(value of the code alone, scale, zero)` for all codes; a scale that is not
/// read multiplies the whole.
template <class Wanted>
bool is_everywhere(const DecodeExpression& expression, const std::vector<double>& values,
                   const Wanted& wanted) {
  constexpr std::array<std::array<double, 2>, 3> kPoints{{{0.375, 0}, {2.5, 3}, {1.25, -1.5}}};
  const double largest =
      std::fabs(*std::ranges::max_element(values, {}, [](double x) { return std::fabs(x); }));
  for (const auto& [scale, zero] : kPoints)
    for (int code = 0; code < static_cast<int>(values.size()); ++code) {
      const double of_zero = expression.reads_zero() ? zero : 0;
      const double got = expression.value(code, scale, of_zero) * (expression.reads_scale() ? 1 : scale);
      const double differs = got - wanted(values[static_cast<std::size_t>(code)], scale, of_zero);
      if (!(std::fabs(differs) <= 1e-6 * (largest + std::fabs(of_zero)))) return false;
    }
  return true;
}

/// None: the value is not that of the code times the scale.
std::optional<Zero> zero_of(const DecodeExpression& expression, const std::vector<double>& values) {
  const auto subtracted = [](double value, double scale, double zero) { return (value - zero) * scale; };
  const auto added = [](double value, double scale, double zero) { return value * scale + zero; };
  if (is_everywhere(expression, values, subtracted))
    return expression.reads_zero() ? Zero::subtracted : Zero::none;
  if (is_everywhere(expression, values, added)) return Zero::added;
  return {};
}

/// The codes that have these values, without a book where there are such; none where zero points go with
/// values that are no integers in a row.
std::optional<DecodedCode> code_of_values(const std::vector<double>& values, int bits, Zero zero) {
  for (int i = static_cast<int>(Code::e4m3); i < static_cast<int>(Code::book); ++i) {
    const KvFormat known{.code = static_cast<Code>(i)};
    const auto is_same = [&](int code) {
      return code_value(known, static_cast<unsigned>(code)) == values[static_cast<std::size_t>(code)];
    };
    bool same = known.bits() == bits && (zero != Zero::none || !name_of(known.code).starts_with('u'));
    for (int code = 0; same && code < 1 << bits; ++code) same = is_same(code);
    if (same) return DecodedCode{.code = known.code, .zero = zero};
  }
  if (zero != Zero::none) return {};
  DecodedCode found;
  for (const double value : values) found.book.push_back(static_cast<float>(value));
  return found;
}

/// What is no table: an element by the expression itself.
DecodedCode decoded_by(const DecodeExpression& expression, std::string_view text, int bits) {
  constexpr std::array kCodes{Code::uint2, Code::uint3, Code::uint4, Code::uint5};
  return {.code = bits == 8 ? Code::uint8 : kCodes.at(static_cast<std::size_t>(bits - 2)),
          .zero = expression.reads_zero() ? Zero::subtracted : Zero::none,
          .decode = expression.reads_scale() ? std::string(text) : fmt::format("({}) * scale", text)};
}

/// "decode4(<expression>)".
std::optional<DecodedCode> decoded_code(std::string_view text, std::string_view word) {
  constexpr std::string_view kName = "decode";
  if (!word.starts_with(kName) || !word.ends_with(')')) return {};
  const auto open = word.find('(');
  const std::string_view number = word.substr(kName.size(), open - kName.size());
  const int bits = number.size() == 1 ? number[0] - '0' : 0;
  if (bits != 2 && bits != 3 && bits != 4 && bits != 5 && bits != 8)
    refuse_text(text,
                fmt::format("has codes of {} bits; these are 2, 3, 4, 5 or 8, as in decode4(<expression>)",
                            quoted(number)));
  try {
    const std::string_view of_code = word.substr(open + 1, word.size() - open - 2);
    const DecodeExpression expression(of_code, expr::Floats::exact);
    std::vector<double> values;
    for (int code = 0; code < 1 << bits; ++code) values.push_back(expression.value(code, 1, 0));
    if (!std::ranges::all_of(values, [](double value) { return std::isfinite(value); }))
      refuse("a code's value is not finite");
    const auto zero = zero_of(expression, values);
    const auto table = zero ? code_of_values(values, bits, *zero) : std::nullopt;
    return table ? table : decoded_by(expression, of_code, bits);
  } catch (const Error& error) {
    refuse("the KV format {} has an expression that cannot be its codes: {}", quoted(text), error.message());
  }
}

/// Whether an expression reads the zero points that the parts give; one that is the element itself, any.
void check_zero(std::string_view text, const KvFormat& format, Zero read) {
  const Zero given = format.zero;
  if (read == given) return;
  if (!format.decode.empty())
    refuse_text(text, read == Zero::none
                          ? "has zero points, which its expression does not read: leave these out"
                          : "has an expression that reads zero, but no zero points: add zero or zero=uint4");
  const auto named = [](Zero zero) {
    return zero == Zero::none    ? "no zero point"
           : zero == Zero::added ? "an added zero point"
                                 : "a subtracted zero point";
  };
  refuse_text(
      text,
      fmt::format("has an expression with {} and parts with {}: zero and zero=uint4 go with (code - zero) * "
                  "scale, min with code * scale + zero",
                  named(read), named(given)));
}

std::vector<float> parse_book(std::string_view text, std::string_view values) {
  std::vector<float> book;
  for (const std::string_view value : split(values, ',')) {
    const char* const end = value.data() + value.size();
    const auto [stop, error] = std::from_chars(value.data(), end, book.emplace_back());
    if (error != std::errc() || stop != end)
      refuse_text(text, fmt::format("has {}, which is no number", quoted(value)));
  }
  return book;
}

/// The zero points of an expression go to `zero`.
Code parse_code(std::string_view text, std::string_view word, KvFormat& format, std::optional<Zero>& zero) {
  if (word.starts_with("book(") && word.ends_with(')')) {
    format.book = parse_book(text, word.substr(5, word.size() - 6));
    return Code::book;
  }
  if (const auto decoded = decoded_code(text, word)) {
    format.book = decoded->book, format.decode = decoded->decode;
    zero = decoded->zero;
    return decoded->code;
  }
  if (const auto code = code_named(word); code && code != Code::book) return *code;
  refuse_text(text, fmt::format("begins with {}, which is neither a name nor codes", quoted(word)));
}

/// A number behind a prefix, as in "g32".
std::optional<int> parse_count(std::string_view word, std::string_view prefix, const char* name) {
  if (word.size() <= prefix.size() || !word.starts_with(prefix)) return {};
  word.remove_prefix(prefix.size());
  if (!std::ranges::all_of(word, [](char c) { return c >= '0' && c <= '9'; })) return {};
  return static_cast<int>(parse_int(word, name, 1, 1 << 20));
}

/// What shares a scale: columns, "g32" or "row", or keys, "keys32".
bool parse_block(std::string_view word, KvFormat& format) {
  format.scales = Scales::behind_codes;
  if (word == "row") return true;
  if (const auto columns = parse_count(word, "g", "the block of columns")) {
    format.block = *columns;
    return true;
  }
  const auto keys = parse_count(word, "keys", "the group of keys");
  if (keys) format.scales = Scales::apart, format.keys = *keys;
  return keys.has_value();
}

bool parse_number(std::string_view word, Number& number) {
  const auto named = number_named(word);
  number = named.value_or(number);
  return named.has_value();
}

/// "zero", of the scales' type, "zero=uint4" or "min".
bool parse_zero(std::string_view text, std::string_view word, KvFormat& format) {
  if (!word.starts_with("zero") && word != "min") return false;
  format.zero = word == "min" ? Zero::added : Zero::subtracted;
  if (word == "min" || word == "zero") return true;
  for (const int bits : kZeroBits)
    if (word == fmt::format("zero=uint{}", bits)) {
      format.zero_bits = bits;
      return true;
    }
  refuse_text(text, fmt::format("has {} where zero, zero=uint2, zero=uint4 or zero=uint8 should stand",
                                quoted(word)));
}

/// "tail64" or "tail64xfp16".
bool parse_tail(std::string_view text, std::string_view word, KvFormat& format) {
  if (!word.starts_with("tail")) return false;
  const auto parts = split(word.substr(4), 'x');
  format.tail = static_cast<int>(parse_int(parts[0], "the columns of the tail", 1, 1 << 20));
  if (parts.size() > 2 || (parts.size() == 2 && !parse_number(parts[1], format.tail_type)))
    refuse_text(text, fmt::format("has {} where tail<columns>x<type> should stand", quoted(word)));
  return true;
}

KvFormat parse_parts(std::string_view text) {
  KvFormat format;
  const auto words = split(text, ':');
  std::optional<Zero> zero_read;
  format.code = parse_code(text, words[0], format, zero_read);
  std::size_t next = 1;
  const auto take = [&](std::string_view word) {
    const bool found = next < words.size() && words[next] == word;
    next += found;
    return found;
  };
  if (next < words.size()) {
    if (!parse_block(words[next], format))
      refuse_text(text,
                  fmt::format("has {} where g<columns>, row or keys<n> should stand", quoted(words[next])));
    ++next;
    if (next == words.size() || !parse_number(words[next], format.scale_type))
      refuse_text(text, "does not say the type of its scales");
    ++next;
    if (format.keys == 0 && take("before"))
      format.scales = Scales::before_block;
    else if (format.keys == 0 && take("apart"))
      format.scales = Scales::apart;
    if (next < words.size() && parse_zero(text, words[next], format)) ++next;
    if (take("halves")) format.packing = Packing::halves;
    if (next < words.size() && parse_tail(text, words[next], format)) ++next;
    format.second_scale = take("scaled");
  }
  if (!format.decode.empty() && format.zero == Zero::added)
    format.zero = Zero::subtracted;  // stored alike; the expression says what it does
  if (zero_read) check_zero(text, format, *zero_read);
  if (next < words.size())
    refuse_text(text,
                fmt::format("has {}, which is unknown, there twice or out of order", quoted(words[next])));
  return format;
}

}  // namespace

KvFormat parse_kv_format(std::string_view text) {
  std::string_view parts = text;
  for (const NamedKvFormat& named : named_kv_formats())
    if (text == named.name) parts = named.parts;
  const KvFormat format = parse_parts(parts);
  try {
    format.validate();
  } catch (const Error& error) {
    refuse("the KV format {} is wrong: {}", quoted(text), error.message());
  }
  return format;
}

}  // namespace flashjit
