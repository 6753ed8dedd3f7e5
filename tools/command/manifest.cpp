#include "manifest.hpp"

#include <fmt/format.h>
// The older interface is a few kilobytes of code; the newer one brings all of libcrypto into the command.
#define OPENSSL_API_COMPAT 10100
#include <openssl/sha.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>

#include "cache/folders.hpp"
#include "flashjit/error.hpp"
#include "support/file.hpp"
#include "support/text.hpp"

namespace flashjit::command {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kDigits = 2 * SHA256_DIGEST_LENGTH;
constexpr std::string_view kGap = "  ";

bool is_digest(std::string_view text) {
  return text.size() == kDigits &&
         std::ranges::all_of(text, [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

/// Below v1/, without a step up, and in the one spelling that a path has.
bool stays_inside(std::string_view text) {
  const fs::path path(text);
  return text.find('\0') == text.npos && path.is_relative() && text == path.lexically_normal().string() &&
         path.begin() != path.end() && *path.begin() == cache::kVersionFolder && path.has_filename() &&
         std::ranges::find(path, fs::path("..")) == path.end() && std::distance(path.begin(), path.end()) > 1;
}

ManifestLine parse_line(std::string_view line, std::size_t number) {
  const auto refuse = [&](std::string_view why) {
    throw Error(ErrorCode::io, fmt::format("line {} of {} {}", number, cache::kManifestFile, why));
  };
  if (line.size() <= kDigits + kGap.size() || !is_digest(line.substr(0, kDigits)) ||
      line.substr(kDigits, kGap.size()) != kGap)
    refuse("is not a digest of 64 digits, two spaces and a path");
  const std::string_view path = line.substr(kDigits + kGap.size());
  if (!stays_inside(path)) refuse(fmt::format("names {}, which is not below the pack's v1", quoted(path)));
  return {std::string(line.substr(0, kDigits)), std::string(path)};
}

/// The pack's files, relative and sorted; what is no plain file stands among them, too. What a process is
/// just writing, and locks, are no part of a pack.
std::vector<std::string> files_of(const fs::path& folder) {
  std::vector<std::string> files;
  const fs::path root = folder / cache::kVersionFolder;
  std::error_code error;
  fs::recursive_directory_iterator item(root, error), end;
  for (; !error && item != end; item.increment(error)) {
    if (item.depth() == 0 && (item->path().filename() == cache::kTemporaryFolder ||
                              item->path().filename() == cache::kLockFolder)) {
      item.disable_recursion_pending();
      continue;
    }
    if (item->symlink_status().type() != fs::file_type::directory)
      files.push_back(item->path().lexically_relative(folder).generic_string());
  }
  if (error)
    throw Error(ErrorCode::io,
                fmt::format("cannot list the pack '{}': {}", folder.string(), error.message()));
  std::ranges::sort(files);
  return files;
}

/// Whether a file, or a folder on the way to it, is a link: the manifest speaks of the pack's own files.
bool passes_a_link(const fs::path& folder, const fs::path& relative) {
  fs::path path = folder;
  for (const fs::path& part : relative) {
    std::error_code error;
    path /= part;
    if (fs::is_symlink(fs::symlink_status(path, error))) return true;
  }
  return false;
}

/// What is wrong with a named file; empty: nothing.
std::string complaint(const fs::path& folder, const ManifestLine& line) {
  std::error_code error;
  if (!fs::exists(fs::symlink_status(folder / line.path, error))) return "is missing";
  if (passes_a_link(folder, line.path)) return "is reached through a link";
  try {
    return sha256(read_file(folder / line.path)) == line.digest ? "" : "has changed";
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

std::vector<ManifestLine> parse_manifest(std::string_view text) {
  std::vector<ManifestLine> lines;
  std::set<std::string> paths;
  if (text.ends_with('\n')) text.remove_suffix(1);
  if (text.empty()) return lines;
  for (const std::string_view line : split(text, '\n')) {
    lines.push_back(parse_line(line, lines.size() + 1));
    if (!paths.insert(lines.back().path).second)
      throw Error(ErrorCode::io, fmt::format("{} names {} twice", cache::kManifestFile,
                                             quoted(std::string_view(lines.back().path))));
  }
  return lines;
}

std::string write_manifest(const fs::path& folder) {
  std::string text;
  for (const std::string& file : files_of(folder))
    text += fmt::format("{}{}{}\n", sha256(read_file(folder / file)), kGap, file);
  write_file_atomically(folder / cache::kManifestFile, text, Audience::user);
  return sha256(text);
}

std::vector<std::string> check_manifest(const fs::path& folder) {
  std::vector<std::string> differences;
  std::set<std::string> named;
  for (const ManifestLine& line : parse_manifest(read_file(folder / cache::kManifestFile))) {
    named.insert(line.path);
    if (const std::string wrong = complaint(folder, line); !wrong.empty())
      differences.push_back(fmt::format("{} {}", line.path, wrong));
  }
  for (const std::string& file : files_of(folder))
    if (!named.contains(file)) differences.push_back(fmt::format("{} is not named", file));
  return differences;
}

}  // namespace flashjit::command
