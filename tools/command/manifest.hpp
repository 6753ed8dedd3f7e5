// The manifest of a pack: SHA-256 digests of every file (cache/manifest.hpp). Who signs the manifest, or
// notes its own digest, has signed the pack.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace flashjit::command {

/// 64 hexadecimal digits.
std::string sha256(std::string_view bytes);

/// `folder`/v1/SHA256SUMS.
std::filesystem::path manifest_path(const std::filesystem::path& folder);

/// Writes the manifest of the pack `folder`. Returns its own digest. Throws Error(io).
std::string write_manifest(const std::filesystem::path& folder);

/// What differs between the pack `folder` and its manifest, a line each: files that are missing, changed,
/// reached through links, or not named. Empty: the pack is whole. Throws Error(io) when the manifest cannot
/// be read.
std::vector<std::string> check_manifest(const std::filesystem::path& folder);

}  // namespace flashjit::command
