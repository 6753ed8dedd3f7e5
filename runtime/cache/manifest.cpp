#include "cache/manifest.hpp"

#include <fmt/format.h>

#include <filesystem>
#include <set>

#include "cache/digest.hpp"
#include "cache/folders.hpp"
#include "flashjit/error.hpp"
#include "support/text.hpp"

namespace flashjit::cache {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kDigits = 64;
constexpr std::string_view kGap = "  ";

/// Without a step up, and in the one spelling that a path has.
bool stays_inside(std::string_view text) {
  const fs::path path(text);
  return text.find('\0') == text.npos && path.is_relative() && text == path.lexically_normal().string() &&
         path.has_filename() && path != "." && *path.begin() != "..";
}

ManifestLine parse_line(std::string_view line, std::size_t number) {
  const auto refuse = [&](std::string_view why) {
    throw Error(ErrorCode::io, fmt::format("line {} of {} {}", number, kManifestFile, why));
  };
  if (line.size() <= kDigits + kGap.size() || !is_hexadecimal(line.substr(0, kDigits)) ||
      line.substr(kDigits, kGap.size()) != kGap)
    refuse("is not a digest of 64 digits, two spaces and a path");
  const std::string_view path = line.substr(kDigits + kGap.size());
  if (!stays_inside(path)) refuse(fmt::format("names {}, which is no path within the pack", quoted(path)));
  return {std::string(line.substr(0, kDigits)), std::string(path)};
}

}  // namespace

std::string to_text(const std::vector<ManifestLine>& lines) {
  std::string text;
  for (const ManifestLine& line : lines) text += fmt::format("{}{}{}\n", line.digest, kGap, line.path);
  return text;
}

std::vector<ManifestLine> parse_manifest(std::string_view text) {
  std::vector<ManifestLine> lines;
  std::set<std::string> paths;
  if (text.ends_with('\n')) text.remove_suffix(1);
  if (text.empty()) return lines;
  for (const std::string_view line : split(text, '\n')) {
    lines.push_back(parse_line(line, lines.size() + 1));
    if (!paths.insert(lines.back().path).second)
      throw Error(ErrorCode::io, fmt::format("{} names {} twice", kManifestFile,
                                             quoted(std::string_view(lines.back().path))));
  }
  return lines;
}

}  // namespace flashjit::cache
