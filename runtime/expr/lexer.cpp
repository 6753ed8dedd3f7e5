#include "expr/lexer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "flashjit/error.hpp"
#include "support/text.hpp"

namespace flashjit::expr {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }
bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

// The long ones first.
constexpr std::string_view kSymbols[] = {"||", "&&", "==", "!=", "<=", ">=", "<<", ">>", "(", ")",
                                         "[",  "]",  "?",  ":",  ";",  ",",  "|",  "^",  "&", "<",
                                         ">",  "+",  "-",  "*",  "/",  "%",  "!",  "~"};

/// Length of the number at the beginning of the text, with letters that follow it by mistake.
std::size_t number_length(std::string_view text) {
  std::size_t length = 0;
  const auto at = [&](std::size_t i) { return i < text.size() ? text[i] : '\0'; };
  while (is_digit(at(length)) || is_letter(at(length)) || at(length) == '.') {
    const bool exponent = at(length) == 'e' || at(length) == 'E';
    ++length;
    if (exponent && (at(length) == '+' || at(length) == '-') && is_digit(at(length + 1))) ++length;
  }
  return length;
}

std::size_t word_length(std::string_view text) {
  const auto end = std::ranges::find_if(text, [](char c) { return !is_letter(c) && !is_digit(c); });
  return static_cast<std::size_t>(end - text.begin());
}

std::size_t symbol_length(std::string_view text) {
  const auto found = std::ranges::find_if(kSymbols, [&](std::string_view s) { return text.starts_with(s); });
  return found == std::end(kSymbols) ? 0 : found->size();
}

}  // namespace

void refuse_at(std::string_view text, std::size_t at, std::string_view message) {
  constexpr std::size_t kBefore = 70, kAfter = 30;
  at = std::min(at, text.size());
  const std::size_t previous = text.substr(0, at).rfind('\n');
  const std::size_t line = previous == std::string_view::npos ? 0 : previous + 1;
  const std::size_t begin = at - line > kBefore ? at - kBefore : line;
  const std::size_t end = std::min({text.find('\n', at), text.size(), at + kAfter});
  std::string shown(text.substr(begin, end - begin));
  for (char& c : shown) c = c < ' ' || c > '~' ? '?' : c;
  throw Error(ErrorCode::invalid_argument,
              fmt::format("{}\n  {}\n  {}^", message, shown, std::string(at - begin, ' ')));
}

std::vector<Token> tokens_of(std::string_view text) {
  std::vector<Token> out;
  for (std::size_t at = 0;;) {
    while (at < text.size() && is_blank(text[at])) ++at;
    const std::string_view rest = text.substr(at);
    if (rest.empty()) {
      out.push_back({TokenKind::end, rest});
      return out;
    }
    TokenKind kind = TokenKind::symbol;
    std::size_t length = 0;
    if (is_letter(rest[0])) {
      kind = TokenKind::word;
      length = word_length(rest);
    } else if (is_digit(rest[0]) || (rest[0] == '.' && rest.size() > 1 && is_digit(rest[1]))) {
      kind = TokenKind::number;
      length = number_length(rest);
    } else {
      length = symbol_length(rest);
    }
    if (length == 0)
      refuse_at(text, at,
                fmt::format("a program cannot hold {}; it is made of names, numbers, operators, ( ) [ ] , ; "
                            "and :",
                            quoted(rest.substr(0, 1))));
    out.push_back({kind, rest.substr(0, length)});
    at += length;
  }
}

}  // namespace flashjit::expr
