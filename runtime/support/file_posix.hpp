// For the files of POSIX alone.
#pragma once

#include <filesystem>

namespace flashjit {

/// ::open() with O_CLOEXEC, and never the number of a standard stream that is closed: what the process prints
/// must not go into the file. -1 and errno where it fails.
int open_apart(const std::filesystem::path& path, int flags, unsigned mode = 0);

}  // namespace flashjit
