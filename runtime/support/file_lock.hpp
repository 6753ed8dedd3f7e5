// Locks among processes, which the system releases when their holder dies.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>

namespace flashjit {

class FileLock {
 public:
  /// gone: what was opened was removed meanwhile, so that to lock it excludes nobody: try again. broken: it
  /// cannot be opened, or locks do not work there.
  enum class Attempt : std::uint8_t { held, taken, gone, broken };

  FileLock();
  FileLock(FileLock&&) noexcept;
  FileLock& operator=(FileLock&&) noexcept;
  /// Releases it.
  ~FileLock();

  /// Locks a lock file, and makes it if need be; a link is not followed. None of these waits.
  Attempt lock_file(const std::filesystem::path& path);
  /// Locks a folder, which others may use and rename meanwhile.
  Attempt lock_folder(const std::filesystem::path& folder);
  /// Locks a lock file or a folder that is there; a link is not followed.
  Attempt lock_existing(const std::filesystem::path& path);

  bool held() const { return state_ != nullptr; }
  /// Releases a lock file and removes it: processes that wait for it see that, and make another.
  void remove_and_release();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace flashjit
