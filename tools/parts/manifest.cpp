#include "tools/parts/manifest.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "cache/digest.hpp"
#include "cache/folders.hpp"
#include "flashjit/error.hpp"
#include "support/file.hpp"
#include "support/paths.hpp"
#include "support/text.hpp"
#include "tools/parts/sha256.hpp"

namespace flashjit::command {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kDigits = 64;
constexpr std::string_view kGap = "  ";

/// Without a step up, and in the one spelling that a path has.
bool stays_inside(std::string_view text) {
  const fs::path path = path_of(text);
  return text.find('\0') == text.npos && !path.has_root_path() &&
         text == path.lexically_normal().generic_string() && path.has_filename() && path != "." &&
         *path.begin() != "..";
}

ManifestLine parse_line(std::string_view line, std::size_t number) {
  const auto refuse = [&](std::string_view why) {
    throw Error(ErrorCode::io, fmt::format("line {} of {} {}", number, cache::kManifestFile, why));
  };
  if (line.size() <= kDigits + kGap.size() || !cache::is_hexadecimal(line.substr(0, kDigits)) ||
      line.substr(kDigits, kGap.size()) != kGap)
    refuse("is not a digest of 64 digits, two spaces and a path");
  const std::string_view path = line.substr(kDigits + kGap.size());
  if (!stays_inside(path)) refuse(fmt::format("names {}, which is no path within the pack", quoted(path)));
  return {std::string(line.substr(0, kDigits)), std::string(path)};
}

/// No part of a pack, and at its top: what a process is just writing, locks, and the manifest itself.
bool is_left_out(const fs::path& name) {
  return name == cache::kTemporaryFolder || name == cache::kLockFolder || name == cache::kManifestFile;
}

/// Nor what is left of a record or a manifest. With an extension it may be a record, whatever its name.
bool is_unfinished(const fs::path& name) {
  return name.string().starts_with(kUnfinishedPrefix) && !name.has_extension();
}

/// The files below v1, relative to it and sorted; including what is not a plain file.
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
std::string complaint(const fs::path& root, const ManifestLine& line) {
  std::error_code error;
  if (!fs::exists(fs::symlink_status(root / path_of(line.path), error))) return "is missing";
  if (passes_a_link(root, path_of(line.path))) return "is reached through a link";
  try {
    return sha256(read_file(root / path_of(line.path), kStoredFileLimit)) == line.digest ? "" : "has changed";
  } catch (const Error& failure) {
    return failure.message();
  }
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
      throw Error(ErrorCode::io, fmt::format("{} names {} twice", cache::kManifestFile,
                                             quoted(std::string_view(lines.back().path))));
  }
  return lines;
}

fs::path manifest_path(const fs::path& folder) {
  return folder / cache::kVersionFolder / cache::kManifestFile;
}

std::string write_manifest(const fs::path& folder) {
  const fs::path manifest = manifest_path(folder), root = manifest.parent_path();
  std::vector<ManifestLine> lines;
  for (const std::string& file : files_below(root)) {
    if (file.find('\n') != file.npos || !stays_inside(file))
      throw Error(ErrorCode::io,
                  fmt::format("the pack '{}' holds {}, a name that its manifest cannot have: remove it",
                              folder.string(), quoted(file)));
    lines.push_back({sha256(read_file(root / path_of(file), kStoredFileLimit)), file});
  }
  const std::string text = to_text(lines);
  write_file_atomically(manifest, text, Audience::user);
  return sha256(text);
}

std::vector<std::string> check_manifest(const fs::path& folder) {
  const fs::path manifest = manifest_path(folder), root = manifest.parent_path();
  std::vector<std::string> differences;
  std::set<std::string> named;
  for (const ManifestLine& line : parse_manifest(read_file(manifest, kStoredFileLimit))) {
    named.insert(line.path);
    if (const std::string wrong = complaint(root, line); !wrong.empty())
      differences.push_back(fmt::format("{} {}", printable(line.path), wrong));
  }
  for (const std::string& file : files_below(root))
    if (!named.contains(file)) differences.push_back(fmt::format("{} is not named", file));
  return differences;
}

}  // namespace flashjit::command
