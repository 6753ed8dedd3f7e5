// Calls whose arguments are wrong in one thing, and what they are told.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <initializer_list>
#include <string>

#include "flashjit/error.hpp"
#include "flashjit/spec.hpp"

namespace flashjit::test {

/// An address that nothing reads: the checks look at pointers, not at memory.
template <class T = void>
T* address(std::uintptr_t value) {
  return reinterpret_cast<T*>(value);
}

/// The message that the check refuses with, or "accepted".
template <class Check>
std::string refusal_of(Check&& check) {
  try {
    check();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    return error.message();
  }
  return "accepted";
}

/// The refusal of a spec's text.
inline std::string refused_spec(const std::string& text) {
  return refusal_of([&] { parse_spec(text).validate(); });
}

/// The refusal of a KV format's text, or of its rows of `dim` columns.
inline std::string refused_kv_format(const std::string& text) {
  return refusal_of([&] { parse_kv_format(text); });
}
inline std::string refused_kv_format(const std::string& text, int dim) {
  return refusal_of([&] { parse_kv_format(text).validate_row(dim); });
}

inline void expect_says(const std::string& said, std::initializer_list<const char*> parts) {
  for (const char* part : parts) EXPECT_NE(said.find(part), said.npos) << said;
}

}  // namespace flashjit::test
