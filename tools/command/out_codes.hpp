// O as codes (out{...} of a spec): what the command calls with, and what the codes stand for.
#pragma once

#include <cstdint>
#include <vector>

#include "flashjit/spec.hpp"

namespace flashjit::command {

/// ForwardArgs::out_scale of the command's calls: O of normal V stays below the largest code.
inline constexpr float kOutScale = 1.0f / 64;

/// O of contiguous rows of codes, [batch, heads, rows], and, where the format has them apart, of scales,
/// which may be swizzled.
std::vector<double> values_of_codes(const AttentionSpec& spec, std::int64_t heads, std::int64_t rows,
                                    const std::vector<std::byte>& codes,
                                    const std::vector<std::byte>& scales);
/// O as it is after being stored as the spec says: O itself where that is no codes.
std::vector<double> stored_as(const AttentionSpec& spec, std::vector<double> out);

}  // namespace flashjit::command
