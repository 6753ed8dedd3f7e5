// A program whose pack is next to it.
#include <cstdio>
#include <filesystem>
#include <flashjit/flashjit.hpp>

int main() {
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe");
  const std::filesystem::path pack = program.parent_path() / FLASHJIT_PACK;
  for (const char* arch : {"sm_80", "sm_90a"}) {
    const std::filesystem::path kernels = pack / "v1" / arch;
    if (!std::filesystem::is_directory(kernels) || std::filesystem::is_empty(kernels)) {
      std::fprintf(stderr, "%s has no kernels\n", kernels.c_str());
      return 1;
    }
  }
  flashjit::Runtime runtime({.packs = {pack}, .jit = flashjit::JitMode::off});
  std::printf("pack: %s\n", pack.c_str());
  return 0;
}
