// A program's text as tokens.
#pragma once

#include <string_view>
#include <vector>

namespace flashjit::expr {

enum class TokenKind { word, number, symbol, end };

struct Token {
  TokenKind kind;
  std::string_view text;  ///< a part of the program's text; empty at its end
};

/// The last token is the end. Throws Error(invalid_argument) at a character that no token begins with.
std::vector<Token> tokens_of(std::string_view text);

/// Throws Error(invalid_argument): the message, the line of the text and a caret under the place `at`.
[[noreturn]] void refuse_at(std::string_view text, std::size_t at, std::string_view message);

}  // namespace flashjit::expr
