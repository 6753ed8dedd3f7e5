// Files read whole and written atomically.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <string>
#include <string_view>
#include <system_error>

namespace flashjit {

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

/// Writes a file that the user named, as write_file_atomically(). A link stays, and a device or a pipe, such
/// as /dev/stdout, gets the bytes.
void write_output(const std::filesystem::path& path, std::string_view bytes);

/// How the names of those temporary files begin: a process that dies leaves one.
inline constexpr std::string_view kUnfinishedPrefix = ".tmp-";

/// Whether it is a symbolic link, or a junction of Windows, wherever that leads.
bool is_link(const std::filesystem::path& path);

/// Whether it is a folder itself, and no link to one.
bool is_real_folder(const std::filesystem::path& path);

/// Renames a folder. To one that is there it fails, unless the system replaces empty ones.
std::error_code rename_folder(const std::filesystem::path& from, const std::filesystem::path& to);

/// Sets the file's time of change to now; a link's own. Where it cannot, the time stays.
void touch_file(const std::filesystem::path& path);

/// Makes the folder and its missing parents for this user alone. Returns what went wrong; empty: it is there.
std::string make_private_folders(const std::filesystem::path& folder);

/// Makes the names in a folder durable. Throws Error(io) when the folder cannot be opened or synced; file
/// systems that cannot sync folders count as synced.
void sync_folder(const std::filesystem::path& folder);

/// What each system does in its own way for the functions above. make_private_folder() returns what went
/// wrong.
std::string make_private_folder(const std::filesystem::path& folder);
std::array<std::uint32_t, 3> random_words();
[[noreturn]] void fail_to(std::string_view action, const std::filesystem::path& path, std::string_view cause);

/// 24 random hexadecimal digits: no other thread, process or host makes the same name.
std::string unique_suffix();

}  // namespace flashjit
