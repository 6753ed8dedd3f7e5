#include "cache/folders.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <system_error>

#include "cache/digest.hpp"
#include "flashjit/error.hpp"
#include "support/file.hpp"
#include "support/owner.hpp"

namespace flashjit::cache {
namespace {

namespace fs = std::filesystem;

constexpr int kFolderAttempts = 8;
constexpr std::chrono::seconds kUnlockedAge = std::chrono::hours(1);

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

// The names in a folder; none when it is not there.
std::vector<fs::path> children(const fs::path& folder) {
  std::vector<fs::path> paths;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    paths.push_back(it->path());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

bool is_entry_file(const fs::path& path) {
  const std::string name = path.filename().string();
  return name == kSourceFile || name == kCubinFile || name == kMetaFile;
}

bool is_record_file(const fs::path& path) { return path.extension() == ".json"; }

// What write_file_atomically() left of a record or a manifest when its process died.
bool is_unfinished(const fs::path& path) { return path.filename().string().starts_with(kUnfinishedPrefix); }

// What the store has in one of its own folders; none when that is a link.
std::vector<fs::path> own_children(const fs::path& root, std::string_view name) {
  return link_on_the_way(root, name).empty() ? children(root / name) : std::vector<fs::path>{};
}

bool make_own_folder(const fs::path& root, std::string_view name) {
  return link_on_the_way(root, name).empty() && make_private_folders(root / name).empty();
}

// Whether the file or folder is not locked; while `action` runs, it cannot be.
template <class Action>
void when_free(const fs::path& path, Action action) {
  FileLock lock;
  if (lock.lock_existing(path) == FileLock::Attempt::held) action();
}

// Whether it was last changed that long ago. A time to come is another clock's, and as good as any.
bool is_older(const fs::path& path, std::chrono::seconds age) {
  std::error_code error;
  const auto changed = fs::last_write_time(path, error);
  const auto now = fs::file_time_type::clock::now();
  return !error && (changed > now || now - changed >= age);
}

// The folder of the records and those below it; a folder comes before its contents.
std::vector<fs::path> record_folders(const fs::path& root) {
  std::vector<fs::path> folders;
  if (is_real_folder(root / kTuningFolder)) folders.push_back(root / kTuningFolder);
  for (std::size_t i = 0; i < folders.size(); ++i) {
    for (const fs::path& child : children(folders[i]))
      if (is_real_folder(child)) folders.push_back(child);
  }
  return folders;
}

std::vector<fs::path> files_of_records(const fs::path& root, bool (*wanted)(const fs::path&)) {
  std::vector<fs::path> files;
  for (const fs::path& folder : record_folders(root)) {
    for (const fs::path& child : children(folder))
      if (!is_real_folder(child) && wanted(child)) files.push_back(child);
  }
  return files;
}

std::vector<fs::path> unfinished_manifests(const fs::path& root) {
  std::vector<fs::path> files;
  if (is_link(root)) return files;
  for (const fs::path& child : children(root))
    if (!is_real_folder(child) && is_unfinished(child)) files.push_back(child);
  return files;
}

// Where a folder that is not there would be made, with the folders on the way to it.
fs::path existing_parent(fs::path folder) {
  std::error_code error;
  do folder = folder.has_parent_path() ? folder.parent_path() : fs::path(".");
  while (!fs::exists(folder, error) && folder != "." && folder.has_relative_path());
  return folder;
}

}  // namespace

bool is_arch_name(std::string_view name) {
  if (!name.starts_with("sm_")) return false;
  name.remove_prefix(3);
  if (!name.empty() && is_letter(name.back())) name.remove_suffix(1);
  return !name.empty() && name.size() <= 4 && std::all_of(name.begin(), name.end(), is_digit);
}

bool is_key_name(std::string_view name) {
  constexpr std::size_t kDigits = 32;
  if (name.size() < kDigits + 2 || name.size() > 200 || name[kDigits] != '-') return false;
  const std::string_view digest = name.substr(0, kDigits), tag = name.substr(kDigits + 1);
  return is_hexadecimal(digest) &&
         std::all_of(tag.begin(), tag.end(), [](char c) { return is_digit(c) || is_letter(c) || c == '.'; });
}

fs::path link_on_the_way(const fs::path& root, std::string_view name) {
  for (const fs::path& path : {root, root / name})
    if (is_link(path)) return path;
  return {};
}

std::string why_foreign(const fs::path& folder) {
  const auto another = [](const fs::path& path, const Owner& owner) {
    return fmt::format("'{}' belongs to another user ({})", path.string(), owner.name);
  };
  const std::optional<Owner> named = owner_of(folder, Links::kept);
  if (!named) {
    const fs::path parent = existing_parent(folder);
    const std::optional<Owner> owner = owner_of(parent, Links::followed);
    return !owner || owner->is_user || owner->is_system ? std::string() : another(parent, *owner);
  }
  if (!named->is_user) return another(folder, *named);
  const std::optional<Owner> target = owner_of(folder, Links::followed);
  if (!target) return {};  // a link to nothing holds nothing
  if (!target->is_user) return another(folder, *target);
  if (target->writers.empty()) return {};
  return fmt::format("other users may write to '{}' ({})", folder.string(), target->writers);
}

std::vector<EntryFolder> entry_folders(const fs::path& root) {
  std::vector<EntryFolder> folders;
  for (const fs::path& arch : children(root)) {
    if (!is_arch_name(arch.filename().string()) || !is_real_folder(arch)) continue;
    for (const fs::path& entry : children(arch)) {
      const std::string key = entry.filename().string();
      if (is_key_name(key)) folders.push_back({arch.filename().string(), key, entry});
    }
  }
  return folders;
}

std::uintmax_t folder_bytes(const fs::path& folder) {
  std::uintmax_t bytes = 0;
  for (const fs::path& file : children(folder)) {
    std::error_code error;
    const std::uintmax_t size = fs::is_regular_file(file, error) ? fs::file_size(file, error) : 0;
    if (!error) bytes += size;
  }
  return bytes;
}

// remove_leftovers() of another process may come between the making of a folder and its lock.
TemporaryFolder::TemporaryFolder(const fs::path& parent) {
  for (int attempt = 0; attempt < kFolderAttempts; ++attempt) {
    path_ = parent / unique_suffix();
    if (std::string cause = make_private_folders(path_); !cause.empty()) throw Error(ErrorCode::io, cause);
    if (lock_.lock_folder(path_) != FileLock::Attempt::taken && is_real_folder(path_)) return;
  }
  throw Error(ErrorCode::io, fmt::format("the temporary folders in '{}' are removed as soon as they are made",
                                         parent.string()));
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

std::vector<fs::path> remove_leftovers(const fs::path& root, std::chrono::seconds age) {
  std::vector<fs::path> removed;
  for (const fs::path& folder : own_children(root, kTemporaryFolder)) {
    if (!is_older(folder, age)) continue;
    when_free(folder, [&] {
      std::error_code error;
      if (fs::remove_all(folder, error) > 0 && !error) removed.push_back(folder);
    });
  }
  std::vector<fs::path> unfinished = files_of_records(root, is_unfinished);
  for (fs::path& file : unfinished_manifests(root)) unfinished.push_back(std::move(file));
  for (const fs::path& file : unfinished) {
    std::error_code error;
    if (is_older(file, std::max(age, kUnlockedAge)) && fs::remove(file, error)) removed.push_back(file);
  }
  return removed;
}

void remove_free_locks(const fs::path& root) {
  for (const fs::path& file : own_children(root, kLockFolder)) {
    if (file.extension() != ".lock") continue;
    when_free(file, [&] {
      std::error_code ignored;
      fs::remove(file, ignored);
    });
  }
}

bool remove_entry(const fs::path& root, const fs::path& entry) {
  std::error_code error;
  if (!is_real_folder(entry)) return fs::remove(entry, error);
  const std::vector<fs::path> files = children(entry);
  const bool whole = std::all_of(files.begin(), files.end(), is_entry_file);
  if (!whole || !make_own_folder(root, kTemporaryFolder)) {
    for (const fs::path& file : files) {
      if (is_entry_file(file)) fs::remove(file, error);
      if (error) return false;
    }
    return !whole || fs::remove(entry, error);
  }
  const fs::path away = root / kTemporaryFolder / unique_suffix();
  if (rename_folder(entry, away)) return false;
  fs::remove_all(away, error);
  return true;
}

std::vector<fs::path> record_files(const fs::path& root) { return files_of_records(root, is_record_file); }

void remove_records(const fs::path& root) {
  std::error_code ignored;
  for (const fs::path& file : files_of_records(
           root, [](const fs::path& path) { return is_record_file(path) || is_unfinished(path); }))
    fs::remove(file, ignored);
  const std::vector<fs::path> folders = record_folders(root);
  std::for_each(folders.rbegin(), folders.rend(), [&](const fs::path& folder) {
    fs::remove(folder, ignored);  // succeeds on empty ones alone
  });
}

void remove_manifest(const fs::path& root) {
  std::error_code ignored;
  fs::remove(root / kManifestFile, ignored);
  for (const fs::path& file : unfinished_manifests(root)) fs::remove(file, ignored);
}

void remove_empty_folders(const fs::path& root) {
  std::error_code ignored;  // fs::remove succeeds on empty folders alone
  for (const fs::path& child : children(root)) {
    const std::string name = child.filename().string();
    const bool ours = is_arch_name(name) || name == kTemporaryFolder || name == kLockFolder;
    if (ours && is_real_folder(child)) fs::remove(child, ignored);
  }
  fs::remove(root, ignored);
}

}  // namespace flashjit::cache
