// JSON that comes from files.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "flashjit/error.hpp"

namespace flashjit {

/// Deeper than anything that flashjit writes, and far from what recursion over a document can bear.
inline constexpr int kMaxJsonDepth = 32;

/// Throws nlohmann::json::exception for what is no JSON, Error(io) for what is nested too deep.
inline nlohmann::json parse_json(const std::string& text) {
  return nlohmann::json::parse(text, [](int depth, nlohmann::json::parse_event_t, nlohmann::json&) {
    if (depth > kMaxJsonDepth)
      throw Error(ErrorCode::io, "the JSON is nested deeper than any flashjit writes");
    return true;
  });
}

}  // namespace flashjit
