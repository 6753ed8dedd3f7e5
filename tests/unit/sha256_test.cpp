// The digests of FIPS 180-4's examples, and every length around a block's end against `sha256sum`.
#include "tools/parts/sha256.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "support/file.hpp"

namespace flashjit::command {
namespace {

TEST(Sha256, OfTheStandardsExamples) {
  EXPECT_EQ(sha256("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(sha256(std::string(1000000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, OfAnyLengthAsSha256sumHasIt) {
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / ("flashjit-sha256-" + unique_suffix());
  std::filesystem::create_directories(folder);
  std::string bytes, digests;
  for (int length = 0; length <= 130; ++length) {
    write_file_atomically(folder / fmt::format("{:03}", length), bytes);
    digests += fmt::format("{}  {:03}\n", sha256(bytes), length);
    bytes += static_cast<char>(length * 37);
  }
  write_file_atomically(folder / "sums", digests);
  EXPECT_EQ(
      std::system(fmt::format("cd '{}' && sha256sum --check --strict --quiet sums", folder.string()).c_str()),
      0);
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace flashjit::command
