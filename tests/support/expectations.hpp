// What several unit tests expect of errors and texts.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "flashjit/error.hpp"

namespace flashjit {

/// The message of the Error that `action` throws, whose code must be `code`.
inline std::string failure(ErrorCode code, const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.message();
    return error.message();
  }
  ADD_FAILURE() << "nothing was refused";
  return {};
}

inline void expect_in(const std::string& part, const std::string& text) {
  EXPECT_NE(text.find(part), std::string::npos) << part << " in: " << text;
}

}  // namespace flashjit
