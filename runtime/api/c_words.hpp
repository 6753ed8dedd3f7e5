// Messages are written for C++; in C, and in what is built on it, a spec is a text and functions have other
// names.
#pragma once

#include <string>

namespace flashjit::c_api {

/// A message with what to write in C, where it says what to write in C++.
std::string in_c_words(std::string message);

}  // namespace flashjit::c_api
