#include "manifest.hpp"

#include <fmt/format.h>
// The older interface is a few kilobytes of code; the newer one brings all of libcrypto into the command.
#define OPENSSL_API_COMPAT 10100
#include <openssl/sha.h>

#include <algorithm>
#include <array>
#include <set>

#include "cache/folders.hpp"
#include "cache/manifest.hpp"
#include "flashjit/error.hpp"
#include "support/file.hpp"

namespace flashjit::command {
namespace {

namespace fs = std::filesystem;

/// No part of a pack, and at its top: what a process is just writing, locks, and the manifest itself.
bool is_left_out(const fs::path& name) {
  return name == cache::kTemporaryFolder || name == cache::kLockFolder || name == cache::kManifestFile;
}

/// Nor what is left of a record or a manifest. With an extension it may be a record, whatever its name.
bool is_unfinished(const fs::path& name) {
  return name.string().starts_with(kUnfinishedPrefix) && !name.has_extension();
}

/// The files below v1, relative to it and sorted; what is no plain file stands among them, too.
std::vector<std::string> files_below(const fs::path& root) {
  std::vector<std::string> files;
  std::error_code error;
  fs::recursive_directory_iterator item(root, error), end;
  for (; !error && item != end; item.increment(error)) {
    const fs::path name = item->path().filename();
    if (item.depth() == 0 && is_left_out(name))
      item.disable_recursion_pending();
    else if (item->symlink_status(error).type() != fs::file_type::directory && !is_unfinished(name))
      files.push_back(item->path().lexically_relative(root).generic_string());
  }
  if (error)
    throw Error(ErrorCode::io, fmt::format("cannot list the pack '{}': {}", root.string(), error.message()));
  std::ranges::sort(files);
  return files;
}

/// Whether a file, or a folder on the way to it, is a link: the manifest speaks of the pack's own files.
bool passes_a_link(const fs::path& root, const fs::path& relative) {
  fs::path path = root;
  for (const fs::path& part : relative) {
    path /= part;
    if (is_link(path)) return true;
  }
  return false;
}

/// What is wrong with a named file; empty: nothing.
std::string complaint(const fs::path& root, const cache::ManifestLine& line) {
  std::error_code error;
  if (!fs::exists(fs::symlink_status(root / line.path, error))) return "is missing";
  if (passes_a_link(root, line.path)) return "is reached through a link";
  try {
    return sha256(read_file(root / line.path, kStoredFileLimit)) == line.digest ? "" : "has changed";
  } catch (const Error& failure) {
    return failure.message();
  }
}

}  // namespace

std::string sha256(std::string_view bytes) {
  std::array<unsigned char, SHA256_DIGEST_LENGTH> digest{};
  SHA256_CTX context;
  ::SHA256_Init(&context);
  ::SHA256_Update(&context, bytes.data(), bytes.size());
  ::SHA256_Final(digest.data(), &context);
  std::string text;
  for (const unsigned char byte : digest) text += fmt::format("{:02x}", byte);
  return text;
}

fs::path manifest_path(const fs::path& folder) {
  return folder / cache::kVersionFolder / cache::kManifestFile;
}

std::string write_manifest(const fs::path& folder) {
  const fs::path manifest = manifest_path(folder), root = manifest.parent_path();
  std::vector<cache::ManifestLine> lines;
  for (const std::string& file : files_below(root))
    lines.push_back({sha256(read_file(root / file, kStoredFileLimit)), file});
  const std::string text = to_text(lines);
  write_file_atomically(manifest, text, Audience::user);
  return sha256(text);
}

std::vector<std::string> check_manifest(const fs::path& folder) {
  const fs::path manifest = manifest_path(folder), root = manifest.parent_path();
  std::vector<std::string> differences;
  std::set<std::string> named;
  for (const cache::ManifestLine& line : cache::parse_manifest(read_file(manifest, kStoredFileLimit))) {
    named.insert(line.path);
    if (const std::string wrong = complaint(root, line); !wrong.empty())
      differences.push_back(fmt::format("{} {}", line.path, wrong));
  }
  for (const std::string& file : files_below(root))
    if (!named.contains(file)) differences.push_back(fmt::format("{} is not named", file));
  return differences;
}

}  // namespace flashjit::command
