#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <thread>
#include <utility>

#include "cache/folders.hpp"
#include "cache/store.hpp"
#include "support/file.hpp"

namespace flashjit::cache {
namespace {

constexpr auto kPollInterval = std::chrono::milliseconds(5);
constexpr auto kSilence = std::chrono::seconds(2);

// Lock files are removed by their last holder, and by clear(): a lock on a file that has no name any more
// excludes no process.
bool still_named(int fd, const std::filesystem::path& path) {
  struct stat opened {
  }, named{};
  return ::fstat(fd, &opened) == 0 && ::stat(path.c_str(), &named) == 0 && opened.st_ino == named.st_ino &&
         opened.st_dev == named.st_dev;
}

}  // namespace

Store::Lock& Store::Lock::operator=(Lock&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(path_, other.path_);
  return *this;
}

Store::Lock::~Lock() {
  if (fd_ < 0) return;
  if (still_named(fd_, path_))
    ::unlink(path_.c_str());  // processes that wait for it see that, and make another
  ::flock(fd_, LOCK_UN);      // a child forked meanwhile holds the descriptor too
  ::close(fd_);
}

Store::Lock Store::lock(const std::string& arch, const std::string& key, double timeout_seconds) const {
  if (folder_.empty() || access_ == Access::read_only || !is_arch_name(arch) || !is_key_name(key) ||
      !is_usable(arch))
    return {};
  const std::filesystem::path folder = root() / kLockFolder;
  if (!link_on_the_way(root(), kLockFolder).empty() || !make_private_folders(folder).empty()) return {};
  const std::filesystem::path path = folder / fmt::format("{}-{}.lock", arch, key);

  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  const auto deadline = begin + std::chrono::duration<double>(timeout_seconds);
  bool told = false;
  do {
    const int fd = open_apart(path, O_RDWR | O_CREAT | O_NOFOLLOW, 0600);
    if (fd < 0) return {};
    if (::flock(fd, LOCK_EX | LOCK_NB) == 0) {
      if (still_named(fd, path)) return {fd, path};
      ::close(fd);
      continue;
    }
    const bool taken = errno == EWOULDBLOCK || errno == EINTR;
    ::close(fd);
    if (!taken) return {};
    std::this_thread::sleep_for(kPollInterval);
    if (!told && Clock::now() - begin > kSilence) {
      told = true;
      warn(fmt::format("waiting for another process that compiles the same kernel, {:.0f} s at most ('{}')",
                       timeout_seconds, path.string()));
    }
  } while (Clock::now() < deadline);
  return {};
}

}  // namespace flashjit::cache
