#include "support/text.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <charconv>

#include "flashjit/error.hpp"

namespace flashjit {

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> pieces;
  for (std::size_t begin = 0;;) {
    const std::size_t end = text.find(separator, begin);
    pieces.push_back(text.substr(begin, end - begin));
    if (end == std::string_view::npos) return pieces;
    begin = end + 1;
  }
}

std::string quoted(std::string_view text) {
  constexpr std::size_t kLongest = 80;
  std::string out = "'";
  for (const char c : text.substr(0, kLongest)) {
    out += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? '?' : c;
  }
  return out + (text.size() > kLongest ? "...'" : "'");
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
