// JSON that comes from files.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "support/refuse.hpp"

namespace flashjit {

/// Deeper than anything that flashjit writes, and far from what recursion over a document can bear.
inline constexpr int kMaxJsonDepth = 32;
/// More than flashjit writes: a record of thousands of timings, a kernel's meta.json with a long log. It
/// bounds the time, too: a parser takes far longer for a byte than the disk does.
inline constexpr std::uintmax_t kMaxJsonBytes = 4u << 20;

/// The deepest nesting, counted without a parser: brackets outside of strings.
inline int json_depth(std::string_view text) {
  int depth = 0, deepest = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '"') in_string = !in_string;
    if (in_string && c == '\\') ++i;
    if (in_string) continue;
    depth += (c == '[' || c == '{') - (c == ']' || c == '}');
    deepest = depth > deepest ? depth : deepest;
  }
  return deepest;
}

/// Throws nlohmann::json::exception for what is no JSON, Error(io) for what is nested too deep or too long.
/// Without the parser's callback, which makes it look through an array at the end of each of its objects.
inline nlohmann::json parse_json(const std::string& text) {
  if (text.size() > kMaxJsonBytes)
    damaged("the JSON has {} bytes, but may have at most {}", text.size(), kMaxJsonBytes);
  if (json_depth(text) > kMaxJsonDepth) damaged("the JSON is nested deeper than any flashjit writes");
  return nlohmann::json::parse(text);
}

}  // namespace flashjit
