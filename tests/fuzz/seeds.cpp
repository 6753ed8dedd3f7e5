// Writes what each parser reads into a folder of its own: flashjit_fuzz_seeds FOLDER.
#include <cstdio>
#include <filesystem>

#include "support/file.hpp"
#include "tests/support/parsers.hpp"

int main(int count, char** arguments) {
  if (count != 2) return std::fputs("usage: flashjit_fuzz_seeds FOLDER\n", stderr), 2;
  for (const auto& parser : flashjit::test::parsers()) {
    const std::filesystem::path folder = std::filesystem::path(arguments[1]) / parser.name;
    std::filesystem::create_directories(folder);
    for (std::size_t i = 0; i < parser.seeds.size(); ++i)
      flashjit::write_file_atomically(folder / ("seed" + std::to_string(i)), parser.seeds[i]);
  }
}
