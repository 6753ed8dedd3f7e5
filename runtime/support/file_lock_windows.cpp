#include <windows.h>

#include <chrono>
#include <thread>

#include "support/file.hpp"
#include "support/file_lock.hpp"

namespace flashjit {
namespace {

namespace fs = std::filesystem;

// A file that is being removed refuses everybody for a moment, in the words of one that nobody may open.
constexpr int kAttempts = 20;
constexpr auto kPause = std::chrono::milliseconds(1);

/// A folder cannot be opened for one process alone and renamed meanwhile: the file beside it can.
fs::path beside(const fs::path& folder) { return fs::path(folder).concat(L".lock"); }

}  // namespace

/// A file that only this handle may open, and that the system removes with it, also where the process dies.
struct FileLock::State {
  explicit State(HANDLE opened) : handle(opened) {}
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State() { ::CloseHandle(handle); }

  static Attempt take(const fs::path& path, DWORD creation, std::unique_ptr<State>& held) {
    for (int i = 0; i < kAttempts; ++i) {
      const HANDLE opened =
          ::CreateFileW(path.c_str(), GENERIC_READ | GENERIC_WRITE | DELETE, 0, nullptr, creation,
                        FILE_FLAG_DELETE_ON_CLOSE | FILE_FLAG_OPEN_REPARSE_POINT, nullptr);
      if (opened != INVALID_HANDLE_VALUE) {
        held = std::make_unique<State>(opened);
        return Attempt::held;
      }
      const DWORD error = ::GetLastError();
      if (error == ERROR_SHARING_VIOLATION) return Attempt::taken;
      if (error != ERROR_ACCESS_DENIED) break;
      std::this_thread::sleep_for(kPause);
    }
    return Attempt::broken;
  }

  HANDLE handle;
};

FileLock::FileLock() = default;
FileLock::FileLock(FileLock&&) noexcept = default;
FileLock& FileLock::operator=(FileLock&&) noexcept = default;
FileLock::~FileLock() = default;

FileLock::Attempt FileLock::lock_file(const fs::path& path) {
  return is_link(path) ? Attempt::broken : State::take(path, OPEN_ALWAYS, state_);
}

FileLock::Attempt FileLock::lock_folder(const fs::path& folder) {
  return State::take(beside(folder), OPEN_ALWAYS, state_);
}

FileLock::Attempt FileLock::lock_existing(const fs::path& path) {
  if (is_link(path)) return Attempt::broken;
  std::error_code error;
  return fs::is_directory(path, error) ? lock_folder(path) : State::take(path, OPEN_EXISTING, state_);
}

void FileLock::remove_and_release() { state_.reset(); }

}  // namespace flashjit
