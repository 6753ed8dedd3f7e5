#include "support/stderr.hpp"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <ctime>

namespace flashjit {
namespace {

/// Holds back what a failing write() sends to the thread, as its default action ends the process.
class WithoutSignals {
 public:
  WithoutSignals() noexcept {
    ::sigemptyset(&failed_);
    ::sigaddset(&failed_, SIGPIPE);
    ::sigaddset(&failed_, SIGXFSZ);
    ::sigset_t pending;
    ::sigpending(&pending);
    // One that waited before is not ours to take.
    if (::sigismember(&pending, SIGPIPE)) ::sigdelset(&failed_, SIGPIPE);
    if (::sigismember(&pending, SIGXFSZ)) ::sigdelset(&failed_, SIGXFSZ);
    ::pthread_sigmask(SIG_BLOCK, &failed_, &before_);
  }
  ~WithoutSignals() {
    constexpr std::timespec kNoWait{};
    while (::sigtimedwait(&failed_, nullptr, &kNoWait) > 0) continue;
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  WithoutSignals(const WithoutSignals&) = delete;
  WithoutSignals& operator=(const WithoutSignals&) = delete;

 private:
  ::sigset_t failed_, before_;
};

}  // namespace

bool stderr_is_open() noexcept { return ::fcntl(STDERR_FILENO, F_GETFD) != -1; }

void write_to_stderr(std::string_view text) noexcept {
  const int caller = errno;
  {
    const WithoutSignals guard;
    while (!text.empty()) {
      const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) break;
      text.remove_prefix(static_cast<std::size_t>(written));
    }
  }
  errno = caller;
}

}  // namespace flashjit
