#pragma once

#include <string>
#include <string_view>

namespace flashjit::command {

/// SHA-256 (FIPS 180-4), as `sha256sum` prints it: 64 hexadecimal digits.
std::string sha256(std::string_view bytes);

}  // namespace flashjit::command
