#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "support/file_lock.hpp"
#include "support/file_posix.hpp"

namespace flashjit {

struct FileLock::State {
  State(int opened, std::filesystem::path name) : fd(opened), path(std::move(name)) {}
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State() { ::close(fd); }

  /// Locks what was opened, or says why not and closes it.
  static Attempt take(int fd, const std::filesystem::path& path, std::unique_ptr<State>& held) {
    if (fd < 0) return Attempt::broken;
    auto state = std::make_unique<State>(fd, path);
    if (::flock(fd, LOCK_EX | LOCK_NB) != 0)
      return errno == EWOULDBLOCK || errno == EINTR ? Attempt::taken : Attempt::broken;
    held = std::move(state);
    return Attempt::held;
  }

  /// Lock files are removed by their last holder, and by clear().
  bool is_named() const {
    struct stat opened {
    }, named{};
    return ::fstat(fd, &opened) == 0 && ::stat(path.c_str(), &named) == 0 && opened.st_ino == named.st_ino &&
           opened.st_dev == named.st_dev;
  }

  int fd;
  std::filesystem::path path;
};

FileLock::FileLock() = default;
FileLock::FileLock(FileLock&&) noexcept = default;
FileLock& FileLock::operator=(FileLock&&) noexcept = default;
FileLock::~FileLock() = default;

FileLock::Attempt FileLock::lock_file(const std::filesystem::path& path) {
  std::unique_ptr<State> state;
  const Attempt attempt = State::take(open_apart(path, O_RDWR | O_CREAT | O_NOFOLLOW, 0600), path, state);
  if (attempt == Attempt::held && !state->is_named()) return Attempt::gone;
  if (attempt == Attempt::held) state_ = std::move(state);
  return attempt;
}

FileLock::Attempt FileLock::lock_folder(const std::filesystem::path& folder) {
  return State::take(open_apart(folder, O_RDONLY | O_DIRECTORY), folder, state_);
}

FileLock::Attempt FileLock::lock_existing(const std::filesystem::path& path) {
  return State::take(open_apart(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK), path, state_);
}

void FileLock::remove_and_release() {
  if (!state_) return;
  if (state_->is_named()) ::unlink(state_->path.c_str());
  ::flock(state_->fd, LOCK_UN);  // a child forked meanwhile holds the descriptor too
  state_.reset();
}

}  // namespace flashjit
