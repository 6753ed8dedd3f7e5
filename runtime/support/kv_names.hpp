// Names and sizes of the parts of a KvFormat.
#pragma once

#include <array>
#include <optional>
#include <string_view>

#include "flashjit/kv_format.hpp"

namespace flashjit {

/// As in the text of a format; the kernels' enumerators have the same names. Both refuse what has no name.
std::string_view name_of(KvFormat::Code code);
std::string_view name_of(KvFormat::Number type);
/// What has the name; none: nothing has.
std::optional<KvFormat::Code> code_named(std::string_view name);
std::optional<KvFormat::Number> number_named(std::string_view name);

/// Bits that zero points may have as integers.
inline constexpr std::array kZeroBits{2, 4, 8};

/// Bytes of a scale, or of a zero point.
constexpr int size_of(KvFormat::Number type) {
  using enum KvFormat::Number;
  return type == fp32 ? 4 : type <= bf16 ? 2 : 1;
}

}  // namespace flashjit
