// Where this build's libraries, programs and sources are.
#pragma once

#include <filesystem>
#include <string>

namespace flashjit::test {

/// By its path from the folder of this program: a folder of builds may be moved, or copied to another
/// machine.
inline std::string built(const char* path_from_program) {
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe");
  return (program.parent_path() / path_from_program).lexically_normal().string();
}

/// The repository's root, the same way: objects do not depend on where it lies.
inline std::string sources() { return built(FLASHJIT_SOURCES); }

}  // namespace flashjit::test
