#include "support/text.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>

#include "flashjit/error.hpp"

namespace flashjit {
namespace {

/// Bytes of the printable UTF-8 character that `text` begins with; 0: there is none.
std::size_t character_bytes(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned first = byte(0);
  if (first < 0x80) return first >= 0x20 && first != 0x7f;
  const std::size_t bytes = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || text.size() < bytes) return 0;
  for (std::size_t i = 1; i < bytes; ++i)
    if ((byte(i) & 0xc0) != 0x80) return 0;
  // Control characters of Latin-1, longer spellings of what is shorter, halves of pairs, and what is no code
  // point.
  const unsigned second = byte(1);
  const bool none = ((first == 0xc2 || first == 0xe0) && second < 0xa0) ||
                    (first == 0xed && second >= 0xa0) || (first == 0xf0 && second < 0x90) ||
                    (first == 0xf4 && second >= 0x90);
  return none ? 0 : bytes;
}

/// The code point of a character that character_bytes() found.
char32_t code_point(std::string_view character) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(character[i]); };
  if (character.size() == 1) return byte(0);
  char32_t code = byte(0) & (0x7f >> character.size());
  for (std::size_t i = 1; i < character.size(); ++i) code = code << 6 | (byte(i) & 0x3f);
  return code;
}

/// Whether it shows nothing itself, and changes how or where its neighbours show: line ends, marks and
/// overrides of the direction of text, fillers of no width, tags.
bool is_invisible(char32_t code) {
  constexpr std::array<std::array<char32_t, 2>, 8> kRanges{{{0xad, 0xad},
                                                            {0x61c, 0x61c},
                                                            {0x180e, 0x180e},
                                                            {0x200b, 0x200f},
                                                            {0x2028, 0x202e},
                                                            {0x2060, 0x206f},
                                                            {0xfeff, 0xfeff},
                                                            {0xe0000, 0xe007f}}};
  return std::ranges::any_of(kRanges,
                             [&](const auto& range) { return code >= range[0] && code <= range[1]; });
}

}  // namespace

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> pieces;
  for (std::size_t begin = 0;;) {
    const std::size_t end = text.find(separator, begin);
    pieces.push_back(text.substr(begin, end - begin));
    if (end == std::string_view::npos) return pieces;
    begin = end + 1;
  }
}

std::string printable(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const std::size_t bytes = character_bytes(text);
    const bool shows = bytes != 0 && !is_invisible(code_point(text.substr(0, bytes)));
    out += shows ? text.substr(0, bytes) : "?";
    text.remove_prefix(std::max<std::size_t>(bytes, 1));
  }
  return out;
}

std::string quoted(std::string_view text) {
  constexpr std::size_t kLongest = 80;
  return fmt::format("'{}{}'", printable(text.substr(0, kLongest)), text.size() > kLongest ? "..." : "");
}

std::string shell_word(std::string_view text) {
  const auto plain = [](unsigned char c) { return std::isalnum(c) != 0 || c == ':' || c == '_' || c == '.'; };
  return std::all_of(text.begin(), text.end(), plain) ? std::string(text) : fmt::format("'{}'", text);
}

std::int64_t parse_int(std::string_view text, std::string_view what, std::int64_t min, std::int64_t max) {
  std::int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || value < min || value > max) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("{} is {}; it must be an integer from {} to {}", what, quoted(text), min, max));
  }
  return value;
}

std::uint64_t parse_bytes(std::string_view text) {
  const auto refuse = [&] {
    return Error(ErrorCode::invalid_argument,
                 fmt::format("{} is no size; give a number of bytes, with k, M or G for powers of 1024: 512M",
                             quoted(text)));
  };
  std::uint64_t value = 0;
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (problem != std::errc() || end == text.data()) throw refuse();
  std::string_view unit(end, static_cast<std::size_t>(text.data() + text.size() - end));
  if (unit.size() > 1 && (unit.substr(1) == "B" || unit.substr(1) == "iB")) unit = unit.substr(0, 1);
  int shift = 0;
  if (unit == "k" || unit == "K")
    shift = 10;
  else if (unit == "m" || unit == "M")
    shift = 20;
  else if (unit == "g" || unit == "G")
    shift = 30;
  else if (!unit.empty())
    throw refuse();
  if (value > (UINT64_MAX >> shift)) throw refuse();
  return value << shift;
}

std::string_view library_version() { return FLASHJIT_VERSION; }

std::string cuda_version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

}  // namespace flashjit
