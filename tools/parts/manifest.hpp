// The manifest of a pack: the SHA-256 digest of every file, a line each, in the form that `sha256sum -c`
// reads. Signing the manifest, or its digest, signs the pack.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace flashjit::command {

struct ManifestLine {
  std::string digest, path;  ///< 64 hexadecimal digits; relative to the pack's v1
  bool operator==(const ManifestLine&) const = default;
};

std::string to_text(const std::vector<ManifestLine>& lines);
/// Throws Error(io) with the line's number for what is no line, for a path twice, and for a path that
/// would leave the folder.
std::vector<ManifestLine> parse_manifest(std::string_view text);

/// `folder`/v1/SHA256SUMS.
std::filesystem::path manifest_path(const std::filesystem::path& folder);

/// Writes the manifest of the pack `folder`. Returns its own digest. Throws Error(io).
std::string write_manifest(const std::filesystem::path& folder);

/// What differs between the pack `folder` and its manifest, a line each: files that are missing, changed,
/// reached through links, or not named. Empty: the pack is whole. Throws Error(io) when the manifest cannot
/// be read.
std::vector<std::string> check_manifest(const std::filesystem::path& folder);

}  // namespace flashjit::command
