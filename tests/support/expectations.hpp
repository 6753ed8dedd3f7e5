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

/// What each byte flipped, in four ways, and each byte missing makes of a text.
inline void for_each_damage(const std::string& sound, const std::function<void(const std::string&)>& look) {
  for (std::size_t i = 0; i < sound.size(); ++i) {
    for (const unsigned char flip : {0x01, 0x10, 0x80, 0xff}) {
      std::string flipped = sound;
      flipped[i] = static_cast<char>(static_cast<unsigned char>(sound[i]) ^ flip);
      look(flipped);
    }
    look(std::string(sound).erase(i, 1));
  }
}

}  // namespace flashjit
