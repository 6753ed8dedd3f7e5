// Files read whole and written atomically.
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <string>
#include <string_view>

namespace flashjit {

/// ::open() with O_CLOEXEC, and never the number of a standard stream that is closed: what the process prints
/// must not go into the file. -1 and errno where it fails.
int open_apart(const std::filesystem::path& path, int flags, unsigned mode = 0);

/// Larger than any file that flashjit keeps in a store or a pack. One that is larger is not ours, and must
/// not exhaust the memory.
inline constexpr std::uintmax_t kStoredFileLimit = 64u << 20;

/// The bytes of a regular file. Throws Error(io) that names the file and the cause, also before anything is
/// read of a file with more than `limit` bytes.
std::string read_file(const std::filesystem::path& path,
                      std::uintmax_t limit = std::numeric_limits<std::uintmax_t>::max());

/// Who may read the file: as the umask allows, or this user only.
enum class Audience : std::uint8_t { everyone, user };

/// Replaces or creates `path` so that a reader, or a crash, sees the old bytes or the new ones and nothing
/// between: a temporary file in the same folder, fsync, rename, fsync of the folder. The folder must exist.
/// Throws Error(io) and leaves no temporary file behind.
void write_file_atomically(const std::filesystem::path& path, std::string_view bytes,
                           Audience audience = Audience::everyone);

/// Writes a new file, and waits until the disk has it. Throws Error(io), also where there is one already.
void write_new_file(const std::filesystem::path& path, std::string_view bytes,
                    Audience audience = Audience::everyone);

/// How the names of those temporary files begin: a process that dies leaves one.
inline constexpr std::string_view kUnfinishedPrefix = ".tmp-";

/// Whether it is a symbolic link, wherever that leads.
bool is_link(const std::filesystem::path& path);

/// Makes the folder and its missing parents for this user alone. Returns what went wrong; empty: it is there.
std::string make_private_folders(const std::filesystem::path& folder);

/// Makes the names in a folder durable. Throws Error(io) when the folder cannot be opened or synced; file
/// systems that cannot sync folders count as synced.
void sync_folder(const std::filesystem::path& folder);

/// 24 random hexadecimal digits: no other thread, process or host makes the same name.
std::string unique_suffix();

}  // namespace flashjit
