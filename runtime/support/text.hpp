// Small text helpers that several layers share.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace flashjit {

/// The pieces between separators; one piece more than there are separators, so "" has one empty piece.
std::vector<std::string_view> split(std::string_view text, char separator);

/// The text with a '?' for each control character, each that turns the direction of text or has no width, and
/// each byte that is no UTF-8: fit for one line of a message.
std::string printable(std::string_view text);

/// printable() text in single quotes; long text is cut.
std::string quoted(std::string_view text);
/// Without this overload, a call with a std::string would find std::quoted.
inline std::string quoted(const std::string& text) { return quoted(std::string_view(text)); }

/// The text as one word of a shell's command line: as it is, or in quotes where the shell would read it
/// otherwise. It holds no quote itself.
std::string shell_word(std::string_view text);

/// A decimal integer that fills `text`. Throws Error(invalid_argument) that says what `what` was given and
/// that `min` to `max` is allowed.
std::int64_t parse_int(std::string_view text, std::string_view what, std::int64_t min, std::int64_t max);

/// Bytes of "4096", "512M" or "1G" (powers of 1024). Throws Error(invalid_argument).
std::uint64_t parse_bytes(std::string_view text);

/// flashjit's own version: "0.1.0".
std::string_view library_version();

/// A version as CUDA's interfaces encode it: 12040 becomes "12.4".
std::string cuda_version_text(int version);

}  // namespace flashjit
