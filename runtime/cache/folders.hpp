// The names of a store's folders, and how they are made and removed.
#pragma once

#include <chrono>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "support/file_lock.hpp"

namespace flashjit::cache {

inline constexpr std::string_view kVersionFolder = "v1";
inline constexpr std::string_view kTemporaryFolder = "tmp";
inline constexpr std::string_view kLockFolder = "locks";
inline constexpr std::string_view kTuningFolder = "tuning";
inline constexpr std::string_view kSourceFile = "kernel.cu";
inline constexpr std::string_view kCubinFile = "kernel.cubin";
inline constexpr std::string_view kMetaFile = "meta.json";
inline constexpr std::string_view kManifestFile = "SHA256SUMS";  ///< of a pack

/// "sm_90a": what may name an architecture's folder.
bool is_arch_name(std::string_view name);
/// "<32 hexadecimal digits>-<compiler tag>": what may name an entry's folder.
bool is_key_name(std::string_view name);

/// The folder of one entry: `$dir/v1/<arch>/<key>`.
struct EntryFolder {
  std::string arch, key;
  std::filesystem::path path;
};

/// The first that is a link: `root` (= `$dir/v1`), or the folder of this name in it; empty: neither is. What
/// lies behind a link belongs to others: it is read, and never changed.
std::filesystem::path link_on_the_way(const std::filesystem::path& root, std::string_view name);

/// Why what a folder holds cannot be taken for this user's own, as the code in a cache must be; empty: it
/// can. Another user owns it, or a link that it is, or its group or all others may write to it. Where there
/// is none, the folder that it would be made in decides, which may be the system's.
std::string why_foreign(const std::filesystem::path& folder);

/// Every entry's folder below `root`, sorted; what does not bear an entry's name is passed
/// over, and so is an architecture's folder that is a link to somewhere else.
std::vector<EntryFolder> entry_folders(const std::filesystem::path& root);
/// Bytes of the regular files in a folder.
std::uintmax_t folder_bytes(const std::filesystem::path& folder);

/// A folder of its own below `parent`, gone with this object unless it was renamed. Locked while it lives,
/// where locks work, so that remove_leftovers() can tell it from one whose process died.
class TemporaryFolder {
 public:
  /// Throws Error(io).
  explicit TemporaryFolder(const std::filesystem::path& parent);
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder();
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  FileLock lock_;
};

/// Removes what dead processes left behind: temporary folders that are not locked, and the temporary files of
/// records and manifests, which are not locked, after an hour. Those that are younger than `age` stay.
/// Returns the paths.
std::vector<std::filesystem::path> remove_leftovers(const std::filesystem::path& root,
                                                    std::chrono::seconds age = {});
/// Removes the lock files that are not locked.
void remove_free_locks(const std::filesystem::path& root);
/// Removes an entry at once for every reader, by renaming it away first; file by file where that cannot be. A
/// folder that holds more than an entry's files keeps the rest. Returns whether the entry is gone.
bool remove_entry(const std::filesystem::path& root, const std::filesystem::path& entry);
/// The files of the tuning records, sorted; links to other folders are not followed.
std::vector<std::filesystem::path> record_files(const std::filesystem::path& root);
/// Removes the tuning records and the folders that this empties.
void remove_records(const std::filesystem::path& root);
/// Removes a pack's manifest, and what processes that died left of one.
void remove_manifest(const std::filesystem::path& root);
/// Removes the store's own folders as far as they are empty.
void remove_empty_folders(const std::filesystem::path& root);

}  // namespace flashjit::cache
