// The text of a pack's manifest: a line for each file, in the form that `sha256sum -c` reads.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace flashjit::cache {

struct ManifestLine {
  std::string digest, path;  ///< 64 hexadecimal digits; relative to the pack's v1
  bool operator==(const ManifestLine&) const = default;
};

std::string to_text(const std::vector<ManifestLine>& lines);
/// Throws Error(io) with the line's number for what is no line, for a path twice, and for a path that
/// would leave the folder.
std::vector<ManifestLine> parse_manifest(std::string_view text);

}  // namespace flashjit::cache
