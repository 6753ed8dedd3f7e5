#include "support/file_posix.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <system_error>
#include <utility>

#include "flashjit/error.hpp"
#include "support/file.hpp"

namespace flashjit {
namespace {

std::string last_error() { return std::generic_category().message(errno); }

class Descriptor {
 public:
  Descriptor(const std::filesystem::path& path, int flags, ::mode_t mode = 0)
      : fd_(open_apart(path, flags, mode)) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() { close(); }

  explicit operator bool() const { return fd_ >= 0; }
  int get() const { return fd_; }
  /// Network file systems report a failed write only here.
  bool close() { return fd_ < 0 || ::close(std::exchange(fd_, -1)) == 0; }

 private:
  int fd_;
};

bool write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return false;
    bytes.remove_prefix(static_cast<std::size_t>(n));
  }
  return true;
}

::mode_t mode_for(Audience audience) { return audience == Audience::user ? 0600 : 0666; }

/// Also waits until the disk has all, and closes it.
bool write_and_close(Descriptor& file, std::string_view bytes) {
  return write_all(file.get(), bytes) && ::fsync(file.get()) == 0 && file.close();
}

}  // namespace

int open_apart(const std::filesystem::path& path, int flags, unsigned mode) {
  const int fd = ::open(path.c_str(), flags | O_CLOEXEC, mode);
  if (fd < 0 || fd > STDERR_FILENO) return fd;
  const int apart = ::fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  const int cause = errno;
  ::close(fd);
  errno = cause;
  return apart;
}

std::string read_file(const std::filesystem::path& path, std::uintmax_t limit) {
  // Without O_NONBLOCK, opening a pipe would wait for a writer before its kind can be asked.
  const Descriptor file(path, O_RDONLY | O_NONBLOCK);
  struct stat status {};
  if (!file || ::fstat(file.get(), &status) != 0) fail_to("read", path, last_error());
  if (!S_ISREG(status.st_mode)) fail_to("read", path, "it is not a regular file");
  if (const auto size = static_cast<std::uintmax_t>(status.st_size); size > limit)
    fail_to("read", path, fmt::format("it has {} bytes, but may have at most {}", size, limit));

  std::string bytes(static_cast<std::size_t>(status.st_size), '\0');
  std::size_t filled = 0;
  while (filled < bytes.size()) {
    const ssize_t n = ::read(file.get(), bytes.data() + filled, bytes.size() - filled);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_to("read", path, last_error());
    if (n == 0) break;
    filled += static_cast<std::size_t>(n);
  }
  bytes.resize(filled);
  return bytes;
}

void write_new_file(const std::filesystem::path& path, std::string_view bytes, Audience audience) {
  Descriptor file(path, O_WRONLY | O_CREAT | O_EXCL, mode_for(audience));
  if (!file || !write_and_close(file, bytes)) fail_to("write", path, last_error());
}

void write_file_atomically(const std::filesystem::path& path, std::string_view bytes, Audience audience) {
  const std::filesystem::path folder = path.has_parent_path() ? path.parent_path() : ".";
  const std::filesystem::path temporary = folder / (std::string(kUnfinishedPrefix) + unique_suffix());
  Descriptor file(temporary, O_WRONLY | O_CREAT | O_EXCL, mode_for(audience));
  if (!file) fail_to("write", path, last_error());
  const bool written = write_and_close(file, bytes) && ::rename(temporary.c_str(), path.c_str()) == 0;
  if (!written) {
    const std::string cause = last_error();
    ::unlink(temporary.c_str());
    fail_to("write", path, cause);
  }
  sync_folder(folder);
}

bool is_link(const std::filesystem::path& path) {
  std::error_code error;
  return std::filesystem::is_symlink(std::filesystem::symlink_status(path, error));
}

bool is_real_folder(const std::filesystem::path& path) {
  std::error_code error;
  return std::filesystem::symlink_status(path, error).type() == std::filesystem::file_type::directory;
}

std::string make_private_folder(const std::filesystem::path& folder) {
  return ::mkdir(folder.c_str(), 0700) == 0 ? std::string() : last_error();
}

std::error_code rename_folder(const std::filesystem::path& from, const std::filesystem::path& to) {
  std::error_code error;
  std::filesystem::rename(from, to, error);
  return error;
}

void touch_file(const std::filesystem::path& path) {
  ::utimensat(AT_FDCWD, path.c_str(), nullptr, AT_SYMLINK_NOFOLLOW);
}

void sync_folder(const std::filesystem::path& folder) {
  const Descriptor descriptor(folder, O_RDONLY | O_DIRECTORY);
  if (!descriptor) fail_to("open folder", folder, last_error());
  if (::fsync(descriptor.get()) != 0 && errno != EINVAL && errno != ENOTSUP) {
    fail_to("sync folder", folder, last_error());
  }
}

std::array<std::uint32_t, 3> random_words() {
  std::array<std::uint32_t, 3> words{};
  if (::getrandom(words.data(), sizeof words, 0) != static_cast<ssize_t>(sizeof words))
    throw Error(ErrorCode::io, "the system's random number source cannot be read: " + last_error());
  return words;
}

}  // namespace flashjit
