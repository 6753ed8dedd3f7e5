// The text of a pack's manifest: whatever it holds, it is read as it is or refused.
#include "tools/parts/manifest.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "flashjit/error.hpp"
#include "support/file.hpp"
#include "tests/support/expectations.hpp"
#include "tests/support/run_command.hpp"

namespace flashjit::command {
namespace {

TEST(Manifest, EveryFlippedOrMissingByteIsRefusedOrNamesSomethingElse) {
  const std::vector<ManifestLine> lines{{std::string(64, '0'), "sm_90a/key/kernel.cubin"},
                                        {std::string(64, 'f'), "tuning/sm_90a/a.json"}};
  const std::string sound = to_text(lines);
  for_each_damage(sound, [&](const std::string& text) {
    try {
      const bool same = parse_manifest(text) == lines;
      EXPECT_EQ(same, text == sound.substr(0, sound.size() - 1))
          << "the last line's end says nothing: " << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::io) << text;
    }
  });
}

TEST(Manifest, ANameThatItCannotHaveIsRefusedWhereItIsWritten) {
  const test::TemporaryDirectory folder;
  std::filesystem::create_directories(folder.path() / "v1");
  write_file_atomically(folder.path() / "v1" / "plain", "x");
  EXPECT_EQ(write_manifest(folder.path()).size(), 64u);
  write_file_atomically(folder.path() / "v1" / "two\nlines", "x");
  EXPECT_EQ(check_manifest(folder.path()), std::vector<std::string>{"two\nlines is not named"});
  expect_in("holds 'two?lines'", failure(ErrorCode::io, [&] { write_manifest(folder.path()); }));
}

}  // namespace
}  // namespace flashjit::command
