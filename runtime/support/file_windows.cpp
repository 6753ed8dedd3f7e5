#include <fmt/format.h>
#include <windows.h>
// windows.h first.
#include <bcrypt.h>
#include <sddl.h>

#include <chrono>
#include <limits>
#include <thread>
#include <utility>
#include <vector>

#include "flashjit/error.hpp"
#include "support/file.hpp"
#include "support/utf16.hpp"

namespace flashjit {
namespace {

namespace fs = std::filesystem;

constexpr DWORD kShareAll = FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE;
// Another process that reads a file, or a scanner of viruses, is in the way of a rename for a moment.
constexpr int kRenameAttempts = 200;
constexpr auto kRenamePause = std::chrono::milliseconds(5);

class File {
 public:
  File(const fs::path& path, DWORD access, DWORD creation)
      : handle_(::CreateFileW(path.c_str(), access, kShareAll, nullptr, creation, FILE_ATTRIBUTE_NORMAL,
                              nullptr)) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() { close(); }

  explicit operator bool() const { return handle_ != INVALID_HANDLE_VALUE; }
  HANDLE get() const { return handle_; }
  bool close() { return !*this || ::CloseHandle(std::exchange(handle_, INVALID_HANDLE_VALUE)) != 0; }

 private:
  HANDLE handle_;
};

DWORD piece(std::size_t bytes) { return static_cast<DWORD>(std::min<std::size_t>(bytes, 1u << 30)); }

/// Also waits until the disk has all, and closes it.
bool write_and_close(File& file, std::string_view bytes) {
  while (!bytes.empty()) {
    DWORD written = 0;
    if (!::WriteFile(file.get(), bytes.data(), piece(bytes.size()), &written, nullptr)) return false;
    bytes.remove_prefix(written);
  }
  return ::FlushFileBuffers(file.get()) && file.close();
}

DWORD rename_once(const fs::path& from, const fs::path& to, DWORD flags) {
  return ::MoveFileExW(from.c_str(), to.c_str(), flags) ? ERROR_SUCCESS : ::GetLastError();
}

bool may_pass(DWORD error) {
  return error == ERROR_ACCESS_DENIED || error == ERROR_SHARING_VIOLATION || error == ERROR_LOCK_VIOLATION;
}

/// Until it works or cannot; `hopeless` says of the target that waiting will not help.
template <class Hopeless>
DWORD rename_with_patience(const fs::path& from, const fs::path& to, DWORD flags, Hopeless hopeless) {
  DWORD error = rename_once(from, to, flags);
  for (int i = 1; i < kRenameAttempts && may_pass(error) && !hopeless(); ++i) {
    std::this_thread::sleep_for(kRenamePause);
    error = rename_once(from, to, flags);
  }
  return error;
}

/// This user's SID as text, for a descriptor.
std::wstring user_sid() {
  HANDLE token = nullptr;
  if (!::OpenProcessToken(::GetCurrentProcess(), TOKEN_QUERY, &token)) return {};
  DWORD size = 0;
  ::GetTokenInformation(token, TokenUser, nullptr, 0, &size);
  std::vector<std::uint64_t> room(size / sizeof(std::uint64_t) + 1);
  const bool got = ::GetTokenInformation(token, TokenUser, room.data(), size, &size) != 0;
  ::CloseHandle(token);
  wchar_t* text = nullptr;
  if (!got || !::ConvertSidToStringSidW(reinterpret_cast<TOKEN_USER*>(room.data())->User.Sid, &text))
    return {};
  std::wstring sid = text;
  ::LocalFree(text);
  return sid;
}

}  // namespace

std::string read_file(const fs::path& path, std::uintmax_t limit) {
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) fail_to("read", path, "it is not a regular file");
  const File file(path, GENERIC_READ, OPEN_EXISTING);
  if (!file) fail_to("read", path, last_windows_error());
  LARGE_INTEGER size{};
  if (::GetFileType(file.get()) != FILE_TYPE_DISK) fail_to("read", path, "it is not a regular file");
  if (!::GetFileSizeEx(file.get(), &size)) fail_to("read", path, last_windows_error());
  const auto bytes_there = static_cast<std::uintmax_t>(size.QuadPart);
  if (bytes_there > limit)
    fail_to("read", path, fmt::format("it has {} bytes, but may have at most {}", bytes_there, limit));

  std::string bytes(static_cast<std::size_t>(bytes_there), '\0');
  std::size_t filled = 0;
  while (filled < bytes.size()) {
    DWORD got = 0;
    if (!::ReadFile(file.get(), bytes.data() + filled, piece(bytes.size() - filled), &got, nullptr))
      fail_to("read", path, last_windows_error());
    if (got == 0) break;
    filled += got;
  }
  bytes.resize(filled);
  return bytes;
}

// A file is as private as its folder, whose access control list it inherits.
void write_new_file(const fs::path& path, std::string_view bytes, Audience) {
  File file(path, GENERIC_WRITE, CREATE_NEW);
  if (!file || !write_and_close(file, bytes)) fail_to("write", path, last_windows_error());
}

void write_file_atomically(const fs::path& path, std::string_view bytes, Audience) {
  const fs::path folder = path.has_parent_path() ? path.parent_path() : ".";
  const fs::path temporary = folder / (std::string(kUnfinishedPrefix) + unique_suffix());
  File file(temporary, GENERIC_WRITE, CREATE_NEW);
  if (!file) fail_to("write", path, last_windows_error());
  DWORD error = write_and_close(file, bytes) ? ERROR_SUCCESS : ::GetLastError();
  std::error_code ignored;
  if (error == ERROR_SUCCESS)
    error = rename_with_patience(temporary, path, MOVEFILE_REPLACE_EXISTING | MOVEFILE_WRITE_THROUGH,
                                 [&] { return fs::is_directory(path, ignored); });
  if (error == ERROR_SUCCESS) return;
  file.close();
  ::DeleteFileW(temporary.c_str());
  fail_to("write", path, windows_error(error));
}

bool is_link(const fs::path& path) {
  WIN32_FIND_DATAW found{};
  const HANDLE search = ::FindFirstFileW(path.c_str(), &found);
  if (search == INVALID_HANDLE_VALUE) return false;
  ::FindClose(search);
  return (found.dwFileAttributes & FILE_ATTRIBUTE_REPARSE_POINT) != 0 &&
         (found.dwReserved0 == IO_REPARSE_TAG_SYMLINK || found.dwReserved0 == IO_REPARSE_TAG_MOUNT_POINT);
}

bool is_real_folder(const fs::path& path) {
  std::error_code error;
  return fs::is_directory(path, error) && !is_link(path);
}

std::string make_private_folder(const fs::path& folder) {
  // Full access for this user, the system and administrators, none inherited; files and folders in it follow.
  const std::wstring text = L"D:P(A;OICI;FA;;;" + user_sid() + L")(A;OICI;FA;;;SY)(A;OICI;FA;;;BA)";
  PSECURITY_DESCRIPTOR descriptor = nullptr;
  if (!::ConvertStringSecurityDescriptorToSecurityDescriptorW(text.c_str(), SDDL_REVISION_1, &descriptor,
                                                              nullptr))
    return last_windows_error();
  SECURITY_ATTRIBUTES attributes{sizeof attributes, descriptor, FALSE};
  const bool made = ::CreateDirectoryW(folder.c_str(), &attributes) != 0;
  std::string problem = made ? std::string() : last_windows_error();
  ::LocalFree(descriptor);
  return problem;
}

std::error_code rename_folder(const fs::path& from, const fs::path& to) {
  std::error_code ignored;
  const DWORD error = rename_with_patience(from, to, 0, [&] { return fs::exists(to, ignored); });
  return {static_cast<int>(error), std::system_category()};
}

void touch_file(const fs::path& path) {
  const HANDLE file = ::CreateFileW(path.c_str(), FILE_WRITE_ATTRIBUTES, kShareAll, nullptr, OPEN_EXISTING,
                                    FILE_FLAG_OPEN_REPARSE_POINT, nullptr);
  if (file == INVALID_HANDLE_VALUE) return;
  FILETIME now{};
  ::GetSystemTimeAsFileTime(&now);
  ::SetFileTime(file, nullptr, nullptr, &now);
  ::CloseHandle(file);
}

// NTFS writes names to its journal by itself.
void sync_folder(const fs::path& folder) {
  std::error_code error;
  if (!fs::is_directory(folder, error)) fail_to("open folder", folder, "it is no folder");
}

std::array<std::uint32_t, 3> random_words() {
  std::array<std::uint32_t, 3> words{};
  if (::BCryptGenRandom(nullptr, reinterpret_cast<unsigned char*>(words.data()), sizeof words,
                        BCRYPT_USE_SYSTEM_PREFERRED_RNG) != 0)
    throw Error(ErrorCode::io, "the system's random number source cannot be read");
  return words;
}

}  // namespace flashjit
